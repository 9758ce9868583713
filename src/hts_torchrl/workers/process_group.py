"""Process groups: what an environment has started ends with its worker, however that ends."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from hts_torchrl.buffers.arena import Array


class ProcessGroup:
    """The group of one worker and of all processes that its environments start.

    A group outlives the process that leads it. So its members can be ended by whoever is left:
    the worker itself, the parent, or, where both were killed, any other worker of the crew.

    Args:
        groups: the number of each worker's group, int64 ``[workers]``, in shared memory.
        worker: row of this one.
    """

    def __init__(self, groups: Array, worker: int) -> None:
        self._groups, self._worker = groups, worker
        self._former = os.getpgrp()
        os.setpgid(0, 0)
        groups[worker] = os.getpid()

    def end(self) -> None:
        """Kill the other members, and the groups of workers that are gone."""
        with contextlib.suppress(OSError):  # the parent is gone, and nobody asks for our status
            os.setpgid(0, self._former)
        end_group(int(self._groups[self._worker]))
        for group in self._groups.tolist():
            if group and not _runs(group):
                end_group(group)


def end_group(group: int) -> None:
    """Kill all members of a group; 0 stands for a worker that has none."""
    if group:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def _runs(pid: int) -> bool:
    """Return whether a process runs; one that has ended may wait for long to be asked about."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2]
    except OSError:
        return False
    return state.split()[0] != "Z"
