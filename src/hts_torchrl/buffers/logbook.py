"""What each worker tells about itself: how far it is, how it spent its time, why it failed."""

from __future__ import annotations

import time

from hts_torchrl.buffers.arena import Layout, SharedArena

_ERROR_BYTES = 16_384


class Logbook:
    """One row for each worker: executors first, then actors.

    **Writer**: the worker of the row. **Reader**: the collector, at any time: figures may be one
    step old. The error text is final once the worker's process has ended.
    """

    def __init__(self, arena: SharedArena) -> None:
        self.rounds = arena["log_round"]
        self.steps = arena["log_step"]
        self.busy_s = arena["log_busy_s"]
        self.waiting_s = arena["log_waiting_s"]
        self._errors = arena["log_error"]

    @staticmethod
    def layout(num_workers: int) -> Layout:
        """Round, step, seconds at work, seconds waiting, and UTF-8 text, one row a worker."""
        return {
            "log_round": ((num_workers,), "int64"),
            "log_step": ((num_workers,), "int64"),
            "log_busy_s": ((num_workers,), "float64"),
            "log_waiting_s": ((num_workers,), "float64"),
            "log_error": ((num_workers, _ERROR_BYTES), "uint8"),
        }

    def write_error(self, worker: int, text: str) -> None:
        """Leave the traceback of a worker that is about to end; the tail is kept."""
        data = text.encode()[-_ERROR_BYTES:]
        self._errors[worker, : len(data)] = memoryview(data)

    def read_error(self, worker: int) -> str:
        """Return what the worker left, or an empty string."""
        text: bytes = self._errors[worker].tobytes()
        return text.rstrip(b"\0").decode(errors="replace")


class Stopwatch:
    """Splits a worker's time into work and waiting.

    Example:
        >>> watch.waits()   # about to sleep            # doctest: +SKIP
        >>> watch.works()   # woken up                  # doctest: +SKIP
    """

    def __init__(self, logbook: Logbook, worker: int) -> None:
        self._logbook = logbook
        self._worker = worker
        self._since = time.perf_counter()

    def waits(self) -> None:
        """Book the time since the last call as work."""
        now = time.perf_counter()
        self._logbook.busy_s[self._worker] += now - self._since
        self._since = now

    def works(self) -> None:
        """Book the time since the last call as waiting."""
        now = time.perf_counter()
        self._logbook.waiting_s[self._worker] += now - self._since
        self._since = now
