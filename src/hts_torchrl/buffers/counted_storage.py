"""The storage of debug mode: poisoned before a round, and every write counted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hts_torchrl.buffers.arena import Array
from hts_torchrl.buffers.keys import array_name
from hts_torchrl.buffers.rollout_storage import Cells, RolloutStorage
from hts_torchrl.config import Key
from hts_torchrl.errors import ProtocolError

_POISON = 0xFF


class CountedCells:
    """Cells of one array, and how often each was written."""

    def __init__(self, cells: Cells, counts: Array) -> None:
        self._cells = cells
        self._counts = counts

    def __setitem__(self, step: int, values: Array) -> None:
        """Fill the cells of a step, and count that."""
        self._cells[step] = values
        self._counts[step] += 1


class CountedStorage(RolloutStorage):
    """A :class:`RolloutStorage` that knows how often each cell was written.

    The collector poisons it before a round and checks it after::

        storage.poison()                       # then the executors fill its cells
        storage.check(round_index, first_env)

    **Writer** of the counts, uint8 ``[N, T]`` for each key: the collector between rounds, the
    executor of row ``n`` in a round. **Reader**: the collector, when the round is finished.
    """

    def __init__(self, arrays: dict[Key, Array], counts: dict[Key, Array]) -> None:
        super().__init__(arrays)
        self._counts = counts

    def cells(self, rows: slice) -> Mapping[Key, Cells]:
        """Return cells that count what is written to them."""
        counts = {key: array[rows].swapaxes(0, 1) for key, array in self._counts.items()}
        return {key: CountedCells(view, counts[key]) for key, view in super().cells(rows).items()}

    def poison(self) -> None:
        """Fill every byte with 0xFF (NaN in floats, -1 or the largest in integers)."""
        for array in self.arrays.values():
            array.view(np.uint8)[...] = _POISON
        for counts in self._counts.values():
            counts[...] = 0

    def check(self, round_index: int, first_env: int) -> None:
        """Require that the finished round wrote every cell once.

        Args:
            round_index: of the round.
            first_env: global index of row 0.

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
