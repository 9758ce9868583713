"""Heads: layers that give the parameters of an action's distribution, and a team's value."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hts_torchrl.models.layers import NarrowLinear


class PlayersLogits(NarrowLinear):
    """One layer for all k players: ``[B, k, in_features]`` to logits ``[B, k * out_features]``."""

    def forward(self, features: Tensor) -> Tensor:
        """Return float32, the players' logits side by side."""
        return super().forward(features).flatten(-2)


class PlayersValue(NarrowLinear):
    """The value of a team of k players, ``[B, k, in_features]`` to ``[B, out_features]``.

    It is the mean of the players' values, as the team's reward is the mean of their rewards.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Return float32 ``[B, out_features]``."""
        return super().forward(features).mean(-2)


class GaussianHead(nn.Module):
    """Mean from the features; one learned standard deviation a number, 1 at the start.

    Args:
        in_features: of the trunk.
        shape: of an action; ``()`` is a single number.
    """

    def __init__(self, in_features: int, shape: Sequence[int]) -> None:
        super().__init__()
        self.loc = NarrowLinear(in_features, math.prod(shape), 0.01)
        self.log_scale = nn.Parameter(torch.zeros(math.prod(shape)))
        self._shape = tuple(shape)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation, float32 ``[B, *shape]``."""
        loc = self.loc(features)
        scale = self.log_scale.float().exp().expand_as(loc)
        shape = (*features.shape[:-1], *self._shape)
        return loc.reshape(shape), scale.reshape(shape)


class MaskedLogits(nn.Module):
    """An actor whose forbidden actions have probability 0, and no gradient.

    Their logits become the smallest number of the type: with -inf, an observation that allows
    nothing would give NaN. What a game ends with may be one.
    """

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """Return logits ``[B, n]``; the mask ``[B, n]`` is 0 where an action is forbidden."""
        logits: Tensor = self.actor(features)
        return logits.masked_fill(mask == 0, torch.finfo(logits.dtype).min)


class MixedHead(nn.Module):
    """Logits of the choices, and mean and standard deviation of the numbers."""

    def __init__(self, choices: nn.Module, numbers: GaussianHead) -> None:
        super().__init__()
        self.choices, self.numbers = choices, numbers

    def forward(self, features: Tensor, *masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits ``[B, sum(sizes)]``, mean and standard deviation ``[B, C]``."""
        loc, scale = self.numbers(features)
        return self.choices(features, *masks), loc, scale
