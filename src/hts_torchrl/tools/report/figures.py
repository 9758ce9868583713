"""The figures of a report: learning curves with bands, and who waited for whom."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hts_torchrl.specs import Array
from hts_torchrl.tools.report.groups import Group
from hts_torchrl.tools.report.intervals import interquartile_curve
from hts_torchrl.tools.report.run_folder import ROLES

Series: TypeAlias = Literal["evaluations", "training"]
"""Attributes of a run."""
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
            drawn = [
                _draw(axes, group, series, unit, color=f"C{number % 10}")
                for number, group in enumerate(groups)
                if group.environment == environment
            ]
            axes.set(xlabel=_UNITS[unit])
            axes.grid(alpha=0.3)
        panels[row, 0].set(ylabel=_SCORES[series])
        panels[row, 0].set_title(environment, parse_math=False)
        _add_legend(panels[row, 0], [line for line in drawn if line is not None])
    return figure


def _add_legend(axes: Axes, lines: list[Line2D]) -> None:
    """Name the lines as they are written: ``$`` begins no formula, and ``_`` hides none."""
    if lines:
        named = axes.legend(lines, [str(line.get_label()) for line in lines], fontsize=8)
        for text in named.get_texts():
            text.set_parse_math(False)


def _draw(axes: Axes, group: Group, series: Series, unit: str, *, color: str) -> Line2D | None:
    """Draw a group's curves, and return the thick one, if there is one."""
    curves = [
        (curve[unit].to_numpy(), curve["score"].to_numpy())
        for curve in (getattr(run, series) for run in group.runs)
        if len(curve)
    ]
    if not curves:
        return None
    if len(curves) > 1:
        for place, score in curves:
            dot = _dot_if_alone(place)
            axes.plot(place, score, dot, color=color, alpha=0.3, linewidth=0.8)
    mean = interquartile_curve(curves)
    label = f"{group.label} ({len(curves)} {'run' if len(curves) == 1 else 'runs'})"
    dot = _dot_if_alone(mean.place)
    (line,) = axes.plot(mean.place, mean.value, dot, color=color, linewidth=2, label=label)
    axes.fill_between(mean.place, mean.low, mean.high, color=color, alpha=0.2, linewidth=0)
    return line


def _dot_if_alone(places: Array) -> str:
    """Return a format that shows a curve of one point too, which has no line."""
    return "o" if len(places) == 1 else "-"


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
    axes.set_yticks(range(len(groups)), [group.label for group in groups], parse_math=False)
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    return figure
