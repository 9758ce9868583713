"""A trunk for several observations: one network for each image, and one for all else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hts_torchrl.specs import ArraySpec


class CombinedTrunk(nn.Module):
    """Features of several observations side by side: ``[B, out_features]``.

    Each image has a trunk of its own. All else is flattened and joined to one vector, which has
    one trunk: what Stable-Baselines3's ``CombinedExtractor`` is for. As there, a choice (Discrete,
    or each of a MultiDiscrete) is one-hot in the vector.

    Args:
        observations: in the order in which the trunk is called with them.
        pictures: a trunk for each of those that are images, in the same order.
        vector: trunk of the vector of all others; None if there are none.
    """

    def __init__(
        self,
        observations: Sequence[ArraySpec],
        pictures: Sequence[nn.Module],
        vector: nn.Module | None,
    ) -> None:
        super().__init__()
        self.pictures = nn.ModuleList(pictures)
        self.vector = vector
        parts: list[Any] = [*pictures, *([] if vector is None else [vector])]
        self.out_features = sum(int(part.out_features) for part in parts)
        self.reads_sequences = all(getattr(part, "reads_sequences", False) for part in parts)
        self._observations = list(observations)

    def forward(self, *observations: Tensor) -> Tensor:
        """Return features ``[B, out_features]``: of the images, and then of all else."""
        trunks = iter(self.pictures)
        features, numbers = [], []
        for seen, array in zip(observations, self._observations, strict=True):
            if is_image(array):
                features.append(next(trunks)(seen))
            else:
                batch = seen.shape[: seen.ndim - len(array.shape)]
                flat = seen.reshape(*batch, -1)
                if array.choices:
                    flat = _one_hot(flat, array.choices)
                numbers.append(flat if flat.is_floating_point() else flat.float())
        if self.vector is not None:
            features.append(self.vector(torch.cat(numbers, -1)))
        return torch.cat(features, -1)


def _one_hot(chosen: Tensor, choices: Sequence[range]) -> Tensor:
    """Return of integers ``[..., K]`` which choices they are: bool ``[..., C]``, K ones a row."""
    return torch.cat(
        [
            # Of int64: torch does not compare unsigned integers of 16 bits or more with others.
            chosen[..., index, None].long()
            == torch.arange(each.start, each.stop, device=chosen.device)
            for index, each in enumerate(choices)
        ],
        -1,
    )


def is_image(observation: ArraySpec) -> bool:
    """Return whether an observation among several is read as an image: bytes with two sides."""
    return observation.dtype == np.uint8 and len(observation.shape) >= 3
