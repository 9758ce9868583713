"""Mean and deviation of pixels, for other systems that learn with a config's normalisation."""

from __future__ import annotations

import torch
from torch import Tensor


class PixelMoments:
    """Mean and deviation of all pixels of the last steps of all rounds."""

    def __init__(self) -> None:
        self.count, self.total, self.squares = 0, 0.0, 0.0

    def of(self, pixels: Tensor) -> tuple[float, float]:
        """Add the pixels of a step, and return both."""
        self.count += pixels.numel()
        self.total += float(pixels.sum(dtype=torch.float64))
        self.squares += float(pixels.double().square().sum())
        mean = self.total / self.count
        return mean, (self.squares / self.count - mean * mean) ** 0.5
