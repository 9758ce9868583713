"""Actions that a probabilistic module with ``safe=True`` projects into its spec, as in TorchRL."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import unravel_key
from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor
from torchrl.data import Bounded, TensorSpec
from torchrl.modules import SafeProbabilisticModule

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import ActionSpec, Key


class Projection:
    """Clamps numbers to the bounds of the module's spec, if it is ``safe``.

    Choices are in their spec already. A log-probability stays that of what was drawn.

    Args:
        head: the policy's probabilistic module.
        device: where actions are computed.
    """

    def __init__(self, head: ProbabilisticTensorDictModule, device: torch.device) -> None:
        self._bounds: dict[Key, tuple[Tensor, Tensor]] = {
            key: (spec.space.low.to(device), spec.space.high.to(device))
            for key, spec in _specs(head).items()
            if isinstance(spec, Bounded)
        }

    def __call__(self, actions: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Return actions ``[B, ...]`` by key, those out of bounds at the next bound."""
        projected = {}
        for key, (low, high) in self._bounds.items():
            projected[key] = torch.clamp(actions[key], low, high).to(actions[key].dtype)
        return actions | projected


def require_fitting_specs(
    head: ProbabilisticTensorDictModule, parts: Mapping[Key, ActionSpec]
) -> None:
    """Refuse a ``safe`` module whose specs are not those of the environment's actions.

    Args:
        head: the policy's probabilistic module.
        parts: what the environment accepts, by the keys that the module writes.

    Raises:
        ConfigurationError: naming the key.
    """
    for key, spec in _specs(head).items():
        _refuse_other(key, spec, parts[key])


def _specs(head: ProbabilisticTensorDictModule) -> dict[Key, TensorSpec]:
    """Return the specs into which a module projects; none, if it is not ``safe``."""
    if not isinstance(head, SafeProbabilisticModule) or not head.safe:
        return {}
    given = {key: head.spec[key] for key in map(unravel_key, head.dist_sample_keys)}
    return {key: spec for key, spec in given.items() if spec is not None}


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
