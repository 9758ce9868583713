"""Convolutional trunks for images: of DQN (2013, 2015), IMPALA (2018) and SEED RL (2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.layers import orthogonal


def channels_of(shape: Sequence[int]) -> int:
    """Return the channels of images ``[C, H, W]`` or ``[H, W, C]``.

    Raises:
        ConfigurationError: if they are neither for certain.
    """
    return shape[-1] if _channels_come_last(shape) else shape[0]


def _channels_come_last(shape: Sequence[int]) -> bool:
    """Return whether images are ``[H, W, C]``, by their sides: equal ones, or the shortest."""
    if len(shape) != 3:
        raise ConfigurationError("channels, height and width are needed")
    first, second, third = shape
    seem_first = first <= min(second, third) or second == third
    seem_last = 2 * third <= min(first, second) or first == second
    if seem_first == seem_last:
        raise ConfigurationError(
            "which of these are the channels cannot be told; bring them clearly to the front, "
            "with gymnasium.wrappers.TransformObservation or torchrl's PermuteTransform"
        )
    return seem_last


class PixelConv2d(nn.Conv2d):
    """A convolution of pixels from 0 to 255 as if they were scaled to [0, 1].

    With ``statistics`` it is one of pixels with mean 0 and variance 1, where the padding is black.
    Its weights and biases are scaled and shifted in the pixels' place: there are fewer.
    """

    statistics: Any
    """None, or the ``RunningStatistics`` of all pixels so far, of ``normalize_observation``.

    They are scalars, and change between rounds only.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - of nn.Conv2d
        super().__init__(*args, **kwargs)
        self.register_module("statistics", None)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features ``[B, out_channels, *]`` of pixels ``[B, C, H, W]``, uint8 or float.

        They have the type of the weights, or of autocast.
        """
        weight, bias = self.weight, self.bias
        # Not of parameters(), which TorchRL's losses leave empty.
        dtype, device = weight.dtype, pixels.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        if self.statistics is None:
            weight = weight.to(dtype) * (1 / 255)
        else:
            scaled = weight / self.statistics.deviation()
            shift = self.statistics.mean.float() * scaled.sum((1, 2, 3))
            weight = scaled.to(dtype)
            bias = ((0 if bias is None else bias) - shift).to(dtype)
        if self._reads_blocks(pixels):
            weight = functional.pixel_unshuffle(weight, 4)
            return functional.conv2d(_unshuffled(pixels).to(dtype), weight, bias)
        if pixels.dtype == torch.uint8 and pixels.is_contiguous():
            # channels_last, the fastest way that vmap knows: TorchRL's losses run under it.
            pixels = torch.stack(pixels.unbind(1), -1).permute(0, 3, 1, 2)
        return functional.conv2d(pixels.to(dtype), weight, bias, self.stride, self.padding)

    def _reads_blocks(self, pixels: Tensor) -> bool:
        """Return whether this is a convolution of blocks of 4x4 bytes too, which is faster."""
        sides = (*self.kernel_size, *pixels.shape[-2:])
        return (
            self.stride == (4, 4)
            and self.padding == (0, 0)
            and all(side % 4 == 0 for side in sides)
            and pixels.dtype == torch.uint8
            and pixels.device.type == "cpu"
            and pixels.is_contiguous()
            # torch.compile does not know where memory begins.
            and (torch.compiler.is_compiling() or pixels.storage_offset() % 4 == 0)
            and not torch.compiler.is_exporting()  # ONNX does not view bytes as integers
        )


def _unshuffled(pixels: Tensor) -> Tensor:
    """Return torch's ``pixel_unshuffle`` by 4 of bytes ``[B, C, H, W]``, faster.

    Four pixels of a row are moved as one int32. The memory is ordered channels_last.
    """
    batch, channels, height, width = pixels.shape
    rows, columns = height // 4, width // 4
    # Flat first: of a single channel, or image, the stride may be anything.
    fours = pixels.flatten().view(torch.int32).view(batch, channels, rows, 4, columns)
    fours = fours.transpose(1, 2)
    blocks = fours.reshape(batch * rows, channels * 4, columns).transpose(1, 2).contiguous()
    return blocks.view(torch.uint8).view(batch, rows, columns, channels * 16).permute(0, 3, 1, 2)


class PixelTrunk(nn.Sequential):
    """Pixels ``[B, C, H, W]`` (0 to 255) to features ``[B, out_features]``.

    Pixels ``[B, H, W, C]``, as cameras and renderers give them, are taken too. There may be more
    dimensions before these, as TorchRL's losses bring them.

    Args:
        convolutions: of which the first is a :class:`PixelConv2d`; ReLU follows the last.
        shape: of an observation.
        width: of the features.

    Raises:
        ConfigurationError: if the shape does not tell where the channels are.
    """

    reads_sequences = True

    def __init__(self, convolutions: Sequence[nn.Module], shape: Sequence[int], width: int) -> None:
        # Flat before ReLU: its backward pass then reads two tensors of the same strides.
        body = nn.Sequential(*convolutions, nn.Flatten(), nn.ReLU())
        channels_last = _channels_come_last(shape)
        image = torch.zeros(1, *shape)
        with torch.no_grad():
            features = body(image.movedim(-1, 1) if channels_last else image).shape[1]
        super().__init__(body, orthogonal(nn.Linear(features, width)), nn.ReLU())
        self.out_features = width
        self._channels_last = channels_last
        # oneDNN computes convolutions in channels_last (docs/decisions.md).
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features ``[B, out_features]``."""
        images = pixels.reshape(-1, *pixels.shape[-3:])
        if self._channels_last:
            images = images.permute(0, 3, 1, 2)
        features: Tensor = super().forward(images)  # type: ignore[no-untyped-call]
        return features.reshape(*pixels.shape[:-3], -1)


class NatureCNN(PixelTrunk):
    """Three convolutions and 512 features (Mnih et al., 2015): ``arch_nature`` of PAAC."""

    def __init__(self, shape: Sequence[int]) -> None:
        convolutions = [
            orthogonal(PixelConv2d(channels_of(shape), 32, 8, stride=4)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(64, 64, 3)),
        ]
        super().__init__(convolutions, shape, 512)


class NipsCNN(PixelTrunk):
    """Two convolutions and 256 features (Mnih et al., 2013): ``arch_nips`` of PAAC."""

    def __init__(self, shape: Sequence[int]) -> None:
        convolutions = [
            orthogonal(PixelConv2d(channels_of(shape), 16, 8, stride=4)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(16, 32, 4, stride=2)),
        ]
        super().__init__(convolutions, shape, 256)


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
    """Three stages of 16, 32, 32 channels, two residual blocks each, and 256 features.

    The residual trunk of IMPALA (Espeholt et al., 2018, figure 3, right).
    """

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
