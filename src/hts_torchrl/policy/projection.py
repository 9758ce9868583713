"""Actions that a probabilistic module with ``safe=True`` projects into its spec, as in TorchRL."""

from __future__ import annotations

import torch
from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor
from torchrl.data import Bounded, TensorSpec
from torchrl.modules import SafeProbabilisticModule

from hts_torchrl.config import ActionSpec, Key
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.policy.composite import ActionParts


class Projection:
    """Clamps drawn numbers to the bounds of the module's spec, if it is ``safe``.

    Choices are in their spec already. A log-probability stays that of what was drawn.

    Args:
        head: the policy's probabilistic module.
        parts: what it writes.
        device: where actions are computed.

    Raises:
        ConfigurationError: if a spec does not fit the environment's.
    """

    def __init__(
        self, head: ProbabilisticTensorDictModule, parts: ActionParts, device: torch.device
    ) -> None:
        self._bounds: dict[Key, tuple[Tensor, Tensor]] = {}
        if not isinstance(head, SafeProbabilisticModule) or not head.safe:
            return
        for key, part in parts.specs.items():
            spec = head.spec[key]
            if spec is None:
                continue
            _refuse_other(key, spec, part)
            if isinstance(spec, Bounded):
                space = spec.space
                self._bounds[key] = (space.low.to(device), space.high.to(device))

    def __call__(self, actions: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Return actions ``[B, ...]`` by key, those out of bounds at the next bound."""
        projected = {}
        for key, (low, high) in self._bounds.items():
            projected[key] = torch.clamp(actions[key], low, high).to(actions[key].dtype)
        return actions | projected


def _refuse_other(key: Key, spec: TensorSpec, part: ActionSpec) -> None:
    shape, wanted = tuple(spec.shape), part.array.shape
    if len(shape) > len(wanted):
        raise ConfigurationError(
            f"the policy has safe=True and a spec of {key!r} of shape {shape}, but an action of "
            f"one environment has the shape {wanted}: give it that one's spec"
        )
    choices = getattr(spec.space, "n", None)
    if choices is not None and choices != max(part.sizes, default=0):
        raise ConfigurationError(
            f"the policy has safe=True and a spec of {key!r} of {choices} choices, but the "
            f"environment's are {part.kind} {list(part.sizes)}: give it the environment's spec"
        )
