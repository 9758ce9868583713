"""How long nothing has been heard of each worker."""

from __future__ import annotations

import time

import numpy as np

from hts_torchrl.buffers.arena import Array
from hts_torchrl.buffers.logbook import Logbook


class Silence:
    """Looks into the logbook now and then; workers have nothing to do for it.

    Example:
        >>> silence = Silence(board.logbook)    # doctest: +SKIP
        >>> silence.lasts_s()                   # doctest: +SKIP
        array([0. , 0. , 7.3])
    """

    def __init__(self, logbook: Logbook) -> None:
        self._logbook = logbook
        self._signs = logbook.signs()
        self._since_s = np.full(len(self._signs), time.monotonic())

    def lasts_s(self) -> Array:
        """Return the seconds since the last look that found something new, float64 ``[workers]``.

        The silence of all begins when this is made.
        """
        signs, before = self._logbook.signs(), self._signs
        self._signs = signs
        now_s = time.monotonic()
        self._since_s[(signs != before).any(axis=1)] = now_s
        lasts_s: Array = now_s - self._since_s
        return lasts_s
