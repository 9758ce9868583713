"""Policies without a distribution: they write the action themselves, and modules may explore."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.trunks import mask_of
from hts_torchrl.policy.forward import modules_of, written_by
from hts_torchrl.policy.sampling import by_row
from hts_torchrl.specs import ActionSpec, EnvSpec, Key, path_of


def split_at_action(
    policy: nn.Module, action: ActionSpec
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules that decide on a batch, and those that then change the action.

    The latter, TorchRL's exploration modules (``EGreedyModule``, ``AdditiveGaussianModule``,
    ``OrnsteinUhlenbeckProcessModule``), draw from torch's global generator: see :func:`row_by_row`.

    Raises:
        ConfigurationError: if no module writes the action.
    """
    steps, key = list(modules_of(policy)), path_of(action.key)
    writers = [number for number, step in enumerate(steps) if key in written_by(step)]
    if not writers:
        raise ConfigurationError(
            f"the policy writes no {action.key!r}: it needs a module that does, such as "
            "torchrl's ProbabilisticActor or QValueActor"
        )
    first = writers[0] if isinstance(steps[writers[0]], RandomActions) else writers[0] + 1
    return steps[:first], steps[first:]


def in_order(steps: Sequence[nn.Module], rows: TensorDictBase) -> TensorDictBase:
    """Run modules one after another on rows ``[B]``."""
    for step in steps:
        rows = step(rows)
    return rows


def row_by_row(steps: Sequence[nn.Module], rows: TensorDictBase, draws: Tensor) -> TensorDictBase:
    """Run modules in order on each of the rows ``[B]`` by itself: see :func:`by_row`."""
    return torch.cat(by_row(draws, lambda row: in_order(steps, rows[row : row + 1].clone())))


class RandomActions(TensorDictModuleBase):
    """Writes actions that are uniform over what the environment accepts: TorchRL's RandomPolicy.

    Numbers without bounds are sampled from a normal distribution, as there. Actions that an
    ``action_mask`` forbids are left out.

    Raises:
        ConfigurationError: if a mask does not fit.
    """

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self._action = action = spec.action
        self._mask = mask_of(spec)
        self.in_keys: list[Key] = [] if self._mask is None else [self._mask]
        self.out_keys: list[Key] = [action.key]
        if action.kind in ("continuous", "mixed"):
            low, high = (
                torch.full(action.array.shape, unknown) if bound is None else torch.as_tensor(bound)
                for bound, unknown in ((action.low, -torch.inf), (action.high, torch.inf))
            )
            self._bounded = (high - low).isfinite()
            self._low = torch.where(self._bounded, low, 0)
            self._high = torch.where(self._bounded, high, 0)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write actions ``[B, ...]``, sampled from torch's generator."""
        kind, rows = self._action.kind, tensordict.batch_size
        choices = self._choices(tensordict)
        action = choices[..., 0] if kind == "discrete" else choices
        if kind == "one_hot":
            action = torch.nn.functional.one_hot(choices[..., 0], self._action.sizes[0])
        elif kind in ("continuous", "mixed"):
            numbers = torch.rand(*rows, *self._low.shape)
            numbers = self._low + (self._high - self._low) * numbers
            if not self._bounded.all():
                numbers = torch.where(self._bounded, numbers, torch.randn(numbers.shape))
            action = torch.cat([choices, numbers], -1) if kind == "mixed" else numbers
        return tensordict.set(self._action.key, action)

    def _choices(self, tensordict: TensorDictBase) -> Tensor:
        """Return allowed choices ``[B, C]``."""
        rows, sizes = tensordict.batch_size, self._action.sizes
        if self._mask is None:
            return (torch.rand(*rows, len(sizes)) * torch.tensor(sizes)).long()
        forbidden = tensordict.get(self._mask).cpu() == 0
        chances = torch.rand(*rows, sum(sizes)).masked_fill(forbidden, -1.0)
        return torch.stack([part.argmax(-1) for part in torch.split(chances, list(sizes), -1)], -1)
