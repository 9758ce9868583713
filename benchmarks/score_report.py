"""The results of ``time_to_score.py``: what a run is, the table and the figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from finished_runs import NEVER
from harness import markdown
from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Run:
    """What is run: columns of the results by which a finished run is found again."""

    task: str
    method: str
    seed: int
    by: str
    last_score: float
    """At which it ends."""
    max_minutes: float
    evaluation_frames: int
    arguments: str
    """Of hts-torchrl fit, or the setting of another system."""

    @property
    def name(self) -> str:
        return f"{self.task.replace('/', '_')}_{self.method}_{self.seed}"


@dataclass(frozen=True)
class Point:
    """A mean score of games, in an evaluation or in training."""

    minutes: float
    frames: float
    score: float


Curve = list[Point]


def reached(curve: Curve, score: float, unit: str) -> float:
    """Return the minutes or frames of the first point that has the score."""
    return next((getattr(point, unit) for point in curve if point.score >= score), NEVER)


def table(runs: dict[Run, Curve], scores: Sequence[float]) -> str:
    """Return a row for each method of each task."""
    heads = [f"{unit} to {score:g}" for score in scores for unit in ("minutes", "steps")]
    heads, rows = ["task", "method", "seeds", *heads, "best", "last"], []
    for task, method in dict.fromkeys((run.task, run.method) for run in runs):
        mine = [curve for r, curve in runs.items() if (r.task, r.method) == (task, method)]
        cells = [middle(mine, s, unit) for s in scores for unit in ("minutes", "frames")]
        best = [max(point.score for point in curve) for curve in mine]
        last = [curve[-1].score for curve in mine]
        cells += [with_range(each, "{:.3g}".format, statistics.median_low) for each in (best, last)]
        rows.append(dict(zip(heads, [task, method, len(mine), *cells], strict=True)))
    return markdown(rows)


def middle(curves: Sequence[Curve], score: float, unit: str) -> str:
    """Return the median of runs, the worse one of two, and their range; ``-`` if it is never."""

    def text(value: float) -> str:
        if value == NEVER:
            return "-"
        return f"{value:.2f}" if unit == "minutes" else f"{value:,.0f}"

    values = [reached(curve, score, unit) for curve in curves]
    return with_range(values, text, statistics.median_high)


def with_range(
    values: Sequence[float],
    text: Callable[[float], str],
    median_of: Callable[[Sequence[float]], float],
) -> str:
    median = text(median_of(values))
    if len(values) == 1 or min(values) == NEVER:
        return median
    return f"{median} ({text(min(values))} to {text(max(values))})"


def draw(runs: dict[Run, Curve], scores: Sequence[float], path: Path) -> None:
    tasks = list(dict.fromkeys(run.task for run in runs))
    methods = list(dict.fromkeys(run.method for run in runs))
    figure = Figure(figsize=(8, 3.2 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), 2, squeeze=False, sharey="row")
    for (row, task), (column, unit) in product(enumerate(tasks), enumerate(("minutes", "frames"))):
        axes = panels[row, column]
        for score in scores:
            axes.axhline(score, color="0.8")
        for number, method in enumerate(methods):
            mine = [curve for r, curve in runs.items() if (r.task, r.method) == (task, method)]
            if mine:
                draw_method(axes, mine, unit, color=f"C{number}", label=method)
        axes.locator_params(axis="x", nbins=6)
        axes.set(title=task, xlabel={"minutes": "minutes of training", "frames": "steps"}[unit])
    panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def draw_method(axes: Axes, curves: Sequence[Curve], unit: str, *, color: str, label: str) -> None:
    """Draw a run as it is; of several the median, and as a band the range."""
    places = [np.array([getattr(point, unit) for point in curve]) for curve in curves]
    scores = [np.array([point.score for point in curve]) for curve in curves]
    if len(curves) == 1:
        axes.plot(places[0], scores[0], color=color, label=label)
        return
    grid, on_grid = common_grid(places, scores)
    axes.plot(grid, np.median(on_grid, axis=0), color=color, label=label)
    low, high = on_grid.min(axis=0), on_grid.max(axis=0)
    axes.fill_between(grid, low, high, color=color, alpha=0.2, linewidth=0)


def common_grid(
    places: Sequence[np.ndarray], scores: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return places ``[P]`` from where all runs have scores to the last end, and scores ``[R, P]``.

    A run that has ended keeps its last score.
    """
    grid = np.linspace(max(each[0] for each in places), max(each[-1] for each in places), 200)
    pairs = zip(places, scores, strict=True)
    return grid, np.array([np.interp(grid, place, score) for place, score in pairs])
