"""Ctrl-C and SLURM's signal to requeue, put off until what must not be cut in two is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any


class DeferredInterrupt:
    """Holds back one signal of each kind from :meth:`hold` to :meth:`release`.

    Between the last step of the optimiser and the next round, weights, schedules and counts move
    one after the other; a checkpoint written among them would fit no moment of an undisturbed run.
    A second one of a kind is not held back. In a thread other than the main one, which no signal
    reaches, nothing happens.

    Args:
        numbers: signals that are held back, where a function answers them.
    """

    def __init__(self, numbers: Sequence[int] = (signal.SIGINT,)) -> None:
        self._numbers = numbers
        self._handlers: dict[int, Any] = {}
        self._held: list[int] = []

    def hold(self) -> None:
        """Begin to hold back."""
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return
        handlers = {number: signal.getsignal(number) for number in self._numbers}
        self._handlers = {n: handler for n, handler in handlers.items() if callable(handler)}
        for number in self._handlers:
            signal.signal(number, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if number in self._held:
            self._handlers[number](number, frame)
        else:
            self._held.append(number)

    def release(self) -> None:
        """Let through what was held back, as if it came now."""
        handlers, held = self._handlers, self._held
        self._handlers, self._held = {}, []
        for number, handler in handlers.items():
            if signal.getsignal(number) == self._hold:  # Lightning has put its own back at the end
                signal.signal(number, handler)
        for number in held:
            handlers[number](number, None)
