"""A pipe on which one executor is told that something waits for it."""

from __future__ import annotations

import functools
import os
import select
import threading
from copy import copy
from multiprocessing.connection import Connection, Pipe
from typing import Self

from hts_torchrl.errors import HTSError


class CrewStopped(HTSError):
    """The parent has closed the lifeline, or is gone: the worker leaves."""


def sleep_until_readable(fd: int, lifeline: Connection) -> None:
    """Sleep until ``fd`` has something to read; raises :class:`CrewStopped` if the lifeline has."""
    lifeline_fd = lifeline.fileno()
    poll = _poll_of(threading.get_ident(), fd, lifeline_fd)
    if any(ready == lifeline_fd for ready, _ in poll.poll()):
        raise CrewStopped("the parent has closed the lifeline")


@functools.lru_cache(maxsize=8)
def _poll_of(thread: int, *fds: int) -> select.poll:  # noqa: ARG001 - only one may use it at a time
    """Return what waits for descriptors: numbers, so it outlives those that it was made for."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll


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
        del bell._reader
        return bell

    def ring(self, times: int = 1) -> None:
        """Announce ``times`` things.

        Raises:
            CrewStopped: if the parent, which keeps a reading end, is gone.
        """
        try:
            os.write(self._writer.fileno(), b"\0" * times)
        except BrokenPipeError:
            raise CrewStopped("the parent is gone") from None

    def wait(self, rings: int, lifeline: Connection) -> None:
        """Sleep until ``rings`` rings have come; released by actors, or by the collector.

        Raises:
            CrewStopped: if the parent closes the lifeline, or dies.
        """
        while rings:
            sleep_until_readable(self._reader.fileno(), lifeline)
            rings -= len(os.read(self._reader.fileno(), rings))

    def close(self) -> None:
        """Close both ends here."""
        self._reader.close()
        self._writer.close()
