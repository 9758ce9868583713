"""Steps to a score of several seeds: medians, and their ratios to those of another method.

A run that never reached the score has infinitely many steps, and so counts as longer than all
others. Intervals are the 2.5 and 97.5 percentiles of 10,000 resamples of the seeds; the seeds of
two methods are resampled apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from harness import markdown

RESAMPLES = 10_000

Steps = Mapping[tuple[str, str, str], Sequence[float]]
"""By task, algorithm and method, of each seed."""


def resampled(steps: Sequence[float], stream: int) -> np.ndarray:
    """Return the medians of resamples of the seeds."""
    rng = np.random.default_rng(stream)
    drawn = rng.integers(len(steps), size=(RESAMPLES, len(steps)))
    return np.median(np.array(steps)[drawn], axis=-1)


def bounds(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of figures, some of which may be infinite."""
    ordered, last = np.sort(values), len(values) - 1
    return float(ordered[round(0.025 * last)]), float(ordered[round(0.975 * last)])


def ratios(steps: Sequence[float], base: Sequence[float]) -> np.ndarray:
    """Return the ratio of the medians, and then those of resamples.

    Where neither method reaches the score, nothing is known: the ratio is 1.
    """
    with np.errstate(invalid="ignore"):
        over = np.append(np.median(steps), resampled(steps, 1))
        under = np.append(np.median(base), resampled(base, 0))
        return np.nan_to_num(over / under, nan=1.0, posinf=np.inf)


def whole(steps: float) -> str:
    return "never" if np.isinf(steps) else f"{steps:,.0f}"


def interval(values: np.ndarray) -> str:
    low, high = bounds(values[1:])
    return f"{values[0]:.2f} ({low:.2f} to {high:.2f})"


def table(steps: Steps, base: str) -> str:
    """Return a row for each method of each task, with its ratio to the base."""
    rows = []
    for (task, algorithm, method), mine in steps.items():
        if not mine:
            continue
        low, high = bounds(resampled(mine, 1))
        others = steps.get((task, algorithm, base), ())
        compared = method != base and len(others) > 0
        rows.append({
            "task": task, "algorithm": algorithm, "method": method,
            "median steps (95 %)": f"{whole(np.median(mine))} ({whole(low)} to {whole(high)})",
            f"ratio to {base} (95 %)": interval(ratios(mine, others)) if compared else "",
            "reached": f"{np.isfinite(mine).sum()} of {len(mine)}",
        })  # fmt: skip
    return markdown(rows)


def overview(steps: Steps, base: str) -> str:
    """Return the geometric mean of each method's ratios over the tasks that it was run on."""
    rows = []
    for algorithm, method in dict.fromkeys(key[1:] for key in steps):
        of_tasks = {
            task: ratios(mine, steps[task, algorithm, base])
            for (task, *of), mine in steps.items()
            if of == [algorithm, method] and mine and steps.get((task, algorithm, base))
        }
        if method != base and of_tasks:
            mean = np.exp(np.mean(np.log(list(of_tasks.values())), axis=0))
            rows.append({
                "algorithm": algorithm, "method": method, "tasks": ", ".join(of_tasks),
                f"mean ratio to {base} (95 %)": interval(mean),
            })  # fmt: skip
    return markdown(rows) if rows else ""
