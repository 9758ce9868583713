"""Layers: how they are initialised and evaluated, and those that give parameters and values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
_NARROWEST = 4


def orthogonal(layer: Layer, gain: float = math.sqrt(2)) -> Layer:
    """Initialise a layer's weight orthogonally (Saxe et al., 2014), and its bias with zeros.

    Args:
        layer: changed in place, and returned.
        gain: factor of the orthogonal matrix.
    """
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


@contextlib.contextmanager
def evaluating(*layers: nn.Module) -> Iterator[None]:
    """Put layers into eval mode for a while: statistics, such as those of BatchNorm, stay."""
    modes = [(module, module.training) for layer in layers for module in layer.modules()]
    for layer in layers:
        layer.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.train(training)


class NarrowLinear(nn.Linear):
    """A linear layer whose rows keep their bits at any place of the batch, also if it is narrow.

    With fewer than 4 outputs the CPU kernel's last bits depend on the row's place in the batch, for
    some batch sizes; with at least 4 they do not (docs/decisions.md). So a narrow weight is padded
    with zeros.
    """

    def __init__(self, in_features: int, out_features: int, gain: float) -> None:
        super().__init__(in_features, out_features)
        orthogonal(self, gain)
        self._padded: tuple[Tensor, Tensor] | None = None

    def pad_once(self) -> None:
        """Pad now and not in each pass, for a copy that acts: weights that it loads are padded.

        Its parameters become views of the padded ones. A copy that is trained, or moved to another
        device or type afterwards, would not go on with them. A weight that is computed from others
        (torch's parametrizations, pruning), or that another layer has padded, is padded in each
        pass all the same.
        """
        own = [self._parameters.get(name) for name in ("weight", "bias")]
        alone = all(p is not None and p.untyped_storage().nbytes() == p.nbytes for p in own)
        if self.out_features < _NARROWEST and alone:
            with torch.no_grad():
                self._padded = weight, bias = self._pad()
            self.weight.data, self.bias.data = (
                weight[: self.out_features],
                bias[: self.out_features],
            )

    def _pad(self) -> tuple[Tensor, Tensor]:
        missing = _NARROWEST - self.out_features
        weight = functional.pad(self.weight, (0, 0, 0, missing))
        return weight, functional.pad(self.bias, (0, missing))

    def forward(self, features: Tensor) -> Tensor:
        """Return float32 ``[B, out_features]``."""
        if self.out_features >= _NARROWEST:
            return super().forward(features).float()
        outputs = functional.linear(features, *(self._padded or self._pad()))
        return outputs[..., : self.out_features].float()


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


class MixedHead(nn.Module):
    """Logits of the choices, and mean and standard deviation of the numbers.

    Args:
        choices: features, and what else it is given, to logits.
        numbers: features to mean and standard deviation.
    """

    def __init__(self, choices: nn.Module, numbers: GaussianHead) -> None:
        super().__init__()
        self.choices, self.numbers = choices, numbers

    def forward(self, features: Tensor, *masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits ``[B, sum(sizes)]``, mean and standard deviation ``[B, C]``."""
        loc, scale = self.numbers(features)
        return self.choices(features, *masks), loc, scale


class SeparateCritic(nn.Sequential):
    """A trunk for the value alone, and the value's layer: observations to ``[B, 1]``."""

    def forward(self, *observations: Tensor) -> Tensor:
        """Return values ``[B, 1]``."""
        trunk, layer = self
        value: Tensor = layer(trunk(*observations))
        return value
