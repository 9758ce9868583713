"""Actions that a probabilistic module with ``safe=True`` projects into its spec, as in TorchRL."""

from __future__ import annotations

import torch
from tensordict import unravel_key
from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor
from torchrl.data import Bounded, TensorSpec
from torchrl.modules import SafeProbabilisticModule

from hts_torchrl.specs import Key


class Projection:
    """Clamps numbers to the bounds of the module's spec, if it is ``safe``.

    Choices are in their spec already. A log-probability stays that of what was drawn.
    """

    def __init__(self, head: ProbabilisticTensorDictModule, device: torch.device) -> None:
        self._bounds: dict[Key, tuple[Tensor, Tensor]] = {
            key: (spec.space.low.to(device), spec.space.high.to(device))
            for key, spec in specs_of(head).items()
            if isinstance(spec, Bounded)
        }

    def __call__(self, actions: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Return actions ``[B, ...]`` by key, those out of bounds at the next bound."""
        projected = {}
        for key, (low, high) in self._bounds.items():
            projected[key] = torch.clamp(actions[key], low, high).to(actions[key].dtype)
        return actions | projected


def specs_of(head: ProbabilisticTensorDictModule) -> dict[Key, TensorSpec]:
    """Return the specs into which a module projects; none, if it is not ``safe``."""
    if not isinstance(head, SafeProbabilisticModule) or not head.safe:
        return {}
    given = {key: head.spec[key] for key in map(unravel_key, head.dist_sample_keys)}
    return {key: spec for key, spec in given.items() if spec is not None}
