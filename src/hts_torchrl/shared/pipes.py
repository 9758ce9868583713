"""Pipes on which executors and actors wake each other: a doorbell each, and the ready queue."""

from __future__ import annotations

import os
import select
from copy import copy
from multiprocessing.connection import Connection, Pipe
from typing import Self

import numpy as np

from hts_torchrl.errors import HTSError
from hts_torchrl.specs import Array


class PoolStopped(HTSError):
    """The parent has closed the lifeline, or has ended: the worker stops."""


def sleep_until_readable(fd: int, lifeline: Connection) -> None:
    """Sleep until ``fd`` has something to read; raises :class:`PoolStopped` if the lifeline has.

    The lifeline is the reading end of a pipe, which ends with the parent.
    """
    lifeline_fd = lifeline.fileno()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.register(lifeline_fd, select.POLLIN)
    if any(ready == lifeline_fd for ready, _ in poll.poll()):
        raise PoolStopped("the parent has closed the lifeline")


class Doorbell:
    """Counts rings, and sleeps until enough have come.

    **Writer**: the actors (one ring for each answer) and, between rounds, the collector (one ring
    starts a round). **Reader**: the executor it belongs to. **Visible when**: data is written
    before the ring that announces it. A ring is one byte, so writes never interleave.
    """

    def __init__(self) -> None:
        self._reader, self._writer = Pipe(duplex=False)

    def for_ringing(self) -> Self:
        """Return the same bell without its reading end, which halves what an actor inherits."""
        bell = copy(self)
        del bell._reader  # noqa: SLF001 - of this class
        return bell

    def ring(self, times: int = 1) -> None:
        """Announce ``times`` things.

        Raises:
            PoolStopped: if the parent, which keeps a reading end, has ended.
        """
        try:
            os.write(self._writer.fileno(), b"\0" * times)
        except BrokenPipeError:
            raise PoolStopped("the parent is gone") from None

    def wait(self, rings: int, lifeline: Connection) -> None:
        """Sleep until ``rings`` rings have come; released by actors, or by the collector.

        Raises:
            PoolStopped: if the parent closes the lifeline, or dies.
        """
        while rings:
            sleep_until_readable(self._reader.fileno(), lifeline)
            rings -= len(os.read(self._reader.fileno(), rings))

    def close(self) -> None:
        """Close both ends here."""
        self._reader.close()
        self._writer.close()


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
            PoolStopped: if the parent, which keeps a reading end, has ended.
        """
        try:
            os.write(self._writer.fileno(), numbers.tobytes())
        except BrokenPipeError:
            raise PoolStopped("the parent is gone") from None

    def take(self, most: int, lifeline: Connection) -> Array:
        """Take up to ``most`` numbers; sleeps until an executor announces one.

        Raises:
            PoolStopped: if the parent closes the lifeline, or dies.
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
            PoolStopped: if the parent closes the lifeline, or dies.
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
