"""What a run has left in its folder: settings, evaluations, training returns, waiting."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from hts_torchrl.errors import ConfigurationError, reason_of
from hts_torchrl.yaml_file import read_yaml

ROLES = ("learner", "executors", "actors")
_METRICS, _CONFIG = "metrics.csv", "config.yaml"
_SCORES = {"eval": "eval/score", "train": "episode/return"}
"""Logged scores, by what their frames and minutes are logged under."""
_OF_OTHERS = {"verbose", "return_predictions"}
"""Flags of ``validate``, ``test`` and ``predict``, whose folders are no runs of ``fit``."""


class NoRun(ConfigurationError):
    """A folder has no run to report; below a folder that is named, it is left out."""

    def __init__(self, message: str, reason: str = "is no run of fit") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Run:
    """One training, finished or stopped."""

    folder: Path
    name: str
    """``name`` in its config."""
    seed: int
    environment: str
    """The factory's class and its first argument, such as ``GymEnvs(CartPole-v1)``."""
    settings: dict[str, Any]
    """All settings of its config, by dotted names; lists are whole."""
    metrics: pd.DataFrame
    """All that it has logged, float64."""
    earlier: tuple[Path, ...] = ()
    """Folders of the runs that it goes on from, if their figures come before its own."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a folder that ``fit`` wrote; its checkpoints are not opened.

        Raises:
            NoRun: if its config is none of ``fit``, or it has no finished evaluation, or NaN in its
                last one.
            ConfigurationError: if its files cannot be read.
        """
        config = _config(folder)
        metrics = _metrics(folder)
        if _curve(metrics, "eval").empty:
            logged = (folder / _METRICS).exists()
            of_others = "" if logged else f" (no {_METRICS}, which CSVLogger writes)"
            reason = f"has no finished evaluation{of_others}"
            raise NoRun(f"{folder}: this run {reason}", reason)
        if math.isnan(metrics.dropna(subset="eval/frames")["eval/score"].iloc[-1]):
            reason = "has NaN as its last score"
            raise NoRun(f"{folder}: this run {reason}", reason)
        env = _mapping(_mapping(config.get("data")).get("env"))
        kind = str(env.get("class_path")).rpartition(".")[2]
        first = next(iter(_mapping(env.get("init_args")).values()), None)
        return cls(
            folder=folder,
            name=str(config.get("name")),
            seed=int(config["seed_everything"]),
            environment=kind if first is None else f"{kind}({first})",
            settings=dict(_flat(config)),
            metrics=metrics,
        )

    def after(self, earlier: Run) -> Run:
        """Return this run with what another had logged before the place where this one begins.

        An evaluation at that very place was made before the checkpoint was written.
        """
        frames = _frames(earlier.metrics)
        own = (frames["train/frames"] < self.begin) | (frames["eval/frames"] <= self.begin)
        before = earlier.metrics[own]
        metrics = pd.concat([before, self.metrics], ignore_index=True)
        return replace(self, metrics=metrics, earlier=(*earlier.earlier, earlier.folder))

    @property
    def begin(self) -> float:
        """Environment steps at its first figures."""
        return float(_frames(self.metrics).min(axis=None))

    @property
    def end(self) -> float:
        """Environment steps at its last evaluation."""
        return float(self.evaluations["frames"].iloc[-1])

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """One row an evaluation, in order: ``score``, ``frames`` (environment steps), ``minutes``.

        Minutes are those of training. All are float64, and there is one row at least.
        """
        return _curve(self.metrics, "eval")

    @cached_property
    def training(self) -> pd.DataFrame:
        """The same columns; ``score`` is the mean raw return of the last 100 training games."""
        return _curve(self.metrics, "train")

    @cached_property
    def waiting(self) -> dict[str, float]:
        """Share of the time in which each of :data:`ROLES` waited, 0 to 1; NaN if not logged."""
        return {role: _time_average(self.metrics, f"wait/{role}") for role in ROLES}

    @property
    def score(self) -> float:
        """Score of the last evaluation."""
        return float(self.evaluations["score"].iloc[-1])

    @property
    def ended_early(self) -> bool:
        """Whether its last evaluation is a round or more before its ``total_frames``."""
        given = (self.settings.get(f"data.{name}") for name in ("total_frames", "frames_per_batch"))
        # A config that a person has changed may have text there.
        total, of_a_round = (each if isinstance(each, int | float) else 0 for each in given)
        return bool(self.end <= total - of_a_round)


