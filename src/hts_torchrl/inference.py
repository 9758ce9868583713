"""Batched answers of a policy that depend on each row alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Independent

from hts_torchrl.config import ArraySpec, EnvSpec, Key, Precision
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.policy import Evaluation, evaluate, probabilistic_module
from hts_torchrl.policy_probe import (
    OTHERS,
    TORCH,
    described,
    differ,
    drawing_modules,
    noting_draws,
    varying_modules,
)
from hts_torchrl.sampling import RowDistribution, mode, sample

Array = np.ndarray[Any, Any]

_CHANCE = "chance must come from the policy's distribution"


class PolicyInference:
    """Runs a policy on batches of one fixed shape, one thread, sampling from given draws.

    A row's last bits change with the size of the batch (and, with several threads, with its place
    in it), so every pass has ``batch_size`` rows, the missing ones filled with whatever was there.

    With ``bf16-mixed`` the weights of linear and convolutional layers are cast once and not in
    every pass, as autocast would: give it a copy of a policy that is trained.

    Example:
        >>> inference = PolicyInference(policy, spec, batch_size=8)   # doctest: +SKIP
        >>> answers = inference.answer(observations, draws)           # doctest: +SKIP
    """

    def __init__(
        self,
        policy: nn.Module,
        spec: EnvSpec,
        *,
        batch_size: int,
        device: str = "cpu",
        precision: Precision = "32-true",
    ) -> None:
        self.policy = policy.to(device).eval()
        self.batch_size = batch_size
        self._device = torch.device(device)
        self._bf16 = precision == "bf16-mixed"
        if self._bf16:
            _cast_weights(self.policy)
        self._inputs: dict[Key, Tensor] = {
            key: torch.zeros(batch_size, *array.shape, dtype=_torch_dtype(array.dtype))
            for key, array in spec.observations.items()
        }
        self._draws = torch.full((batch_size, spec.action.num_draws), 0.5, dtype=torch.float64)
        module = probabilistic_module(policy)
        if module.out_keys[0] != "action":
            raise ConfigurationError(
                f"the policy writes its action to {module.out_keys[0]!r}; 'action' is needed"
            )
        self._head = module
        self._log_prob: Key = module.log_prob_key if module.return_log_prob else "action_log_prob"
        self._action = spec.action

    def answer(
        self, observations: Mapping[Key, Array], draws: Array, *, greedy: bool = False
    ) -> dict[Key, Array]:
        """Answer any number of rows, ``batch_size`` of them a pass.

        Args:
            observations: arrays ``[R, ...]``.
            draws: float64 ``[R, K]``, as :func:`sample` takes them.
            greedy: the likeliest action instead of a drawn one.

        Returns:
            Action, float32 log-probability ``[R]`` and, if the policy has one, value ``[R, 1]``.
        """
        rows = len(draws)
        parts = [
            self._answer(observations, draws, slice(first, first + self.batch_size), greedy)
            for first in range(0, rows, self.batch_size)
        ]
        if len(parts) == 1:
            return parts[0]
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    def _answer(
        self, observations: Mapping[Key, Array], draws: Array, rows: slice, greedy: bool
    ) -> dict[Key, Array]:
        taken = len(draws[rows])
        for key, batch in self._inputs.items():
            batch.numpy()[:taken] = observations[key][rows]
        self._draws.numpy()[:taken] = draws[rows]
        # Copies, because a policy may answer with a view of its input, which the next pass fills.
        return {key: value[:taken].numpy().copy() for key, value in self._run(greedy).items()}

    def _run(self, greedy: bool) -> dict[Key, Tensor]:
        return {key: value.cpu() for key, value in self._pass(greedy)[0].items()}

    def _pass(self, greedy: bool) -> tuple[dict[Key, Tensor], Evaluation]:
        inputs = {key: value.to(self._device) for key, value in self._inputs.items()}
        with torch.no_grad(), one_thread():
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
                result = evaluate(self.policy, inputs, self.batch_size)
            dist = result.distribution
            if greedy:
                action = mode(dist)
            else:
                action = sample(dist, self._draws.to(self._device), self._row_distribution(result))
            log_prob = dist.log_prob(action).float()
            if action.dtype is torch.bfloat16:  # which numpy does not have
                action = action.float()
            answers: dict[Key, Tensor] = {"action": action, self._log_prob: log_prob}
            if result.value is not None:
                answers["state_value"] = result.value.float()
        return answers, result

    def _row_distribution(self, result: Evaluation) -> RowDistribution | None:
        written = result.written
        if not isinstance(written, TensorDictBase):
            return None
        return lambda row: self._head.get_dist(written[row : row + 1])

    def outputs(self) -> dict[Key, ArraySpec]:
        """Return shape and dtype of each answer, without the row dimension.

        Raises:
            ConfigurationError: if the policy cannot read the observation, its action is not what
                the environment accepts, or more than observation and draw decide its answer.
        """
        try:
            with noting_draws((*TORCH, *OTHERS)) as drawn:
                tensors, result = self._pass(greedy=False)
        except RuntimeError as error:  # torch's word for shapes and types that do not fit
            observations = {str(key): tuple(rows.shape[1:]) for key, rows in self._inputs.items()}
            raise ConfigurationError(
                f"the policy does not fit the environment (observations of shape {observations}, "
                f"actions of shape {self._action.array.shape}): {error}"
            ) from error
        self._refuse_chance(drawn, result)
        answers = {key: value.cpu().numpy() for key, value in tensors.items()}
        specs = {key: ArraySpec(value.shape[1:], value.dtype) for key, value in answers.items()}
        wanted = self._action.array.shape
        if specs["action"].shape != wanted:
            raise ConfigurationError(
                f"the policy's action has shape {specs['action'].shape}, but the environment "
                f"accepts {wanted} ({self._action.kind})"
            )
        dist, most = result.distribution, max(self._action.sizes, default=0)
        if _is_discrete(dist, tensors["action"]) == (self._action.kind == "continuous"):
            raise ConfigurationError(
                f"the policy draws actions from a {type(dist).__name__}, but the environment's are "
                f"{self._action.kind}"
            )
        if isinstance(dist, Categorical) and dist.probs.shape[-1] != most:
            raise ConfigurationError(
                f"the policy chooses among {dist.probs.shape[-1]} actions, but the environment has "
                f"{most} ({self._action.kind})"
            )
        return specs

    def _refuse_chance(self, drawn: Sequence[str], first: Evaluation) -> None:
        """Refuse a policy whose answers depend on who gives them, and when."""
        for generator in drawn:
            # Asked again, because another thread may have drawn.
            modules = drawing_modules(self.policy, self._run_again, generator)
            if modules:
                raise ConfigurationError(
                    f"the policy draws from {generator} in eval mode, in "
                    f"{described(self.policy, modules)}: an "
                    f"action would depend on which actor chose it; {_CHANCE}"
                )
        _, second = self._pass(greedy=False)
        if differ(_written(first), _written(second)):
            modules = varying_modules(self.policy, self._run_again)
            raise ConfigurationError(
                "in eval mode the policy answers the same observation differently when asked again"
                f" (look at {described(self.policy, modules or [''])}): an action would depend on "
                f"which actor chose it; {_CHANCE}, and memory must be in the observation"
            )

    def _run_again(self, _: nn.Module) -> None:
        self._pass(greedy=False)

    def depends_on_row_alone(self, trials: int = 8) -> bool:
        """Return whether a row keeps its bits at another place, and among other rows.

        Rolls random observations through all places of the batch, then replaces all rows but one,
        and compares every bit of all that the policy computes: a difference in a logit shows in a
        probability once in hundreds of times.
        """
        generator = np.random.default_rng(0)
        for _ in range(trials):
            self._fill(generator)
            before = self._everything()
            for shift in range(1, self.batch_size):
                self._roll()
                rolled = [value.roll(shift, 0) for value in before]
                if not _same_bits(self._everything(), rolled):
                    return False
            self._roll()
            kept = [value[:1].clone() for value in self._rows()]
            self._fill(generator)
            for value, row in zip(self._rows(), kept, strict=True):
                value[:1] = row
            first = [value[:1] for value in self._everything()]
            if not _same_bits(first, [value[:1] for value in before]):
                return False
        return True

    def _everything(self) -> list[Tensor]:
        answers, result = self._pass(greedy=False)
        # Clones, because the inputs are among them and are about to be rolled.
        return [value.clone() for value in (*answers.values(), *_written(result))]

    def _rows(self) -> list[Tensor]:
        return [*self._inputs.values(), self._draws]

    def _fill(self, generator: np.random.Generator) -> None:
        for value in self._inputs.values():
            batch = value.numpy()
            if batch.dtype.kind in "iub":
                high = 256 if batch.dtype == np.uint8 else 2
                batch[...] = generator.integers(0, high, batch.shape)
            else:
                batch[...] = generator.standard_normal(batch.shape)
        self._draws.numpy()[...] = generator.random(self._draws.shape)

    def _roll(self) -> None:
        for value in self._rows():
            value.copy_(value.roll(1, 0))


def _written(result: Evaluation) -> list[Tensor]:
    written = result.written
    if isinstance(written, TensorDictBase):
        written = dict(written.items(include_nested=True, leaves_only=True))
    return list(written.values())


def _is_discrete(dist: Distribution, action: Tensor) -> bool:
    while isinstance(dist, Independent):
        dist = dist.base_dist
    return isinstance(dist, Bernoulli) or not action.is_floating_point()


def _same_bits(values: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, values, others))


def _cast_weights(policy: nn.Module) -> None:
    for module in policy.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            module.to(torch.bfloat16)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run with one intra-op thread: with more, a row's bits depend on its place in the batch."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
