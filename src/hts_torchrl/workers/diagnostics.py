"""Diagnosis of a silent worker: for how long it is silent, and where in its code it is."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from multiprocessing.connection import Pipe, wait
from multiprocessing.process import BaseProcess

import numpy as np

from hts_torchrl.compat.processes import FIRST_FRAME
from hts_torchrl.shared.worker_status import WorkerStatus
from hts_torchrl.specs import Array

# Looks are a second apart. What lies so far apart was this process's own sleep.
_PAUSE_S = 10.0


class Silence:
    """Looks into the worker status now and then; workers have nothing to do for it.

    Example:
        >>> from hts_torchrl.shared.arrays import SharedArrays
        >>> status = WorkerStatus(SharedArrays(WorkerStatus.layout(num_workers=2, most_spans=0)))
        >>> silence = Silence(status)
        >>> status.steps[0] += 1            # the first worker shows a sign of life
        >>> silence.lasts_s() > 0
        array([False,  True])
    """

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status
        self._signs = status.signs()
        self._looked_s = time.monotonic()
        self._since_s = np.full(len(self._signs), self._looked_s)

    def lasts_s(self) -> Array:
        """Return the seconds since the last look that found something new, float64 ``[workers]``.

        The silence of all begins when this is made. A pause of this process between two looks does
        not count: a container was frozen, or a job suspended, with all of its workers.
        """
        signs, before = self._status.signs(), self._signs
        self._signs = signs
        now_s = time.monotonic()
        if (pause_s := now_s - self._looked_s) > _PAUSE_S:
            self._since_s += pause_s
        self._looked_s = now_s
        self._since_s[(signs != before).any(axis=1)] = now_s
        lasts_s: Array = now_s - self._since_s
        return lasts_s


# Any signal would do: it asks for the stack, also inside C code that never returns to Python.
STACK_SIGNAL = signal.SIGUSR1
# A worker answers within milliseconds of being given a core.
_PATIENCE_S = 5.0


class StackPipe:
    """Python stacks of workers, asked for one worker after another.

    **Writer**: the worker that was asked, in the handler of a signal. **Reader**: the worker pool.

    In this order::

        stacks.answer()             # the worker, once
        print(stacks.ask(process))  # the worker pool
    """

    def __init__(self) -> None:
        self._reader, self._writer = Pipe(duplex=False)
        # Somebody else may send the signal too, and nobody reads: a full pipe must not hold it.
        os.set_blocking(self._writer.fileno(), False)

    def answer(self) -> None:
        """Answer the signal in this process from now on; the pipe must be kept."""
        faulthandler.register(STACK_SIGNAL, self._writer.fileno(), all_threads=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACK_SIGNAL])

    def ask(self, process: BaseProcess) -> str:
        """Return the stack of a worker's main thread, innermost call first.

        It is empty if the worker is not running: stopped, blocked in the kernel, or dead.
        """
        assert process.pid is not None
        while self._reader.poll():  # what nobody asked for
            self._read()
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, STACK_SIGNAL)
        stack, deadline = b"", time.monotonic() + _PATIENCE_S
        while not stack.endswith(FIRST_FRAME):
            left_s = max(0.0, deadline - time.monotonic())
            if self._reader not in wait([self._reader, process.sentinel], left_s):
                break
            stack += self._read()
        return stack.decode(errors="replace")

    def wait_for_writers(self, timeout_s: float) -> bool:
        """Close the writing end here, and return whether all workers close theirs: they have ended.

        Where the fork server was killed, nothing else shows it.
        """
        self._writer.close()
        deadline = time.monotonic() + timeout_s
        while wait([self._reader], max(0.0, deadline - time.monotonic())):
            if not self._read():
                return True
        return False

    def _read(self) -> bytes:
        return os.read(self._reader.fileno(), 65_536)

    def close(self) -> None:
        """Close both ends here."""
        self._reader.close()
        self._writer.close()
