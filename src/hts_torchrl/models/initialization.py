"""Orthogonal initialisation (Saxe et al., 2014), as A2C and PPO implementations use it."""

from __future__ import annotations

import math
from typing import TypeVar

from torch import nn

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def orthogonal(layer: Layer, gain: float = math.sqrt(2)) -> Layer:
    """Initialise a layer's weight orthogonally and its bias with zeros; returns the layer.

    Args:
        layer: changed in place.
        gain: factor of the orthogonal matrix.
    """
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
