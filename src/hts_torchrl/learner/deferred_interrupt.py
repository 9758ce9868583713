"""Ctrl-C, put off while a round is being completed."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DeferredInterrupt:
    """Holds back one Ctrl-C from :meth:`hold` to :meth:`release`.

    Between the last step of the optimiser and the next round, weights, schedules and counts move
    one after the other; a checkpoint written among them would fit no moment of an undisturbed run.
    A second Ctrl-C is not held back. In a thread other than the main one, which Ctrl-C never
    reaches, nothing happens.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._held = False

    def hold(self) -> None:
        """Begin to hold back."""
        handler = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        if self._handler is None and main and callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._handler(number, frame)
        self._held = True

    def release(self) -> None:
        """Let through what was held back, as if it came now."""
        if self._handler is None:
            return
        handler, held = self._handler, self._held
        self._handler, self._held = None, False
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(signal.SIGINT, None)
