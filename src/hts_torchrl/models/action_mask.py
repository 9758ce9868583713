"""Logits of an actor whose environment tells which actions are allowed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import EnvSpec, Key


class MaskedLogits(nn.Module):
    """An actor whose forbidden actions have probability 0, and no gradient.

    Their logits become the smallest number of the type: with -inf, an observation that allows
    nothing would give NaN. What a game ends with may be one.

    Args:
        actor: features ``[B, width]`` to logits ``[B, n]``.
    """

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """Return logits ``[B, n]``, for a mask ``[B, n]`` that is 0 where an action is forbidden.

        Args:
            features: of B observations.
            mask: of any type.
        """
        logits: Tensor = self.actor(features)
        return logits.masked_fill(mask == 0, torch.finfo(logits.dtype).min)


def mask_of(spec: EnvSpec) -> Key | None:
    """Return the key of the observation that masks actions, if there is one.

    Raises:
        ConfigurationError: if it does not fit the actions.
    """
    key, action = spec.action_mask, spec.action
    if key is None:
        return None
    shape, wanted = spec.observations[key].shape, (sum(action.sizes),)
    if not action.sizes:
        raise ConfigurationError(
            f"the environment has an observation {key!r}, but its actions are {action.kind}: only "
            "choices can be masked; give the observation another name"
        )
    if shape != wanted:
        raise ConfigurationError(
            f"the observation {key!r} has shape {shape}, but {wanted} is needed: one element for "
            f"each choice of the action ({action.kind} {list(action.sizes)})"
        )
    return key
