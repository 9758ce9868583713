"""What Python's multiprocessing does not document, and what only Linux has. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from multiprocessing.forkserver import _forkserver
from multiprocessing.queues import Queue
from multiprocessing.reduction import DupFd as DupFd
from multiprocessing.resource_tracker import ensure_running
from multiprocessing.util import Finalize as Finalize
from multiprocessing.util import get_temp_dir as get_temp_dir

start_resource_tracker = ensure_running

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

LOST = 255
"""Exit status of a process that can no longer be heard of: its fork server has ended."""

MOST_DESCRIPTORS = 256
"""How many descriptors a fork server hands to a child at most."""

PATH_TOO_LONG = "AF_UNIX path too long"
"""Part of the message where a temporary folder's name leaves no room for a socket's."""

FIRST_FRAME = b'File "<string>", line 1 in <module>\n'
"""Last line of a child's stack: where a process that is begun by ``python -c`` starts."""

IMPORT_FRAME = 'File "<frozen importlib.'
"""Part of each line of a stack that is of Python's own import."""


def forget_fork_server() -> None:
    """Let the next process be started by another fork server.

    A process that was forked from one with a fork server would ask for the state of that server,
    which is not its child, and get an error.
    """
    _forkserver._forkserver_pid = None  # type: ignore[attr-defined]


@contextlib.contextmanager
def without_main_module() -> Iterator[None]:
    """Keep children that are started meanwhile from importing the user's script.

    Spawn and fork server tell each child which file ``__main__`` is, and there is no option not to.
    The script often imports torch, and functions of the script travel by value (cloudpickle).
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def end_with(parent: int) -> None:
    """Have this process sent SIGTERM when its parent ends, however that ends.

    Args:
        parent: its process id. If it has ended already, SIGTERM comes at once.
    """
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def answer_failed_puts(answer: Callable[[BaseException], None]) -> None:
    """Set what this process does where a queue cannot send; Python would drop it and go on.

    Args:
        answer: is given the error, in the queue's own thread.
    """
    Queue._on_queue_feeder_error = staticmethod(lambda error, _: answer(error))  # type: ignore[attr-defined]
