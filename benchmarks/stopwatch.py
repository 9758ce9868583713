"""What every measured program needs, whatever it is built with: a clock, and an allocator."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # for programs without hts_torchrl

from hts_torchrl.allocator import keep_freed_memory

__all__ = ["NO_ROUNDS", "ROUNDS_FILE", "Stopwatch", "keep_freed_memory"]

ROUNDS_FILE = "BENCHMARK_ROUNDS"
NO_ROUNDS = -(2**62)


class Stopwatch:
    """Measures steps a second after 2400 steps of warm-up, and 2 updates.

    In a contest (``contest.py``) it counts rounds in a file, and there are never enough.
    """

    def __init__(self, frames_per_round: int, seconds: float) -> None:
        self.frames, self.seconds = frames_per_round, seconds
        self.rounds = -max(2, 2400 // frames_per_round)
        path = os.environ.get(ROUNDS_FILE)
        self.counter = np.memmap(path, np.int64, "r+", shape=1) if path else None

    def round_ended(self) -> bool:
        """Count a round; returns whether enough were measured."""
        self.rounds += 1
        if self.counter is not None:
            self.counter[0] = self.rounds
            return False
        if self.rounds <= 0:
            self.began_s = time.perf_counter()
            return False
        seconds = time.perf_counter() - self.began_s
        self.steps_per_s = self.rounds * self.frames / seconds
        return seconds >= self.seconds
