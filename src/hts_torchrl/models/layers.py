"""Layers: how they are initialised and evaluated, and how each row keeps its bits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
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
