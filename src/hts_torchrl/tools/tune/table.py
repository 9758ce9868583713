"""``trials.csv``: one row a trial, small enough to be committed."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from optuna.trial import FrozenTrial

from hts_torchrl.durable_file import replacing
from hts_torchrl.tools.tune.study import is_cut_off


def write_trials(path: Path, trials: Sequence[FrozenTrial], space: Sequence[str]) -> None:
    """Write the table anew.

    Args:
        path: the file.
        trials: in order.
        space: the flags that are searched, each a column.
    """
    with replacing(path) as new, new.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        figures = ("score", "frames", "minutes", "reason")
        table.writerow(["number", "state", "value", *space, *figures])
        for trial in trials:
            state = "cut off" if is_cut_off(trial) else trial.user_attrs.get("state", "running")
            value = trial.value if state == "complete" else None
            values = [trial.params.get(flag) for flag in space]
            told = [trial.user_attrs.get(name) for name in figures]
            table.writerow([trial.number, state, _shown(value), *values, *map(_shown, told)])


def _shown(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
