"""A multilayer perceptron for vector observations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from hts_torchrl.models.layers import orthogonal


class MLP(nn.Sequential):
    """Two hidden layers of ``width`` tanh units: ``[B, *shape]`` to features ``[B, width]``.

    There may be more dimensions before the observation's own, as TorchRL's losses bring them.
    """

    reads_sequences = True

    def __init__(self, shape: Sequence[int], width: int = 64) -> None:
        super().__init__(
            orthogonal(nn.Linear(math.prod(shape), width)),
            nn.Tanh(),
            orthogonal(nn.Linear(width, width)),
            nn.Tanh(),
        )
        self.out_features = width
        self._dimensions = len(shape)

    def forward(self, observation: Tensor) -> Tensor:
        """Return features ``[B, width]``."""
        # Not of parameters(), which TorchRL's losses leave empty.
        dtype = cast("Tensor", self[0].weight).dtype
        batch = observation.shape[: observation.ndim - self._dimensions]
        flat = observation.to(dtype).reshape(*batch, -1)
        features: Tensor = super().forward(flat)  # type: ignore[no-untyped-call]
        return features