def read_runs(paths: list[Path]) -> tuple[list[Run], dict[Path, str]]:
    """Return the runs at or below the paths, and why others are left out, by their folders.

    What lies below a folder is left out if it has no finished evaluation, or NaN in its last one,
    or if its ``config.yaml`` is that of another program.

    Raises:
        ConfigurationError: if a path has no run; if what is named itself is none, or it or each one
            has no finished evaluation; if metrics are no table.
    """
    runs, left_out = [], dict[Path, str]()
    for folder in run_folders(paths):
        try:
            runs.append(Run.read(folder))
        except NoRun as error:
            if any(map(folder.samefile, paths)):
                raise
            left_out[folder] = error.reason
    if not runs:
        asked = ", ".join(map(str, paths))
        first, reason = next(iter(left_out.items()))
        raise NoRun(f"{asked}: no run there has a last score; {first} {reason}")
    return runs, left_out


def run_folders(paths: list[Path]) -> list[Path]:
    """Return the folders of runs: those named, and for any other folder those below it.

    Raises:
        ConfigurationError: if one of ``paths`` neither is a run's folder nor has one below it.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        folders = [path] if (path / _CONFIG).is_file() else sorted(_below(path))
        if not folders:
            raise ConfigurationError(f"{path}: no run of fit is there (no {_CONFIG})")
        found |= {folder.resolve(): folder for folder in folders}
    return list(found.values())


def _below(path: Path) -> Iterator[Path]:
    """Yield the folders of runs below a path, through symbolic links too, each of them once."""
    seen: set[Path] = set()
    for name, below, files in os.walk(path, followlinks=True):
        folder = Path(name)
        if (place := folder.resolve()) in seen:
            below.clear()
        elif _CONFIG in files:
            yield folder
        seen.add(place)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG
    try:
        config = read_yaml(path)
    except OSError as error:
        raise ConfigurationError(f"{path}: {reason_of(error, path)}") from error
    except ConfigurationError as error:
        raise NoRun(f"{path}: {error}") from error
    if isinstance(config, dict) and _OF_OTHERS & config.keys():
        raise NoRun(f"{path}: this is the config of an evaluation (validate, test or predict)")
    if not isinstance(config, dict) or type(config.get("seed_everything")) is not int:
        raise NoRun(f"{path}: this is no config of fit: it has no seed_everything")
    return config


def _metrics(folder: Path) -> pd.DataFrame:
    path = folder / _METRICS
    try:
        text = path.read_text(encoding="utf-8")
        # A line that was cut off may end in half a number.
        metrics = pd.read_csv(StringIO(text[: text.rfind("\n") + 1]))
    except (FileNotFoundError, pd.errors.EmptyDataError):  # it was stopped before it logged
        return pd.DataFrame()
    except OSError as error:
        raise ConfigurationError(f"{path}: {reason_of(error, path)}") from error
    except (pd.errors.ParserError, UnicodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return metrics.apply(pd.to_numeric, errors="coerce").astype(float)


def _frames(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return the environment steps of evaluations and of training; NaN where none are logged."""
    return metrics.reindex(columns=[f"{place}/frames" for place in _SCORES])


def _curve(metrics: pd.DataFrame, place: str) -> pd.DataFrame:
    """Return the rows that have a score, with one for each number of frames."""
    score, frames, minutes = _SCORES[place], f"{place}/frames", f"{place}/minutes"
    columns = {score: "score", frames: "frames", minutes: "minutes"}
    rows = metrics.reindex(columns=list(columns)).rename(columns=columns).dropna()
    rows = rows.map(_meant)
    rows = rows.drop_duplicates("frames", keep="last")
    return rows.sort_values("frames", ignore_index=True)


def _meant(figure: float) -> float:
    """Return a figure logged in single precision, whose 0.9 is 0.8999999762; frames are whole."""
    return figure if figure.is_integer() else float(str(np.float32(figure)))


def _time_average(metrics: pd.DataFrame, share: str) -> float:
    """Return the mean of a logged share, each weighted by the time since the one before."""
    rows = metrics.reindex(columns=[share, "train/minutes"]).dropna()
    if len(rows) < 2:
        return float(rows[share].iloc[0]) if len(rows) else math.nan
    shares, minutes = (rows[name].to_numpy(float) for name in rows.columns)
    # Where the first one began is not logged: a resumed run begins in the middle.
    since = np.diff(minutes)
    return float(np.average(shares[1:], weights=since)) if since.sum() > 0 else shares.mean()


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _flat(settings: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
