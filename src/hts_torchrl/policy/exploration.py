"""Policies without a distribution: they write the action themselves, and modules may explore."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import OrnsteinUhlenbeckProcessModule

from hts_torchrl.config import ActionSpec, Array, Key
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.policy.forward import modules_of, path_of
from hts_torchrl.policy.sampling import borrowed_generators


class ExploringPolicy:
    """Runs a policy in two parts: what decides on a batch, and what then changes the action.

    TorchRL's exploration modules (``EGreedyModule``, ``AdditiveGaussianModule``,
    ``OrnsteinUhlenbeckProcessModule``) draw from torch's global generator. Each row is given to
    them by itself, after the generator was seeded by the row's own draw.

    Args:
        policy: a TensorDict policy that writes the action.
        action: what the environment accepts.

    Raises:
        ConfigurationError: if no module writes the action.
    """

    def __init__(self, policy: nn.Module, action: ActionSpec) -> None:
        self._key = action.key
        steps = list(modules_of(policy))
        writers = [number for number, step in enumerate(steps) if self._writes(step)]
        if not writers:
            raise ConfigurationError(
                f"the policy writes no {action.key!r}: it needs a module that does, such as "
                "torchrl's ProbabilisticActor or QValueActor"
            )
        first = writers[0] if isinstance(steps[writers[0]], RandomActions) else writers[0] + 1
        self._decides, self._explores = steps[:first], steps[first:]

    def _writes(self, step: nn.Module) -> bool:
        return path_of(self._key) in map(path_of, getattr(step, "out_keys", ()))

    def decide(self, inputs: dict[Key, Tensor], batch_size: int) -> TensorDictBase:
        """Return all that is written before any module explores, ``[B]``."""
        tensordict: TensorDictBase = TensorDict(inputs, [batch_size])
        for step in self._decides:
            tensordict = step(tensordict)
        return tensordict

    def explore(self, decided: TensorDictBase, draws: Tensor, *, greedy: bool) -> TensorDictBase:
        """Return what the remaining modules make of each row.

        Args:
            decided: by :meth:`decide`, ``[B]``.
            draws: float64 ``[B, K]``; the first of a row seeds torch's generators for it.
            greedy: whether they are told not to explore.
        """
        if not self._explores:
            return decided
        mode = ExplorationType.DETERMINISTIC if greedy else ExplorationType.RANDOM
        rows = []
        with borrowed_generators(draws.device) as seed, set_exploration_type(mode):
            for row, draw in enumerate(draws):
                seed(int(draw[:1].view(torch.int64)))
                tensordict = decided[row : row + 1].clone()
                for step in self._explores:
                    tensordict = step(tensordict)
                rows.append(tensordict)
        return torch.cat(rows)


_NO_BOUNDS = "RandomPolicy: the environment's actions have no bounds to draw between"


class RandomActions(TensorDictModuleBase):
    """Writes actions that are uniform over what the environment accepts: TorchRL's RandomPolicy.

    Args:
        action: what the environment accepts.

    Raises:
        ConfigurationError: if an action has no bounds.
    """

    def __init__(self, action: ActionSpec) -> None:
        super().__init__()
        self.in_keys: list[Key] = []
        self.out_keys: list[Key] = [action.key]
        self._action = action
        if action.kind in ("continuous", "mixed"):
            if action.low is None or action.high is None:
                raise ConfigurationError(_NO_BOUNDS)
            self._low, self._high = torch.as_tensor(action.low), torch.as_tensor(action.high)
            if not (self._high - self._low).isfinite().all():
                raise ConfigurationError(_NO_BOUNDS)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write actions ``[B, ...]``, drawn from torch's generator."""
        kind, sizes = self._action.kind, torch.tensor(self._action.sizes)
        rows = tensordict.batch_size
        choices = (torch.rand(*rows, len(sizes)) * sizes).long()
        action = choices[..., 0] if kind == "discrete" else choices
        if kind == "one_hot":
            action = torch.nn.functional.one_hot(choices[..., 0], int(sizes[0]))
        elif kind in ("continuous", "mixed"):
            numbers = torch.rand(*rows, *self._low.shape)
            numbers = self._low + (self._high - self._low) * numbers
            action = torch.cat([choices, numbers], -1) if kind == "mixed" else numbers
        return tensordict.set(self._action.key, action)


def noise_memory(policy: nn.Module, action: ActionSpec) -> dict[Key, Array]:
    """Return what an Ornstein-Uhlenbeck process remembers, as it is when a trajectory begins."""
    values: dict[Key, Array] = {}
    for module in modules_of(policy):
        if isinstance(module, OrnsteinUhlenbeckProcessModule):
            values[module.ou.noise_key] = torch.zeros(action.array.shape).numpy()
            values[module.ou.steps_key] = torch.zeros((), dtype=torch.int64).numpy()
    return values
