"""The residual trunk of IMPALA (Espeholt et al., 2018, figure 3, right), and SEED RL's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from hts_torchrl.models.initialization import orthogonal
from hts_torchrl.models.nature import PixelConv2d, PixelTrunk, channels_of


class _Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut; shapes are kept."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ReLU(),
            orthogonal(nn.Conv2d(channels, channels, 3, padding=1)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(channels, channels, 3, padding=1)),
        )

    def forward(self, features: Tensor) -> Tensor:
        return features + cast("Tensor", self.body(features))


class ImpalaResNet(PixelTrunk):
    """Three stages of 16, 32, 32 channels, two residual blocks each, and 256 features."""

    def __init__(self, shape: Sequence[int], widths: Sequence[int] = (16, 32, 32)) -> None:
        stages: list[nn.Module] = []
        channels = channels_of(shape)
        for width in widths:
            kind = nn.Conv2d if stages else PixelConv2d
            stages += [
                orthogonal(kind(channels, width, 3, padding=1)),
                nn.MaxPool2d(3, stride=2, padding=1),
                _Residual(width),
                _Residual(width),
            ]
            channels = width
        super().__init__(stages, shape, 256)


class SeedResNet(ImpalaResNet):
    """A fourth stage of 32 channels: SEED RL's network for football (Espeholt et al., 2020)."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(shape, (16, 32, 32, 32))
