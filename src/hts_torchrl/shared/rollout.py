"""Where rounds are written: one storage, and the two in turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from hts_torchrl.errors import ProtocolError
from hts_torchrl.schedule import NUM_STORAGES
from hts_torchrl.shared.arrays import Layout, SharedArrays, layout_of
from hts_torchrl.specs import Array, ArraySpec, EnvSpec, Key, array_name, next_key

NUMBERS: dict[Key, str] = {
    ("next", "reward"): "float32",
    ("next", "terminated"): "bool",
    ("next", "truncated"): "bool",
    ("next", "episode_end"): "bool",
    ("next", "episode_reward"): "float32",
    ("next", "step_count"): "int64",
}
"""What executors count and note of each step, with its type."""


DISCOUNTED: Key = ("next", "discounted_return")


def storage_specs(
    spec: EnvSpec, outputs: Mapping[Key, ArraySpec], *, discounted: bool = False
) -> dict[Key, ArraySpec]:
    """List every array of a storage by its TensorDict key, without ``[N, T]``.

    Numbers of a step have a last dimension of 1, as in TorchRL.
    """
    specs: dict[Key, ArraySpec] = {}
    for key, array in spec.observations.items():
        specs[key] = specs[next_key(key)] = array
    specs.update(spec.memory.arrays)
    specs.update(outputs)
    specs.update({key: ArraySpec((1,), np.dtype(dtype)) for key, dtype in NUMBERS.items()})
    if discounted:
        specs[DISCOUNTED] = ArraySpec((1,), np.dtype(np.float32))
    specs["collector", "traj_ids"] = ArraySpec((), np.dtype(np.int64))
    return specs


class DebugCells:
    """Cells ``[T, G, ...]`` of one array, and how often each was written."""

    def __init__(self, cells: Array, counts: Array) -> None:
        self._cells = cells
        self._counts = counts

    def __setitem__(self, step: int, values: Array) -> None:
        """Fill the cells of a step, and count that."""
        self._cells[step] = values
        self._counts[step] += 1


class RolloutStorage:
    """Arrays ``[N, T, ...]`` of one round; in debug mode also how often each cell was written.

    The collector calls, and without counts neither does anything::

        storage.poison()                       # then the executors fill its cells
        storage.check(round_index, first_env)

    **Writer**: row ``n`` belongs to the executor of environment ``n``, so each cell has one.
    **Reader**: the learner. **Visible when**: the executor has reported its round finished. The
    counts, uint8 ``[N, T]`` for each key, are alike; between rounds the collector writes to both.
    """

    def __init__(self, arrays: dict[Key, Array], counts: dict[Key, Array] | None = None) -> None:
        self.arrays = arrays
        self._counts = counts or {}

    def cells(self, rows: slice) -> Mapping[Key, Array | DebugCells]:
        """Return what the executor of the G environments ``rows`` fills by step, ``[T, G, ...]``.

        Numbers have no last dimension. Views are made once, as an executor's step has time for
        little else than writing to them.
        """
        cells = {key: array[rows].swapaxes(0, 1) for key, array in self.arrays.items()}
        cells |= {key: cells[key][..., 0] for key in (*NUMBERS, DISCOUNTED) if key in cells}
        if not self._counts:
            return cells
        counts = {key: array[rows].swapaxes(0, 1) for key, array in self._counts.items()}
        return {key: DebugCells(view, counts[key]) for key, view in cells.items()}

    def poison(self) -> None:
        """Fill every byte with 0xFF (NaN in floats, -1 or the largest in integers)."""
        for key, counts in self._counts.items():
            self.arrays[key].view(np.uint8)[...] = 0xFF
            counts[...] = 0

    def check(self, round_index: int, first_env: int) -> None:
        """Require that the finished round wrote every cell once.

        Raises:
            ProtocolError: naming the first cell for which that is not so.
        """
        for key, counts in self._counts.items():
            wrong = np.argwhere(counts != 1)
            if len(wrong):
                row, step = wrong[0].tolist()
                times = {0: "never", 2: "twice"}.get(int(counts[row, step]), "many times")
                raise ProtocolError(
                    f"{array_name(key)} of environment {first_env + row}, round {round_index}, "
                    f"step {step}, was written {times}, not once"
                )


class DoubleStorage:
    """Two storages: executors write one while the learner reads the other.

    Which is which follows from the round's number (:meth:`Schedule.storage_of`), so nobody has to
    signal the exchange. In debug mode both count what is written into them.
    """

    def __init__(self, arrays: SharedArrays, keys: Collection[Key], *, debug: bool = False) -> None:
        def half(index: int, kind: str) -> dict[Key, Array]:
            return {key: array[index] for key, array in arrays.by_key(kind, keys).items()}

        self._storages = [
            RolloutStorage(half(index, "rollout"), half(index, "writes") if debug else None)
            for index in range(NUM_STORAGES)
        ]

    @staticmethod
    def layout(
        specs: Mapping[Key, ArraySpec], num_envs: int, steps: int, *, debug: bool = False
    ) -> Layout:
        """Shapes ``[2, N, T, ...]``; in debug mode also of the counts of writes, ``[2, N, T]``."""
        cells = (NUM_STORAGES, num_envs, steps)
        layout = layout_of("rollout", specs, *cells)
        if debug:
            layout |= {f"writes/{array_name(key)}": (cells, "uint8") for key in specs}
        return layout

    def __getitem__(self, storage: int) -> RolloutStorage:
        """Return one of the two."""
        return self._storages[storage]
