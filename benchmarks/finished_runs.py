"""What the programs share that train for hours and go on where they were stopped.

A run is a dataclass whose fields tell what was run, and a point a dataclass of figures. The file is
a CSV with a row for each point of each run, appended when the run has ended.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

Run = TypeVar("Run")
Point = TypeVar("Point")

NEVER = float("inf")
"""Steps or minutes to a score that was not reached."""


class FinishedRuns(Generic[Run, Point]):
    """All runs that have ended: what a program must not run again."""

    def __init__(self, path: Path, run: type[Run], point: type[Point]) -> None:
        self.path = path
        self.columns = [f.name for kind in (run, point) for f in fields(kind)]
        self.runs: dict[Run, list[Point]] = {}
        if path.exists():
            with path.open() as file:
                rows = csv.DictReader(file)
                if list(rows.fieldnames or ()) != self.columns:
                    sys.exit(f"{path} has the columns of another version: move it away")
                for row in rows:
                    self.runs.setdefault(_read(run, row), []).append(_read(point, row))

    def add(self, run: Run, points: Sequence[Point]) -> None:
        """Append the points of a run at once, so that a run is there or it is not."""
        self.runs[run] = list(points)
        text = io.StringIO()
        writer = csv.writer(text)
        if not self.path.exists():
            writer.writerow(self.columns)
        writer.writerows((*astuple(run), *astuple(point)) for point in points)
        with self.path.open("a", newline="") as file:
            file.write(text.getvalue())


def _read(kind: type[Any], row: dict[str, str]) -> Any:
    types = get_type_hints(kind)
    return kind(**{f.name: types[f.name](row[f.name]) for f in fields(kind)})
