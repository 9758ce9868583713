"""Optuna's study in a folder: it can be cut off anywhere, and goes on with the same trials."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from hts_torchrl.durable_file import replacing
from hts_torchrl.errors import ConfigurationError, naming, reason_of
from hts_torchrl.tools.tune.study_file import StudyFile, Value
from hts_torchrl.tools.tune.trial import Budget, Outcome

JOURNAL, _LOCK = "study.journal", "study.lock"
_NAME = "hts-torchrl"  # the same in every folder, because Hyperband draws by it
_STATES = {
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.PRUNED,  # from which the sampler learns that it was no good
}


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Make the folder and keep other studies out of it; yields the lock's file descriptor.

    Whatever inherits the descriptor keeps them out too, until it has ended.

    Raises:
        ConfigurationError: if another one is at work there, or the folder cannot be written.
    """
    with naming("--output", folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"--output={folder}: another tune, or a fit that one has started, is at work there"
            ) from error
        yield descriptor
    finally:
        os.close(descriptor)


class Study:
    """Asks for trials and is told their outcome; all is in the folder's journal at once.

    Its caller's loop::

        study = Study(folder, study_file, budget, described)
        while study.settled < trials:
            trial, values = study.ask()
            study.tell(trial, outcome)

    A trial that was cut off has no outcome: it is marked as failed, and does not count. The next
    one has its place, and so its values. For that the sampler is made anew for each trial, from the
    study's seed and the trial's place. What it had drawn before need not be known.

    Args:
        folder: that has the journal, or gets one.
        study_file: what to search.
        budget: of a trial.
        described: what must not change while the study goes on, as JSON has it.

    Raises:
        ConfigurationError: if the folder's journal is that of another study, or damaged.
    """

    def __init__(
        self, folder: Path, study_file: StudyFile, budget: Budget, described: dict[str, Any]
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._folder, self._file = folder, study_file
        self._study = optuna.create_study(
            storage=_storage(folder),
            pruner=_pruner(study_file, budget),
            study_name=_NAME,
            direction=study_file.objective.direction,
            load_if_exists=True,
        )
        known = self._study.user_attrs.get("described", described)
        if (difference := _difference(known, described)) is not None:
            raise ConfigurationError(
                f"--output={folder}: the study there has another {difference}; give this one a "
                "folder of its own"
            )
        self._study.set_user_attr("described", described)
        self.give_up()

    @property
    def _trials(self) -> list[FrozenTrial]:
        """All trials, in order."""
        return self._study.get_trials(deepcopy=False)

    @property
    def settled(self) -> int:
        """Trials that have an outcome."""
        return sum(trial.state != TrialState.FAIL for trial in self._trials)

    @property
    def best(self) -> FrozenTrial | None:
        """The complete trial with the best value, the first of equal ones; None without any."""
        complete = [trial for trial in self._trials if trial.state == TrialState.COMPLETE]
        sign = 1 if self._file.objective.direction == "minimize" else -1
        return min(complete, key=lambda trial: sign * (trial.value or 0.0), default=None)

    def ask(self) -> tuple[optuna.Trial, dict[str, Value]]:
        """Begin a trial; returns it and its values by flag."""
        self._study.sampler = _sampler(self._file, self.settled)
        trial = self._study.ask()
        return trial, {flag: each.suggest(trial, flag) for flag, each in self._file.space.items()}

    def tell(self, trial: optuna.Trial, outcome: Outcome) -> None:
        """End a trial."""
        for name in ("state", "reason", "score", "frames", "minutes"):
            trial.set_user_attr(name, getattr(outcome, name))
        # Optuna itself gives a pruned trial the last value that was reported.
        self._study.tell(trial, outcome.value, state=_STATES[outcome.state])

    def give_up(self) -> None:
        """Mark trials that were cut off, in this process or an earlier one, as failed."""
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.FAIL)

    def write_table(self) -> None:
        """Write ``trials.csv`` anew: one row a trial, small enough to be committed."""
        path = self._folder / "trials.csv"
        with replacing(path) as new, new.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            figures, space = ("score", "frames", "minutes", "reason"), self._file.space
            table.writerow(["number", "state", "value", *space, *figures])
            for trial in self._trials:
                about = trial.user_attrs
                cut_off = trial.state == TrialState.FAIL  # without an outcome
                state = "cut off" if cut_off else about.get("state", "running")
                value = trial.value if state == "complete" else None
                values = [trial.params.get(flag) for flag in space]
                told = [_shown(about.get(name)) for name in figures]
                table.writerow([trial.number, state, _shown(value), *values, *told])


def _shown(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def _storage(folder: Path) -> JournalStorage:
    """Return the folder's journal, without a last line that was cut off.

    Optuna would append to that line, and read neither.
    """
    journal = folder / JOURNAL
    try:
        content = journal.read_bytes() if journal.exists() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(journal, whole)
        for line in content[:whole].splitlines():
            json.loads(line)  # Optuna leaves out a last one that is none, and appends to it
        return JournalStorage(JournalFileBackend(str(journal)))
    except OSError as error:
        told = reason_of(error, journal)
        raise ConfigurationError(f"--output={folder}: {JOURNAL}: {told}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"--output={folder}: {JOURNAL}: this is no journal of Optuna's"
        ) from error


def _sampler(study_file: StudyFile, place: int) -> BaseSampler:
    seed = int(np.random.SeedSequence([study_file.seed, place]).generate_state(1)[0])
    if study_file.sampler == "random":
        return RandomSampler(seed=seed)
    return TPESampler(seed=seed, n_startup_trials=study_file.startup_trials)


def _pruner(study_file: StudyFile, budget: Budget) -> BasePruner:
    if study_file.pruner == "none":
        return NopPruner()
    if study_file.pruner == "median":
        return MedianPruner(
            n_startup_trials=study_file.startup_trials, n_warmup_steps=study_file.warmup_frames
        )
    most = len(study_file.seeds) * budget.total_frames
    least = min(most, budget.evaluation_frames or budget.total_frames)
    return HyperbandPruner(min_resource=least, max_resource=most)


def _difference(known: Any, mine: Any, name: str = "") -> str | None:  # noqa: ANN401
    """Return the dotted name of the first entry in which two values as of JSON differ."""
    if not (isinstance(known, dict) and isinstance(mine, dict)):
        return None if known == mine else name
    for key in [*known, *(key for key in mine if key not in known)]:
        below = f"{name}.{key}" if name else key
        if key not in known or key not in mine:
            return below
        if (difference := _difference(known[key], mine[key], below)) is not None:
            return difference
    return None
