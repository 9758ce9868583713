"""How the processes of a worker pool are started."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

from hts_torchrl.compat.processes import PATH_TOO_LONG, forget_fork_server, start_resource_tracker
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.machine import process_limit
from hts_torchrl.workers.process import HELD_BACK

_MOST_SERVERS = 10
_SERVER_ENDS_S = 0.1
# Of file systems that have none, as FAT and mounts of another system's folders; and where a service
# that clears temporary folders has removed the server's.
_NO_SOCKET = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOENT)
# Another thread would put back wrongly what is changed in this process while workers start.
_one_thread_starts = threading.Lock()


def start_process(process: BaseProcess) -> None:
    """Start a process, with another fork server if the last one is gone or another process's.

    Raises:
        ConfigurationError: if the system starts no further process, or the temporary folder takes
            no socket: its name is too long, its file system has none, or it was removed.
    """
    for attempt in range(1, _MOST_SERVERS + 1):
        try:
            process.start()
        except (ChildProcessError, ConnectionError, EOFError) as error:
            if attempt == _MOST_SERVERS:
                what = f"the fork server ended {attempt} times; it tells why, or {process_limit()}"
                raise ConfigurationError(what) from error
            if isinstance(error, ChildProcessError):
                forget_fork_server()  # of the process that this one was forked from
            time.sleep(_SERVER_ENDS_S)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                raise ConfigurationError(process_limit()) from error
            if PATH_TOO_LONG in str(error):
                told = "it is too long for the socket of a fork server; a shorter one"
            elif error.errno in _NO_SOCKET:
                told = f"no socket of a fork server can be there ({error.strerror}); another one"
            else:
                raise
            raise ConfigurationError(
                f"TMPDIR={tempfile.tempdir}: {told} is needed, or start_method='spawn'"
            ) from error
        else:
            return


@contextlib.contextmanager
def children_environment() -> Iterator[dict[str, str]]:
    """Let one thread at a time start children, with one thread each unless the user chose others.

    Children begin with ``python -c``, which takes a file ``random.py`` of the working folder for
    Python's own. They do not, and workers look for modules where this process does.

    Yields:
        The variables of a worker; its fork server may have been started with older ones.
    """
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    with _one_thread_starts:
        before = dict(os.environ)
        added = {*threads, "PYTHONSAFEPATH"} - before.keys()
        os.environ.update(dict.fromkeys(added, "1"))
        try:
            yield {**dict.fromkeys(threads, "1"), **before}
        finally:
            for name in added:
                os.environ.pop(name, None)


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Hold back signals, also from children, which reach their own answer to them seconds later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        # multiprocessing itself does so later, and lets Ctrl-C and SIGTERM through
        start_resource_tracker()
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
