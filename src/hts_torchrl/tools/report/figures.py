"""The pictures of a report: learning curves with bands, and who waited for whom."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hts_torchrl.tools.report.groups import Group
from hts_torchrl.tools.report.intervals import interquartile_curve
from hts_torchrl.tools.report.run_folder import ROLES, Run

Series: TypeAlias = Literal["evaluations", "training"]
_UNITS = {"frames": "environment steps", "minutes": "minutes of training"}
_SCORES = {"evaluations": "evaluation score", "training": "return of the last 100 training games"}
_BAR = 0.25


def learning_curves(groups: list[Group], series: Series) -> Figure:
    """Return a row of two panels, over steps and over minutes, for each environment.

    A thick line is the interquartile mean over a group's runs, its band the pointwise 95 %
    bootstrap interval; thin lines are the runs.
    """
    environments = list(dict.fromkeys(group.environment for group in groups))
    figure = Figure(figsize=(10, 4 * len(environments)), layout="constrained")
    panels = figure.subplots(len(environments), 2, squeeze=False, sharey="row")
    for row, environment in enumerate(environments):
        for axes, unit in zip(panels[row], _UNITS, strict=True):
            for number, group in enumerate(groups):
                if group.environment == environment:
                    _draw(axes, group, series, unit, color=f"C{number % 10}")
            axes.set(xlabel=_UNITS[unit])
            axes.grid(alpha=0.3)
        panels[row, 0].set(title=environment, ylabel=_SCORES[series])
        if panels[row, 0].lines:
            panels[row, 0].legend(fontsize=8)
    return figure


def _draw(axes: Axes, group: Group, series: Series, unit: str, *, color: str) -> None:
    curves = [
        (curve[unit].to_numpy(), curve["score"].to_numpy())
        for curve in (_series(run, series) for run in group.runs)
        if len(curve)
    ]
    if not curves:
        return
    if len(curves) > 1:
        for place, score in curves:
            axes.plot(place, score, color=color, alpha=0.3, linewidth=0.8)
    mean = interquartile_curve(curves)
    label = f"{group.label} ({len(curves)} {'run' if len(curves) == 1 else 'runs'})"
    axes.plot(mean.place, mean.value, color=color, linewidth=2, label=label)
    axes.fill_between(mean.place, mean.low, mean.high, color=color, alpha=0.2, linewidth=0)


def _series(run: Run, series: Series) -> pd.DataFrame:
    return run.evaluations if series == "evaluations" else run.training


def waiting(groups: list[Group]) -> Figure:
    """Return a bar for each group and role: the share of the time in which it waited.

    A bar is the mean over the group's runs, a dot a run. What was not logged has no bar: without
    worker processes only the learner's waiting is known.
    """
    figure = Figure(figsize=(10, 1.2 + 0.8 * len(groups)), layout="constrained")
    axes = figure.subplots()
    for place, role in enumerate(ROLES):
        rows = [number + (place - 1) * _BAR for number in range(len(groups))]
        shares = [[run.waiting[role] for run in group.runs] for group in groups]
        known = [[share for share in mine if not math.isnan(share)] for mine in shares]
        means = [sum(mine) / len(mine) if mine else math.nan for mine in known]
        axes.barh(rows, means, height=0.9 * _BAR, color=f"C{place}", label=role)
        for row, mine in zip(rows, known, strict=True):
            axes.plot(mine, [row] * len(mine), ".", color="black", markersize=4)
    axes.set(xlim=(0, 1), xlabel="share of the time spent waiting for the others")
    axes.set_yticks(range(len(groups)), [group.label for group in groups])
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    return figure
