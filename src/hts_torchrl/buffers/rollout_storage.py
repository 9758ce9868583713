"""The arrays of one round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from hts_torchrl.buffers.arena import Array
from hts_torchrl.config import ArraySpec, EnvSpec, Key


class Cells(Protocol):
    """Cells ``[T, G, ...]`` of one array, of the G environments of one executor."""

    def __setitem__(self, step: int, values: Array, /) -> None:
        """Fill the cells of a step."""


_NUMBERS: dict[Key, str] = {
    ("next", "reward"): "float32",
    ("next", "terminated"): "bool",
    ("next", "truncated"): "bool",
    ("next", "episode_end"): "bool",
    ("next", "episode_reward"): "float32",
    ("next", "step_count"): "int64",
}


def next_key(key: Key) -> Key:
    """Return the key of the following step's entry."""
    return ("next", key) if isinstance(key, str) else ("next", *key)


def storage_specs(spec: EnvSpec, outputs: Mapping[Key, ArraySpec]) -> dict[Key, ArraySpec]:
    """List every array of a storage by its TensorDict key, without ``[N, T]``.

    Numbers of a step have a last dimension of 1, as in TorchRL.
    """
    specs: dict[Key, ArraySpec] = {}
    for key, array in spec.observations.items():
        specs[key] = specs[next_key(key)] = array
    specs.update(outputs)
    specs.update({key: ArraySpec((1,), np.dtype(dtype)) for key, dtype in _NUMBERS.items()})
    specs["collector", "traj_ids"] = ArraySpec((), np.dtype(np.int64))
    return specs


class RolloutStorage:
    """Arrays ``[N, T, ...]`` of one round.

    **Writer**: row ``n`` belongs to the executor of environment ``n``, so each cell has one.
    **Reader**: the learner. **Visible when**: the executor has reported its round finished.
    """

    def __init__(self, arrays: dict[Key, Array]) -> None:
        self.arrays = arrays

    def cells(self, rows: slice) -> Mapping[Key, Cells]:
        """Return what the executor of the environments ``rows`` fills, by step; numbers ``[T, G]``.

        Views are made once, as an executor's step has time for little else than writing to them.
        """
        cells = {key: array[rows].swapaxes(0, 1) for key, array in self.arrays.items()}
        return cells | {key: cells[key][..., 0] for key in _NUMBERS}
