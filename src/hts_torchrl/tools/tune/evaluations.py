"""The evaluations of a run, while it trains and afterwards."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np


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
    """Return the shortest number with these bits: 0.9 is logged as 0.8999999762."""
    return float(str(np.float32(figure)))
