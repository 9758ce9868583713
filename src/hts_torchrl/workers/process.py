"""The life of a worker process, from start to a reported end."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Protocol

from hts_torchrl.buffers.board import Board
from hts_torchrl.buffers.doorbell import CrewStopped
from hts_torchrl.workers.stacks import StackPipe


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


# They reach the whole process group: the parent alone answers them.
LEFT_TO_THE_PARENT = (signal.SIGINT, signal.SIGTERM)
# As long as the parent waits before it kills whoever is left.
_GRACE_S = 3.0


def live(task: WorkerTask, lifeline: Connection, stacks: StackPipe) -> None:
    """Run a task in a process of its own, which does not outlive its lifeline.

    A worker leaves by itself where it waits. If it is elsewhere (starting, in a step that never
    returns) it is ended some seconds after the lifeline, also when the parent was killed. Wherever
    it is, it tells when it is asked.
    """
    stacks.answer()
    threading.Thread(target=follow, args=(lifeline,), daemon=True).start()
    work(task, lifeline)


def follow(lifeline: Connection) -> None:
    """Sleep until the lifeline ends, and end the process soon after it."""
    poll = select.poll()
    poll.register(lifeline.fileno(), select.POLLIN)
    poll.poll()
    time.sleep(_GRACE_S)
    os._exit(1)


def work(task: WorkerTask, lifeline: Connection) -> None:
    """Run a task; leave its traceback in the logbook if it raises."""
    for number in LEFT_TO_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_THE_PARENT)
    try:
        task.run(lifeline)
    except (CrewStopped, BrokenPipeError):
        return
    except BaseException:
        task.board.logbook.write_error(task.worker, traceback.format_exc())
        sys.exit(1)
