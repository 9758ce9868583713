"""Interquartile means and probabilities of improvement, with intervals by rliable's bootstrap.

Agarwal et al., *Deep Reinforcement Learning at the Edge of the Statistical Precipice* (2021). The
intervals are percentiles of 2,000 stratified resamples of the runs. The runs of a group are of one
environment, so they are one stratum.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from rliable import library, metrics
from scipy import stats

from hts_torchrl.specs import Array

_RESAMPLES = 2000
_CURVE_POINTS = 100


class Estimate(NamedTuple):
    """A figure and its 95 % interval; the bounds are NaN where there are too few runs for one."""

    value: float
    low: float = math.nan
    high: float = math.nan


class Curve(NamedTuple):
    """Interquartile means over the runs, float64 [points] each."""

    place: Array
    """Environment steps or minutes, increasing."""
    value: Array
    low: Array
    """Lower bound of the 95 % interval of each point by itself; NaN if there is one run."""
    high: Array


def interquartile_mean(scores: Array) -> Estimate:
    """Return the mean of the middle half of scores, a quarter left out at either end.

    Args:
        scores: float64 [runs]. Of fewer than four, none is left out.
    """
    point, bounds = _estimates([scores[:, None]], lambda x: np.array([metrics.aggregate_iqm(x)]))
    return Estimate(point[0], *bounds[:, 0]) if len(scores) > 1 else Estimate(point[0])


def probability_of_improvement(scores: Array, others: Array) -> Estimate | None:
    """Return the probability that a run has a higher score than one of the others.

    Equal scores count half.

    Args:
        scores: float64 [runs].
        others: float64 [runs of the other group].

    Returns:
        None if one of them has a single run.
    """
    if min(len(scores), len(others)) < 2:
        return None
    compare: Any = metrics.probability_of_improvement
    point, bounds = _estimates(
        [scores[:, None], others[:, None]], lambda x, y: np.array([compare(x, y)])
    )
    return Estimate(point[0], *bounds[:, 0])


def interquartile_curve(curves: list[tuple[Array, Array]]) -> Curve:
    """Return the interquartile mean along the part that all curves share, at most 100 points.

    Between its own points a curve is taken to be a straight line.

    Args:
        curves: for each run places, increasing, and scores there; float64 [points] each.
    """
    first = max(place[0] for place, _ in curves)
    last = min(place[-1] for place, _ in curves)
    places = np.unique(np.concatenate([place for place, _ in curves]))
    places = places[(places >= first) & (places <= last)]
    if len(places) > _CURVE_POINTS:
        places = places[np.linspace(0, len(places) - 1, _CURVE_POINTS).round().astype(int)]
    scores = np.array([np.interp(places, place, score) for place, score in curves])
    if len(curves) == 1 or not len(places):
        unknown = np.full(len(places), math.nan)
        return Curve(places, scores.mean(axis=0), unknown, unknown)
    # What rliable's aggregate_iqm is for one task, for all points at once.
    point, bounds = _estimates(
        [scores[:, None]], lambda sample: stats.trim_mean(sample[:, 0], 0.25, axis=0)
    )
    return Curve(places, point, *bounds)


def _estimates(samples: list[Array], figure: Any) -> tuple[Array, Array]:  # noqa: ANN401
    """Return figures [F] and bounds [2, F] of samples [runs, 1 task, ...]."""
    # rliable draws from numpy's global generator alone; so it gives the same interval each time.
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    try:
        point, bounds = library.get_interval_estimates(
            {"": samples[0] if len(samples) == 1 else samples}, figure, reps=_RESAMPLES
        )
    finally:
        np.random.set_state(before)  # noqa: NPY002
    return np.asarray(point[""]), np.asarray(bounds[""])
