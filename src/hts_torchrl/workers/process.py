"""The life of a worker process, from start to a reported end."""

from __future__ import annotations

import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Protocol

from hts_torchrl.buffers.board import Board
from hts_torchrl.buffers.doorbell import CrewStopped


class WorkerTask(Protocol):
    """What a worker process is started with."""

    board: Board
    index: int

    @property
    def worker(self) -> int:
        """Row in the logbook."""
        ...

    def run(self, lifeline: Connection) -> None:
        """Work until the lifeline ends."""
        ...


def work(task: WorkerTask, lifeline: Connection) -> None:
    """Run a task; leave its traceback in the logbook if it raises.

    Ctrl-C reaches the whole process group: the parent alone answers it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        task.run(lifeline)
    except (CrewStopped, BrokenPipeError):
        return
    except BaseException:
        task.board.logbook.write_error(task.worker, traceback.format_exc())
        sys.exit(1)
