"""Batched answers of a policy that depend on each row alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, unravel_key
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
_TAKEN = {"next", "collector", "done", "terminated", "truncated"}


class PolicyInference:
    """Runs a policy on batches of one fixed shape, one thread, sampling from given draws.

    A row's last bits change with the size of the batch (and, with several threads, with its place
    in it), so every pass has ``batch_size`` rows, the missing ones filled with whatever was there.

    With ``bf16-mixed`` the weights of linear and convolutional layers are cast once and not in
    every pass, as autocast would: give it a copy of a policy that is trained.

    Args:
        policy: moved to ``device`` and put in eval mode.
        spec: observations and actions of the environment.
        batch_size: rows of every pass.
        device: where it computes.
        precision: in Lightning's words.
        extras: what to answer beside action, log-probability and value, by TensorDict key.

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
        extras: Sequence[Key] = (),
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
        if module.dist_sample_keys != [spec.action.key]:
            raise ConfigurationError(
                f"the policy writes its action to {_words(module.dist_sample_keys)}; "
                f"{spec.action.key!r} is needed"
            )
        self._head = module
        self._log_prob: Key = module.log_prob_key
        self._action = spec.action
        self.extras = list(extras)

    def answer(
        self, observations: Mapping[Key, Array], draws: Array, *, greedy: bool = False
    ) -> dict[Key, Array]:
        """Answer any number of rows, ``batch_size`` of them a pass.

        Args:
            observations: arrays ``[R, ...]``.
            draws: float64 ``[R, K]``, as :func:`sample` takes them.
            greedy: the likeliest action instead of a drawn one.

        Returns:
            Action, float32 log-probability ``[R]``, value ``[R, 1]`` if the policy has one, and the
            extras.
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
            answers: dict[Key, Tensor] = {self._action.key: action, self._log_prob: log_prob}
            if result.value is not None:
                answers["state_value"] = result.value.float()
            for key in self.extras:
                answers[key] = result.written[key]
            for key, answer in answers.items():
                if answer.dtype is torch.bfloat16:  # which numpy does not have
                    answers[key] = answer.float()
        return answers, result

    def _row_distribution(self, result: Evaluation) -> RowDistribution | None:
        written = result.written
        if not isinstance(written, TensorDictBase):
            return None
        return lambda row: self._head.get_dist(written[row : row + 1])

    def outputs(self) -> dict[Key, ArraySpec]:
        """Return shape and dtype of all that the policy writes, without the row dimension.

        As in TorchRL's collectors that is the policy's ``out_keys`` (``select_out_keys`` leaves
        some out), without names that begin with ``_``. Later passes answer all of them.

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
        self.extras = self._others(result.written)
        self._refuse_chance(drawn, result)
        tensors, _ = self._pass(greedy=False)
        answers = {key: value.cpu().numpy() for key, value in tensors.items()}
        specs = {key: ArraySpec(value.shape[1:], value.dtype) for key, value in answers.items()}
        wanted = self._action.array.shape
        action = specs[self._action.key]
        if action.shape != wanted:
            raise ConfigurationError(
                f"the policy's action has shape {action.shape}, but the environment "
                f"accepts {wanted} ({self._action.kind})"
            )
        dist, most = result.distribution, max(self._action.sizes, default=0)
        if _is_discrete(dist, tensors[self._action.key]) == (self._action.kind == "continuous"):
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

    def _others(self, written: TensorDictBase | dict[Key, Tensor]) -> list[Key]:
        """Return the keys of what the policy writes beside action, log-probability and value."""
        known = {self._action.key, self._log_prob, "state_value", *self._inputs}
        found: list[Key] = []
        out_keys: Sequence[Key] = self.policy.out_keys  # type: ignore[assignment]
        for key in map(unravel_key, out_keys):
            value = written.get(key, None)
            if key in known or value is None or any(n.startswith("_") for n in _path(key)):
                continue
            if isinstance(value, TensorDictBase):
                leaves = value.keys(include_nested=True, leaves_only=True)
                found += [(*_path(key), *_path(leaf)) for leaf in leaves]
            elif isinstance(value, Tensor):
                found.append(key)
            else:
                raise ConfigurationError(f"the policy writes {key!r}, which is no tensor")
        if taken := [key for key in found if _path(key)[0] in _TAKEN]:
            raise ConfigurationError(
                f"the policy writes {taken[0]!r}, which the collector writes: give it another name"
            )
        return found

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


def _path(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _words(keys: Sequence[Key]) -> str:
    return " and ".join(map(repr, keys))


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
