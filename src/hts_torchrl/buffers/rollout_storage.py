"""The arrays of one round."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hts_torchrl.buffers.arena import Array
from hts_torchrl.config import ArraySpec, EnvSpec, Key

_SCALARS: dict[Key, str] = {
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
    specs.update({key: ArraySpec((1,), np.dtype(dtype)) for key, dtype in _SCALARS.items()})
    specs["collector", "traj_ids"] = ArraySpec((), np.dtype(np.int64))
    return specs


class RolloutStorage:
    """Arrays ``[N, T, ...]`` of one round.

    **Writer**: row ``n`` belongs to the executor of environment ``n``, so each cell has one.
    **Reader**: the learner. **Visible when**: the executor has reported its round finished.
    """

    def __init__(self, arrays: dict[Key, Array]) -> None:
        self.arrays = arrays

    def record(self, rows: slice, step: int, values: Mapping[Key, Array]) -> None:
        """Fill the cells of environments ``rows`` at ``step``."""
        for key, value in values.items():
            self.arrays[key][rows, step] = value
