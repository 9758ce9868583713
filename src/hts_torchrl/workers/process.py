"""The life of a worker process, from start to a reported end."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from types import FrameType
from typing import Protocol

from hts_torchrl.buffers.board import Board
from hts_torchrl.buffers.doorbell import CrewStopped
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.workers.process_group import ProcessGroup
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

    def close(self) -> None:
        """Free what was made for the work."""
        ...


# They reach the whole process group: the parent alone answers them.
LEFT_TO_THE_PARENT = (signal.SIGINT, signal.SIGTERM)
# As long as the parent waits before it kills whoever is left.
_GRACE_S = 3.0


def live(task: WorkerTask, lifeline: Connection, stacks: StackPipe) -> None:
    """Run a task in a process of its own, which does not outlive its lifeline.

    A worker leaves by itself where it waits. If it is elsewhere (starting, in a step that never
    returns) it is ended some seconds after the lifeline, also when the parent was killed. Wherever
    it is, it tells when it is asked. What its environments have started ends with it.
    """
    stacks.answer()
    os.register_at_fork(after_in_child=_answer_as_usual)
    group = ProcessGroup(task.board.logbook.groups, task.worker)
    multiprocessing.current_process().daemon = False  # else environments may start no processes
    threading.Thread(target=follow, args=(lifeline, group), daemon=True).start()
    succeeded = work(task, lifeline)
    # Closing may hang, and so may the interpreter's end, on a thread that an environment has left.
    threading.Thread(target=_end_soon, args=(group, not succeeded), daemon=True).start()
    succeeded &= close(task)
    group.end()
    sys.exit(not succeeded)


def follow(lifeline: Connection, group: ProcessGroup) -> None:
    """Sleep until the lifeline ends, and end the process soon after it."""
    poll = select.poll()
    poll.register(lifeline.fileno(), select.POLLIN)
    poll.poll()
    _end_soon(group, status=1)


def _end_soon(group: ProcessGroup, status: int) -> None:
    time.sleep(_GRACE_S)
    group.end()
    os._exit(status)


def work(task: WorkerTask, lifeline: Connection) -> bool:
    """Run a task, and return whether it came to its end; else the logbook says why not."""
    _leave_signals_to_the_parent()
    try:
        task.run(lifeline)
    except CrewStopped:
        pass
    except ConfigurationError as error:
        line = "; ".join([str(error), *getattr(error, "__notes__", [])])
        task.board.logbook.write_error(task.worker, line, refused=True)
        return False
    except BaseException as error:
        task.board.logbook.write_error(task.worker, _told(error))
        return False
    return True


def close(task: WorkerTask) -> bool:
    """Close a task, and return whether that worked; else its traceback is in the logbook."""
    try:
        task.close()
    except BaseException as error:
        logbook = task.board.logbook
        before = logbook.read_error(task.worker)
        told = _told(error)
        if not logbook.refused[task.worker]:
            logbook.write_error(task.worker, f"{before}\nand then\n{told}" if before else told)
        return False
    return True


def _told(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as another:  # whatever a class of the user's makes of itself
        return f"{type(error).__qualname__}, which cannot be printed: {type(another).__qualname__}"


def _leave_signals_to_the_parent() -> None:
    """Do nothing about them; what environments start has the usual answers, and can be terminated.

    A signal that is ignored would be so in programs that an environment starts, too.
    """
    for number in LEFT_TO_THE_PARENT:
        signal.signal(number, _ignore)
        signal.siginterrupt(number, False)  # calls of C libraries go on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_THE_PARENT)


def _ignore(_: int, __: FrameType | None) -> None:
    """Leave a signal to the parent."""


def _answer_as_usual() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
