"""A queue of numbers: environments that wait for an action, executors that have finished."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection, Pipe

import numpy as np

from hts_torchrl.buffers.arena import Array
from hts_torchrl.buffers.doorbell import CrewStopped, sleep_until_readable

_ID = np.dtype(np.int32)


class ReadyQueue:
    """Numbers whose data is written: ``observation_ready`` and ``round_finished``.

    One pipe is queue and doorbell in one: a write under PIPE_BUF is atomic, a read takes all that
    waits, so any number of executors and actors share it without a lock that a killed process
    could keep.
    """

    def __init__(self) -> None:
        self._reader, self._writer = Pipe(duplex=False)
        os.set_blocking(self._reader.fileno(), False)

    def put(self, numbers: Array) -> None:
        """Announce numbers (int32).

        Raises:
            CrewStopped: if the parent, which keeps a reading end, is gone.
        """
        try:
            os.write(self._writer.fileno(), numbers.tobytes())
        except BrokenPipeError:
            raise CrewStopped("the parent is gone") from None

    def take(self, most: int, lifeline: Connection) -> Array:
        """Take up to ``most`` numbers; sleeps until an executor announces one.

        Raises:
            CrewStopped: if the parent closes the lifeline, or dies.
        """
        while True:
            sleep_until_readable(self.fileno(), lifeline)
            numbers = self.take_waiting(most)
            if len(numbers):  # else another actor was faster
                return numbers

    def take_all(self, count: int, lifeline: Connection) -> Array:
        """Take exactly ``count`` numbers; sleeps until the last of them is announced.

        For one taker alone: two would each hold a part and wait for the other's.

        Raises:
            CrewStopped: if the parent closes the lifeline, or dies.
        """
        taken = self.take(count, lifeline)
        while len(taken) < count:
            taken = np.concatenate([taken, self.take(count - len(taken), lifeline)])
        return taken

    def take_waiting(self, most: int) -> Array:
        """Take up to ``most`` numbers, none if none waits."""
        try:
            return np.frombuffer(os.read(self.fileno(), most * _ID.itemsize), _ID)
        except BlockingIOError:
            return np.empty(0, _ID)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when something waits."""
        return self._reader.fileno()

    def close(self) -> None:
        """Close both ends here."""
        self._reader.close()
        self._writer.close()
