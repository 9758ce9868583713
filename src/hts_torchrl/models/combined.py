"""A trunk for several observations: one network for each picture, and one for all else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.trunks import BUILT_IN_TRUNKS, make_trunk
from hts_torchrl.specs import ArraySpec, Key


class CombinedTrunk(nn.Module):
    """Features of several observations side by side: ``[B, out_features]``.

    Each picture has a trunk of its own. All else is flattened and joined to one vector, which has
    one trunk: what Stable-Baselines3's ``CombinedExtractor`` is for. As there, a choice (Discrete,
    or each of a MultiDiscrete) is one-hot in the vector.

    Args:
        observations: in the order in which the trunk is called with them.
        pictures: a trunk for each of those that are pictures, in the same order.
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
        """Return features ``[B, out_features]``: of the pictures, and then of all else."""
        trunks = iter(self.pictures)
        features, numbers = [], []
        for seen, array in zip(observations, self._observations, strict=True):
            if is_picture(array):
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


def is_picture(observation: ArraySpec) -> bool:
    """Return whether an observation among several is read as a picture: bytes with two sides."""
    return observation.dtype == np.uint8 and len(observation.shape) >= 3


def combined_trunk(network: str, observations: Mapping[Key, ArraySpec]) -> CombinedTrunk:
    """Build the trunk of several observations.

    Args:
        network: reads each picture; ``mlp``, which is for vectors, leaves them to ``nature``. Where
            no observation is a picture it reads the vector that all are joined to.
        observations: by key, in the order in which the trunk is called with them.

    Raises:
        ConfigurationError: if there is no such network, or it cannot read one of them.
    """
    pictures = [
        _picture_trunk(network, key, array)
        for key, array in observations.items()
        if is_picture(array)
    ]
    if not pictures and network in BUILT_IN_TRUNKS and network != "mlp":
        seen = ", ".join(f"{key!r} {array}" for key, array in observations.items())
        raise ConfigurationError(
            f"the network {network!r} reads images (uint8, three dimensions), and none of the "
            f"observations is one: {seen}; 'mlp' reads vectors"
        )
    others = [array for array in observations.values() if not is_picture(array)]
    vector = None
    if others:
        size = sum(sum(map(len, array.choices)) or math.prod(array.shape) for array in others)
        joined = ArraySpec((size,), np.dtype(np.float32))
        vector = make_trunk("mlp" if pictures else network, joined, what="joined observations")
    return CombinedTrunk(list(observations.values()), pictures, vector)


def _picture_trunk(network: str, key: Key, picture: ArraySpec) -> nn.Module:
    reader = "nature" if network == "mlp" else network
    try:
        return make_trunk(reader, picture, what=f"the observation {key!r}")
    except ConfigurationError as error:
        if reader == network:
            raise
        raise ConfigurationError(
            f"{error}; among several observations 'mlp' leaves images to 'nature'"
        ) from error
