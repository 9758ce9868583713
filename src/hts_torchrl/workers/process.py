"""The life of a worker process, from start to a reported end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import cloudpickle

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.machine import process_limit
from hts_torchrl.shared.pipes import PoolStopped
from hts_torchrl.shared.worker_status import BusyTimer
from hts_torchrl.specs import Array
from hts_torchrl.workers.diagnostics import STACK_SIGNAL, StackPipe

if TYPE_CHECKING:
    from hts_torchrl.shared.buffers import SharedBuffers
    from hts_torchrl.workers.actor import Actor
    from hts_torchrl.workers.executor import Executor

# They reach the whole process group: the parent alone answers them.
LEFT_TO_THE_PARENT = (signal.SIGINT, signal.SIGTERM)
# SLURM can send all processes of a run the other one, too.
HELD_BACK = (*LEFT_TO_THE_PARENT, STACK_SIGNAL)
# Longer than the parent waits before it kills whoever is left, and tells of it.
_GRACE_S = 4.0
# What was killed ends within milliseconds, where the machine is not overloaded.
_REAPED_S = 1.0


@dataclass
class WorkerTask:
    """What a worker process is started with, and what it does."""

    shared: SharedBuffers
    role: Literal["executor", "actor"]
    index: int
    """Among those of its role."""
    make: bytes
    """A pickled function of the shared buffers: what a worker imports, it imports when it runs."""
    _made: Executor | Actor | None = field(default=None, init=False)

    @property
    def worker(self) -> int:
        """Row in the worker status: executors first, then actors."""
        return self.index + (self.role == "actor") * self.shared.config.num_executors

    def run(self, lifeline: Connection) -> None:
        """Make the executor or the actor, and let it serve until it is stopped."""
        timer = BusyTimer(self.shared.status, self.worker)
        self._made = cloudpickle.loads(self.make)(self.shared)
        self._made.run(lifeline, timer)

    def close(self) -> None:
        """Close what was made."""
        if self._made is not None:
            self._made.close()


def run_worker(
    task: WorkerTask, lifeline: Connection, stacks: StackPipe, variables: Mapping[str, str]
) -> None:
    """Run a task in a process of its own, which does not outlive its lifeline.

    A worker leaves by itself where it waits. If it is elsewhere (starting, in a step that never
    returns) it is ended some seconds after the lifeline, also when the parent was killed. Wherever
    it is, it answers a request for its stack. What its environments have started ends with it.
    """
    os.environ.clear()
    os.environ.update(variables)
    stacks.answer()
    os.register_at_fork(after_in_child=_answer_as_usual)
    group = ProcessGroup(task.shared.status.groups, task.worker)
    multiprocessing.current_process().daemon = False  # else environments may start no processes
    try:
        threading.Thread(target=exit_with_parent, args=(lifeline, group), daemon=True).start()
    except RuntimeError:  # "can't start new thread"
        task.shared.status.write_error(task.worker, process_limit(), refused=True)
        group.end()
        sys.exit(1)
    succeeded = run_task(task, lifeline)
    # Closing may hang, and so may the interpreter's end, on a thread that an environment has left.
    threading.Thread(target=_end_soon, args=(group, not succeeded), daemon=True).start()
    succeeded &= close(task)
    group.end()
    sys.exit(not succeeded)


def exit_with_parent(lifeline: Connection, group: ProcessGroup) -> None:
    """Sleep until the lifeline ends, and end the process soon after it."""
    lifeline.poll(None)
    _end_soon(group, status=1)


def _end_soon(group: ProcessGroup, status: int) -> None:
    time.sleep(_GRACE_S)
    group.end()
    os._exit(status)


def run_task(task: WorkerTask, lifeline: Connection) -> bool:
    """Run a task, and return whether it came to its end; else the worker status says why not."""
    # What is ignored would be so in programs that an environment starts, too: a function does it.
    for number in LEFT_TO_THE_PARENT:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)  # calls of C libraries go on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_THE_PARENT)
    try:
        task.run(lifeline)
    except PoolStopped:
        pass
    except ConfigurationError as error:
        line = "; ".join([str(error), *getattr(error, "__notes__", [])])
        task.shared.status.write_error(task.worker, line, refused=True)
        return False
    except BaseException as error:
        task.shared.status.write_error(task.worker, _told(error))
        return False
    return True


def close(task: WorkerTask) -> bool:
    """Close a task, and return whether that worked; else its traceback is in the worker status."""
    try:
        task.close()
    except BaseException as error:
        status = task.shared.status
        before = status.read_error(task.worker)
        told = _told(error)
        if not status.refused[task.worker]:
            status.write_error(task.worker, f"{before}\nand then\n{told}" if before else told)
        return False
    return True


def _told(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as another:  # whatever a class of the user's makes of itself
        return f"{type(error).__qualname__}, which cannot be printed: {type(another).__qualname__}"


def _answer_as_usual() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class ProcessGroup:
    """The group of one worker and of all processes that its environments start.

    A group outlives the process that leads it. So its members can be ended by whoever is left:
    the worker itself, the parent, or, where both were killed, any other worker of the worker pool.

    Args:
        groups: the number of each worker's group, int64 ``[workers]``, in shared memory.
        worker: row of this one.
    """

    def __init__(self, groups: Array, worker: int) -> None:
        self._groups, self._made = groups, worker
        self._former = os.getpgrp()
        os.setpgid(0, 0)
        groups[worker] = os.getpid()

    def end(self) -> None:
        """Kill the other members, and the groups of workers that have ended."""
        with contextlib.suppress(OSError):  # the parent has ended, and nobody asks for our status
            os.setpgid(0, self._former)
        end_group(int(self._groups[self._made]))
        os.setpgid(0, 0)  # a thread may yet start others, as a Pool replaces its workers
        for group in self._groups.tolist():
            if group and not is_running(group):
                end_group(group)


def end_group(group: int) -> None:
    """Kill all members of a group; 0 stands for a worker that has none."""
    if group:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def reap(groups: Iterable[int]) -> None:
    """Ask what has ended of some groups for its status, where this process inherits orphans.

    That is so for the first process of a container: nobody else would ask. A group has the number
    of its worker; 0 stands for none.
    """
    deadline = time.monotonic() + _REAPED_S
    for which in (number for group in groups if group for number in (group, -group)):
        with contextlib.suppress(ChildProcessError):  # there is none that is left to this process
            while time.monotonic() < deadline:
                if not os.waitpid(which, os.WNOHANG)[0]:
                    time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended may wait for long to be asked about."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2]
    except OSError:
        return False
    return state.split()[0] != "Z"
