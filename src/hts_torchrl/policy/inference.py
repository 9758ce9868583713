"""What an actor runs: batched passes of a policy, whose rows do not depend on each other."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import composite_lp_aggregate
from torch import Tensor, nn
from torch import distributions as d
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode

from hts_torchrl.config import PRECISIONS, Precision
from hts_torchrl.errors import require
from hts_torchrl.policy.composite import ActionParts, SeveralActions
from hts_torchrl.policy.cuda_graph import StagedPass
from hts_torchrl.policy.exploration import RandomActions, in_order, row_by_row, split_at_action
from hts_torchrl.policy.forward import PolicyOutput, evaluate, heads_of, probabilistic_module
from hts_torchrl.policy.greedy import mode
from hts_torchrl.policy.limits import require_called, require_fitting_specs
from hts_torchrl.policy.memory import noise_memory
from hts_torchrl.policy.sampling import Projection, decided, sample
from hts_torchrl.specs import Array, EnvSpec, Key, next_key

Pass: TypeAlias = Callable[[dict[Key, Tensor], Tensor], tuple[dict[Key, Tensor], PolicyOutput]]
"""One pass: from inputs and draws, ``[B, ...]`` each, to answers and all that it computed."""


class PolicyInference:
    """Runs a policy on batches of one fixed shape, one thread, sampling from given draws.

    A row's last bits change with the size of the batch (and, with several threads, with its place
    in it), so every pass has ``batch_size`` rows, the missing ones filled with whatever was there.

    With ``bf16-mixed`` the weights of linear and convolutional layers are cast once and not in
    every pass, as autocast would: give it a copy of a policy that is trained.

    Args:
        policy: moved to ``device`` and put in eval mode.
        spec: observations and actions of the environment, and what the policy remembers of it.
        batch_size: rows of every pass.
        device: where it computes.
        precision: in Lightning's words.
        extras: what to answer in addition to action, log-probability, value and memory, by
            TensorDict key.
        greedy: answer the greedy action instead of a sampled one.
        cudagraph: on a GPU, capture a pass as a CUDA graph and replay it; weights must stay where
            they are from the first answer on.

    Raises:
        ConfigurationError: for another precision, or a policy with code that only a call would run.

    Example:
        >>> from hts_torchrl import ActionSpec, ArraySpec, EnvSpec, make_actor_critic
        >>> observation = ArraySpec((4,), np.dtype(np.float32))
        >>> action = ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), sizes=(2,))
        >>> spec = EnvSpec({"observation": observation}, action)
        >>> inference = PolicyInference(make_actor_critic("mlp", spec), spec, batch_size=8)
        >>> observations = {"observation": np.zeros((3, 4), np.float32)}
        >>> answers = inference.answer(observations, draws=np.full((3, 1), 0.5))
        >>> answers["action"].shape, answers["state_value"].shape
        ((3,), (3, 1))
    """

    def __init__(  # noqa: PLR0913 - how an actor computes, keyword only
        self,
        policy: nn.Module,
        spec: EnvSpec,
        *,
        batch_size: int,
        device: str = "cpu",
        precision: Precision = "32-true",
        extras: Sequence[Key] = (),
        greedy: bool = False,
        cudagraph: bool = False,
    ) -> None:
        require(precision in PRECISIONS, f"precision={precision}", " or ".join(PRECISIONS))
        require_called(policy)
        self.policy = policy.to(device).eval()
        self.batch_size, self._greedy = batch_size, greedy
        self.device = torch.device(device)
        """Where it computes."""
        self._bf16 = precision == "bf16-mixed"
        if self._bf16:
            for layer in _cast_by_autocast_alone(self.policy):
                layer.to(torch.bfloat16)
        self.inputs = first_inputs(spec, batch_size)
        noise = noise_memory(policy, spec.action)
        self.carried = {
            next_key(key): key if key in noise else next_key(key) for key in spec.memory.initial
        }
        """Keys of the memory for the next step, each with the key that the policy writes it to."""
        self.draws = torch.full((batch_size, spec.action.num_draws), 0.5, dtype=torch.float64)
        self._staged: StagedPass | None = None
        if self.device.type == "cuda":
            self._staged = StagedPass(
                self._run, self.inputs, self.draws, device=self.device, cudagraph=cudagraph
            )
            self.inputs, self.draws = self._staged.inputs, self._staged.draws
        # The caller of the serial twin may have set another mode.
        remembers = bool(spec.memory.initial)
        self._single_steps = set_recurrent_mode(False) if remembers else contextlib.nullcontext()
        self.action, self.spec = spec.action, spec
        self.log_prob_keys: list[Key] = []
        """Empty if the policy writes the action itself, and gives no distribution."""
        self.action_specs = {spec.action.key: spec.action}
        """What the policy writes: the action, or its parts, by key."""
        if heads_of(policy):
            self._head = probabilistic_module(policy)
            self.parts = ActionParts(self._head, self.action)
            self.action_specs = self.parts.specs
            require_fitting_specs(self._head, self.action_specs)
            self._project = Projection(self._head, self.device)
            self.log_prob_keys = self._head.log_prob_keys
        else:
            self._decides, self._explores = split_at_action(policy, spec.action)
        self.extras = list(extras)
        self.compiled: Pass | None = None
        """What runs in place of :meth:`compute`, except for random actions; the bits differ."""
        self.within_one = False
        """Whether random observations are from 0 to 1, because the policy reads no others."""

    @cached_property
    def _random(self) -> RandomActions:
        return RandomActions(self.spec)

    def answer(
        self, inputs: Mapping[Key, Array], draws: Array, *, random: bool = False
    ) -> dict[Key, Array]:
        """Answer any number of rows, ``batch_size`` of them a pass.

        Args:
            inputs: observations and memory, ``[R, ...]`` each.
            draws: float64 ``[R, K]``, as :func:`sample` takes them.
            random: a uniform action instead of the policy's; all else is answered by the policy.

        Returns:
            Action, and its parts where the policy writes these; float32 log-probability ``[R]`` and
            value ``[R, 1]`` if the policy has them; what it remembers, and the extras.
        """
        parts = []
        for first in range(0, len(draws), self.batch_size):
            rows = slice(first, first + self.batch_size)
            taken = len(draws[rows])
            for key, batch in self.inputs.items():
                batch.numpy()[:taken] = inputs[key][rows]
            self.draws.numpy()[:taken] = draws[rows]
            if self._staged is not None:
                arrays = self._staged.run(random)
            else:
                answers, _ = self.run_batch(random)
                arrays = {key: value.cpu().numpy() for key, value in answers.items()}
            # Copies, as a policy may answer with a view of its input, which the next pass fills.
            parts.append({key: array[:taken].copy() for key, array in arrays.items()})
        if len(parts) == 1:
            return parts[0]
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    def run_batch(self, random: bool = False) -> tuple[dict[Key, Tensor], PolicyOutput]:
        """Run one pass over ``inputs`` and ``draws``: its answers, and all that it computed."""
        inputs = {key: value.to(self.device) for key, value in self.inputs.items()}
        return self._run(inputs, self.draws.to(self.device), random)

    def _run(
        self, inputs: dict[Key, Tensor], draws: Tensor, random: bool
    ) -> tuple[dict[Key, Tensor], PolicyOutput]:
        device = self.device.type
        keep_out = torch.is_autocast_enabled(device)  # the caller's
        autocast = torch.autocast(device, enabled=False) if keep_out else contextlib.nullcontext()
        # As in TorchRL's collectors: modules ask for it, and the caller's may be another.
        kind = ExplorationType.DETERMINISTIC if self._greedy else ExplorationType.RANDOM
        explores = set_exploration_type(kind)
        with torch.no_grad(), one_thread(), self._single_steps, autocast, explores:
            if self.compiled is None or random:
                return self.compute(inputs, draws, random)
            return self.compiled(inputs, draws)

    def compute(
        self, inputs: dict[Key, Tensor], draws: Tensor, random: bool = False
    ) -> tuple[dict[Key, Tensor], PolicyOutput]:
        """Return the answers of a pass, and all that it computed: what is compiled, if it is."""
        respond = self._sampled if self.log_prob_keys else self._explored
        answers, result = respond(inputs, draws, random)
        if result.value is not None:
            answers["state_value"] = result.value.float()
        answers |= {key: result.written[written] for key, written in self.carried.items()}
        answers |= {key: result.written[key] for key in self.extras}
        for key, answer in answers.items():
            if answer.requires_grad:  # a parameter, or a pass that enables gradients
                answers[key] = answer.detach()
            if answer.dtype is torch.bfloat16:  # which numpy does not have
                answers[key] = answers[key].float()
        return answers, result

    def row_by_row(self, result: PolicyOutput) -> str | None:
        """Name what draws each row by itself, from a generator, if anything of the policy does.

        Args:
            result: of a plain pass over :attr:`draws`.
        """
        if not self.log_prob_keys:
            return ", ".join(type(module).__name__ for module in self._explores) or None
        if self._greedy:
            return None
        dists = self.distributions(result.distribution)
        draws = self.draws.to(self.device)
        for key, dist in dists.items():
            if decided(dist, draws[:, self.parts.places[key]]) is None:
                return type(dist).__name__
        return None

    def _autocast(self) -> AbstractContextManager[None]:
        kind = self.device.type
        return torch.autocast(kind, torch.bfloat16) if self._bf16 else contextlib.nullcontext()

    def _sampled(
        self, inputs: dict[Key, Tensor], draws: Tensor, random: bool
    ) -> tuple[dict[Key, Tensor], PolicyOutput]:
        with self._autocast():
            result = evaluate(self.policy, inputs, self.batch_size)
        dists = self.distributions(result.distribution)
        if random:
            rows = row_by_row([self._random], TensorDict(inputs, [self.batch_size]), draws)
            actions = self.parts.apart(rows[self.action.key].to(draws.device))
        elif self._greedy:
            actions = {key: mode(dist) for key, dist in dists.items()}
        else:
            actions = {
                key: sample(
                    dist, draws[:, self.parts.places[key]], partial(self._of_row, result, key)
                )
                for key, dist in dists.items()
            }
        # As they are stored, and so as the learner has them.
        actions = {k: a.float() if a.dtype is torch.bfloat16 else a for k, a in actions.items()}
        log_probs = self._log_probs(result.distribution, actions)
        if not random:
            actions = self._project(actions)
        if not self.parts.is_whole:
            actions[self.action.key] = self.parts.joined(actions)
        return actions | log_probs, result

    def distributions(self, dist: d.Distribution) -> dict[Key, d.Distribution]:
        """Return the distribution of each part of the action, by its key."""
        if isinstance(dist, SeveralActions):
            return {key: dist.parts[key] for key in self.action_specs}
        return {self.action.key: dist}

    def _log_probs(self, dist: d.Distribution, actions: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Return what TorchRL's policies write: the sum ``[B]``, or that of each part apart."""
        if not isinstance(dist, SeveralActions):
            return {self.log_prob_keys[0]: dist.log_prob(actions[self.action.key]).float()}
        if composite_lp_aggregate(nowarn=True):
            together = TensorDict(actions, [self.batch_size])
            return {self.log_prob_keys[0]: dist.log_prob(together).float()}
        keys = zip(self._head.dist_sample_keys, self.log_prob_keys, strict=True)
        return {to: dist.parts[key].log_prob(actions[key]).float() for key, to in keys}

    def _explored(
        self, inputs: dict[Key, Tensor], draws: Tensor, random: bool
    ) -> tuple[dict[Key, Tensor], PolicyOutput]:
        with self._autocast():
            written = in_order(self._decides, TensorDict(inputs, [self.batch_size]))
        # A uniform action has the last word.
        if explores := self._explores + ([self._random] if random else []):
            written = row_by_row(explores, written, draws)
        value = written.get("state_value", None)
        return {self.action.key: written[self.action.key]}, PolicyOutput(None, value, written)

    def _of_row(self, result: PolicyOutput, key: Key, row: int) -> d.Distribution:
        return self.distributions(result.of_row(row))[key]


def _cast_by_autocast_alone(policy: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers whose weights are used nowhere but in a product, which autocast casts."""
    modules = list(policy.modules())
    users = Counter(id(each) for module in modules for each in module.parameters(recurse=False))
    for module in modules:
        is_layer = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        # One with statistics, noise or a parametrization computes its weight in float32, and one of
        # a user's class may. So may whoever shares a weight.
        is_known = type(module).__module__.startswith(("torch.", "hts_torchrl."))
        has_weight_alone = module.state_dict().keys() <= {"weight", "bias"}
        shares = any(users[id(each)] > 1 for each in module.parameters(recurse=False))
        if is_layer and is_known and has_weight_alone and not shares:
            yield module


def first_inputs(spec: EnvSpec, rows: int) -> dict[Key, Tensor]:
    """Return so many rows that a policy is tried with, of :meth:`EnvSpec.first_value`."""
    return {
        key: torch.from_numpy(spec.first_value(key)).expand(rows, *array.shape).clone()
        for key, array in spec.inputs.items()
    }


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
