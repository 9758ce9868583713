"""What the games of a training score: written in the same way by everyone in ``time_to_score.py``.

Contestants from other environments import this file too, so it needs nothing else.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WINDOW = 100
"""Games of which a score is the mean."""
FEWEST = 20
"""Games that must have finished before there is a score."""
_MOST_POINTS = 1000


class TrainingScores:
    """Writes minutes, steps and scores into a CSV file, and tells when the run is over.

    The loop of a program that trains::

        scores.begin()  # imports are done, environments and workers have been started
        for steps in ...:
            ...  # a rollout and its update
            if scores.add(steps, raw_returns_of_the_last_games):
                break
        scores.end()

    A run is over at its last score, after ``max_minutes``, or when its starter is gone; without
    scores, after its steps. Not every round has a point: so many that a figure needs no more, and
    the first at each of the scores.

    Args:
        path: of the file.
        scores: that the table will have.
        max_minutes: of training.
    """

    def __init__(self, path: str, scores: Sequence[float], max_minutes: float) -> None:
        self._file = Path(path).open("w", buffering=1)  # noqa: SIM115 - until the end of the run
        self._file.write("minutes,frames,score\n")
        self._awaited = sorted(scores)
        self._max_minutes = max_minutes
        self._starter = os.getppid()
        self._began_s = 0.0
        self._written_minutes = -math.inf
        self._left_out = ""
        self.over = False

    @classmethod
    def of(cls, run: dict[str, Any]) -> TrainingScores | None:
        """Return what a program's settings ask for; None if they are those of throughput."""
        return cls(**run["scores"]) if "scores" in run else None

    def begin(self, earlier_s: float = 0.0) -> None:
        """Start the clock: the first rollout begins, or began so many seconds ago."""
        self._began_s = time.monotonic() - earlier_s

    def add(self, steps: int, returns: Sequence[float]) -> bool:
        """Note the raw returns of the last 100 games after an update; returns whether to stop."""
        if self.over:
            return True
        minutes = (time.monotonic() - self._began_s) / 60
        self.over = minutes >= self._max_minutes or os.getppid() != self._starter
        games = [float(each) for each in returns][-WINDOW:]
        if len(games) >= FEWEST:
            self._note(minutes, steps, sum(games) / len(games))
        return self.over

    def _note(self, minutes: float, steps: int, score: float) -> None:
        reached = [each for each in self._awaited if score >= each]
        self._awaited = self._awaited[len(reached) :]
        self.over = self.over or (bool(reached) and not self._awaited)
        self._left_out = f"{minutes},{steps},{score}\n"
        if reached or minutes - self._written_minutes >= self._max_minutes / _MOST_POINTS:
            self._written_minutes = minutes
            self._write()

    def _write(self) -> None:
        self._file.write(self._left_out)
        self._left_out = ""

    def end(self) -> None:
        """Write the last point, whatever ended the run; may be called twice."""
        self.over = True
        if not self._file.closed:
            self._write()
            self._file.close()
