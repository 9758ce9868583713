"""What each worker reports: how far it is, how it spent its time, why it failed."""

from __future__ import annotations

import time

import numpy as np

from hts_torchrl.shared.arrays import Layout, SharedArrays
from hts_torchrl.specs import Array

_ERROR_BYTES = 16_384
_LEFT_OUT = b"\n[...]\n"


class WorkerStatus:
    """One row for each worker: executors first, then actors.

    **Writer**: the worker of the row. **Reader**: the collector, at any time: figures may be one
    step old. The error text is final once the worker's process has ended.
    """

    def __init__(self, arrays: SharedArrays) -> None:
        self.rounds = arrays["log_round"]
        self.steps = arrays["log_step"]
        self.busy_s = arrays["log_busy_s"]
        self.waiting_s = arrays["log_waiting_s"]
        self.finished_s = arrays["log_finished_s"]
        self.groups = arrays["log_group"]
        self.refused = arrays["log_refused"]
        self.tracing = arrays["log_tracing"]
        self.num_spans = arrays["log_num_spans"]
        self.spans_s = arrays["log_spans_s"]
        self._errors = arrays["log_error"]

    @staticmethod
    def layout(num_workers: int, most_spans: int) -> Layout:
        """Return the arrays, one row a worker.

        Round and step; seconds at work and waiting; when the latest round was finished; process
        group; whether it refused what the user gave; UTF-8 text; and, of a round that is traced,
        the spans ``(begin, end)`` of its work, whose memory is committed only where a round is. All
        clocks are ``time.perf_counter``, which on Linux is the same in all processes.
        """
        return {
            "log_round": ((num_workers,), "int64"),
            "log_step": ((num_workers,), "int64"),
            "log_busy_s": ((num_workers,), "float64"),
            "log_waiting_s": ((num_workers,), "float64"),
            "log_finished_s": ((num_workers,), "float64"),
            "log_group": ((num_workers,), "int64"),
            "log_refused": ((num_workers,), "bool"),
            "log_tracing": ((1,), "bool"),
            "log_num_spans": ((num_workers,), "int64"),
            "log_spans_s": ((num_workers, most_spans, 2), "float64"),
            "log_error": ((num_workers, _ERROR_BYTES), "uint8"),
        }

    def signs(self) -> Array:
        """Return what changes whenever a worker begins or ends a piece of work, float64 ``[W, 4]``.

        Round, step, and seconds at work and waiting, one row for each worker.
        """
        return np.column_stack((self.rounds, self.steps, self.busy_s, self.waiting_s))

    def clear(self) -> None:
        """Clear what ended workers have reported, except their seconds."""
        for array in (self.rounds, self.steps, self.groups, self.refused, self._errors):
            array[:] = 0

    def write_error(self, worker: int, text: str, *, refused: bool = False) -> None:
        """Leave the traceback of a worker that is about to end, or in one line what it has refused.

        Of a long one, both ends are left.
        """
        self.refused[worker] = refused
        data = text.encode(errors="backslashreplace")
        if len(data) > _ERROR_BYTES:
            half = (_ERROR_BYTES - len(_LEFT_OUT)) // 2
            data = data[:half] + _LEFT_OUT + data[-half:]
        self._errors[worker] = 0
        self._errors[worker, : len(data)] = memoryview(data)

    def read_error(self, worker: int) -> str:
        """Return what the worker left, or an empty string."""
        text: bytes = self._errors[worker].tobytes()
        return text.rstrip(b"\0").decode(errors="replace")

    def trace(self, on: bool) -> None:
        """Begin to keep spans, forgetting older ones, or end it; called between rounds."""
        if on:
            self.num_spans[:] = 0
        self.tracing[0] = on

    def add_span(self, worker: int, begin_s: float, end_s: float) -> None:
        """Keep one span of a worker's work; those beyond the layout's number are lost."""
        count = self.num_spans[worker]
        if count < self.spans_s.shape[1]:
            self.spans_s[worker, count] = begin_s, end_s
            self.num_spans[worker] = count + 1

    def spans(self, worker: int) -> list[tuple[float, float]]:
        """Return what was kept, in the order of time."""
        return [(begin, end) for begin, end in self.spans_s[worker, : self.num_spans[worker]]]


class BusyTimer:
    """Splits a worker's time into work and waiting.

    Example:
        >>> status = WorkerStatus(SharedArrays(WorkerStatus.layout(num_workers=2, most_spans=0)))
        >>> timer = BusyTimer(status, worker=1)
        >>> since_s = timer.waits()     # about to sleep
        >>> timer.works()               # woken up
        >>> status.busy_s > 0, status.waiting_s > 0
        (array([False,  True]), array([False,  True]))
    """

    def __init__(self, status: WorkerStatus, worker: int) -> None:
        self._status = status
        self._worker = worker
        self._since = time.perf_counter()

    def waits(self) -> float:
        """Book the time since the last call as work, and as a span if the round is traced.

        Returns:
            The time.
        """
        now = time.perf_counter()
        self._status.busy_s[self._worker] += now - self._since
        if self._status.tracing[0]:
            self._status.add_span(self._worker, self._since, now)
        self._since = now
        return now

    def works(self) -> None:
        """Book the time since the last call as waiting."""
        now = time.perf_counter()
        self._status.waiting_s[self._worker] += now - self._since
        self._since = now
