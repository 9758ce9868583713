"""One trial: its evaluations as they come, and what it is worth in the end."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from hts_torchrl.tools.tune.study_file import Objective

if TYPE_CHECKING:
    from optuna import Trial

State = Literal["complete", "pruned", "failed"]


class Evaluation(NamedTuple):
    """One evaluation of a run."""

    score: float
    """Mean raw score of its games."""
    frames: int
    """Environment steps of training before it."""
    minutes: float
    """Minutes of training before it, without evaluations."""


def read_evaluations(metrics: Path) -> list[Evaluation]:
    """Return the finished evaluations of a ``metrics.csv``, in order; none if it is not there.

    The file may be written meanwhile: Lightning's ``CSVLogger`` has each evaluation in it as soon
    as it has ended, and writes the whole file again where a column is new. So a line counts only
    if it is whole.
    """
    try:
        text = metrics.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    found: dict[int, Evaluation] = {}
    for row in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()):
        figures = [row.get(f"eval/{name}") for name in Evaluation._fields]
        if all(figures):
            score, frames, minutes = (_meant(str(figure)) for figure in figures)
            found.setdefault(int(frames), Evaluation(score, int(frames), minutes))
    return list(found.values())


def _meant(figure: str) -> float:
    """Return the shortest number with these bits: 0.9 is logged as 0.8999999762; frames whole."""
    number = float(figure)
    return number if number.is_integer() else float(str(np.float32(number)))


@dataclass(frozen=True)
class Budget:
    """Environment steps of one seed of a trial."""

    total_frames: int
    """The most that a trial of the study has."""
    evaluation_frames: int | None
    """Between evaluations; None if they are not counted in steps."""

    def step(self, seed: int, frames: int) -> int:
        """Return Optuna's step of an evaluation: environment steps since the trial began.

        Rounds of different lengths end at different steps, and trials are compared where they
        have the same one. So it is the nearest that ``evaluation_frames`` asks for.

        Args:
            seed: place of the seed among those of the trial, from 0.
            frames: environment steps of this seed.
        """
        every = self.evaluation_frames or 1
        return seed * self.total_frames + max(1, round(frames / every)) * every


@dataclass(frozen=True)
class Outcome:
    """How a trial ended."""

    state: State
    value: float | None = None
    """By the objective; None unless it is complete."""
    reason: str = ""
    """Why it has no value."""
    score: float | None = None
    """Mean over the seeds of the last score that was seen of each."""
    frames: int = 0
    """Environment steps up to those scores, of all seeds together."""
    minutes: float = 0.0
    """Minutes of training up to those scores, of all seeds together."""


@dataclass
class TrialWatch:
    """Takes evaluations one by one, reports them to Optuna, and says when a seed is to end.

    What was evaluated after that is not looked at. So the outcome does not depend on how soon a
    run ends, nor on how often its files are read::

        watch = TrialWatch(trial, objective, budget)
        for seed in seeds:
            watch.begin_seed()
            while trains and not watch.look(read_evaluations(metrics)):
                ...
        outcome = watch.outcome()
    """

    trial: Trial
    objective: Objective
    budget: Budget
    pruned: bool = False
    """Whether the pruner has stopped the trial."""
    _seen: list[list[Evaluation]] = field(default_factory=list)
    _steps: set[int] = field(default_factory=set)

    def begin_seed(self) -> None:
        """Take what is looked at from now on for the next seed's."""
        self._seen.append([])

    def look(self, evaluations: list[Evaluation]) -> bool:
        """Take the seed's evaluations so far; return whether it need not train on."""
        mine = self._seen[-1]
        for evaluation in evaluations[len(mine) :]:
            if self._is_enough():
                break
            mine.append(evaluation)
            self._report(evaluation.frames)
        return self._is_enough()

    @property
    def has_seen(self) -> bool:
        """Whether the seed has an evaluation."""
        return bool(self._seen[-1])

    @property
    def goes_on(self) -> bool:
        """Whether further seeds are to train, now that this one has ended."""
        missed = self.objective.target is not None and not self._reached(self._seen[-1][-1])
        return not self.pruned and not missed

    def _is_enough(self) -> bool:
        return self.pruned or (self.has_seen and self._reached(self._seen[-1][-1]))

    def _reached(self, evaluation: Evaluation) -> bool:
        return self.objective.target is not None and evaluation.score >= self.objective.target

    def _report(self, frames: int) -> None:
        step = self.budget.step(len(self._seen) - 1, frames)
        if step in self._steps:  # two evaluations within half of evaluation_frames
            return
        self._steps.add(step)
        score = self._score()
        self.trial.report(score if self.objective.direction == "maximize" else -score, step)
        self.pruned = self.trial.should_prune()

    def _score(self) -> float:
        return mean(seen[-1].score for seen in self._seen if seen)

    def outcome(self) -> Outcome:
        """Return how the trial ended, if all of its seeds did."""
        last, score = [seen[-1] for seen in self._seen], self._score()
        ended = partial(
            Outcome,
            score=score,
            frames=sum(each.frames for each in last),
            minutes=sum(each.minutes for each in last),
        )
        if not math.isfinite(score):
            return ended("failed", reason=f"its score is {score}")
        if self.pruned:
            return ended("pruned", reason="by the pruner")
        if self.objective.aim == "score":
            return ended("complete", score)
        if not all(map(self._reached, last)):
            return ended("pruned", reason=f"without a score of {self.objective.target:g}")
        frames_to = self.objective.aim == "frames_to"
        value = mean(each.frames if frames_to else each.minutes for each in last)
        return ended("complete", value)
