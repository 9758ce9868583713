"""What the command line tells of a run besides its progress, and what it leaves out."""

from __future__ import annotations

import itertools
import logging
import os
import re
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer

from hts_torchrl.cli.checkpoint_settings import CheckpointSettings
from hts_torchrl.compat.torch import bfloat16_in_hardware
from hts_torchrl.errors import CheckpointError, ConfigurationError
from hts_torchrl.training.callbacks import LearningCurve, RoundTrace, TrainingStatistics
from hts_torchrl.training.run_settings import class_name

_WARNINGS = (
    # A run's loggers share one folder on purpose.
    ".*exists and is not empty",
    # A run that goes on from another's checkpoint has a folder of its own.
    "The dirpath has changed",
    # It says that layers may not be sharded, and no learner's are.
    "You're using the WeightAveraging callback with a model that overrides",
    # Between Lightning and torch.
    ".*isinstance.treespec, LeafSpec.. is deprecated",
)
_MESSAGES = re.compile(
    r"(?:\[rank: \d+\] )?Seed set to|[GTH]PU available:|💡 Tip:"
    r"|Loading `train_dataloader` to estimate|`Trainer.fit` stopped: `max_epochs=1` reached"
    r"|An \w+ was raised with message:"
)
_TIME_LIMIT = "Time limit reached."
_time_limits: list[str] = []
"""What this run was told of its limit: a Timer says it after each part of the last round."""
_Lines: TypeAlias = Iterator[tuple[str, str]]  # label and text
_LOGGERS = ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed")


def leave_out_noise() -> None:
    """Leave out what Lightning says of itself and of other packages in every run.

    What it says of a user's settings, and all other warnings, are shown.
    """
    _time_limits.clear()
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_no_noise)


def _is_no_noise(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if message.startswith(_TIME_LIMIT):
        _time_limits.append(message)
        return len(_time_limits) == 1
    return _MESSAGES.match(message) is None


class RunReport(Callback):
    """Prints what trains when ``fit`` begins; at its end the score, the files and commands.

    As a context manager around the run it learns how the run ended, because an interrupted run
    writes its last checkpoint after all callbacks have been called::

        with RunReport() as report:
            Trainer(callbacks=[report]).fit(...)
    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._folder: str | None = None

    def __enter__(self) -> Self:
        """Return the callback."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Tell how the run ended, if one has begun.

        Raises:
            CheckpointError: instead of an error of a logger whose file was removed.
        """
        if self._trainer is not None:
            for line in _last_lines(self._trainer, self._folder, finished=kind is None):
                tell(*line)
        if self._folder is not None and isinstance(error, FileNotFoundError) and error.filename:
            missing = Path(os.fsdecode(error.filename)).absolute()
            if missing.is_relative_to(Path(self._folder).absolute()):
                raise CheckpointError(f"{missing} was removed while the run wrote it") from error

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Tell what is going to be trained."""
        if stage != "fit":
            return
        self._folder = trainer.log_dir  # which all ranks must ask for, or none
        if trainer.is_global_zero:
            self._trainer = trainer
            for line in _first_lines(trainer, pl_module, self._folder):
                tell(*line)


def tell(label: str, text: str) -> None:
    """Print a line of what a command has found, at once."""
    print(f"{label + ':':15} {text}", flush=True)  # noqa: T201


def _first_lines(trainer: Trainer, learner: Any, folder: str | None) -> _Lines:  # noqa: ANN401
    data = trainer.datamodule  # type: ignore[attr-defined]
    pool, schedule, ranks = data.pool, data.schedule, trainer.world_size
    network = learner.network if learner.policy is None else class_name(learner.policy)
    yield "training", f"{class_name(learner)} on {_env_name(data.env)}, network {network}"
    workers = "in the nodes' processes" if pool.num_nodes else "in this process"
    if pool.num_actors:
        workers = f"executor processes: {pool.num_executors}, actors: {pool.num_actors}"
        workers += " each" if pool.num_nodes else ""
    if pool.num_nodes:
        workers = f"rollout nodes on Ray: {pool.num_nodes}; {workers}"
    each = f", {pool.num_envs // ranks} on each of {ranks} ranks" if ranks > 1 else ""
    yield "environments", f"{pool.num_envs}{each} ({workers})"
    rounds, frames = schedule.num_rounds, schedule.frames_per_round
    yield "frames", f"{rounds * frames:,} in {rounds:,} rounds of {frames:,}"
    device = trainer.strategy.root_device
    slow = trainer.precision == "bf16-mixed" and device.type == "cpu" and not bfloat16_in_hardware()
    remark = " (emulated by this processor: 32-true is much faster)" if slow else ""
    yield "device", f"{device}, precision {trainer.precision}{remark}"
    yield "seed", str(data.seed)
    if folder is not None:
        yield "writes to", folder


def _env_name(env: object) -> str:
    """Return the factory's name and its first field, such as ``GymEnvs(CartPole-v1)``."""
    names = [field.name for field in fields(env)] if is_dataclass(env) else []
    return class_name(env) + (f"({getattr(env, names[0])})" if names else "")


def _last_lines(trainer: Trainer, folder: str | None, *, finished: bool) -> _Lines:
    statistics = TrainingStatistics.of(trainer)
    frames, minutes = statistics.frames, statistics.minutes
    speed = f"{frames / (60 * minutes) if minutes else 0.0:,.0f} steps/s"
    ended = "trained" if finished else "stopped"
    yield ended, f"{frames:,} frames in {minutes:.1f} minutes, {speed}"
    score, data = trainer.callback_metrics.get("eval/score"), trainer.datamodule  # type: ignore[attr-defined]
    if score is not None:
        actions = "greedy" if data.evaluation_greedy else "sampled"
        games = f"mean of {data.evaluation_episodes} games, {actions} actions"
        evaluated = statistics.evaluated_frames
        when = "" if evaluated == frames else f", after {evaluated:,} frames"
        is_final = finished and evaluated == frames
        yield "final score" if is_final else "last score", f"{float(score):.2f} ({games}{when})"
    checkpoints = list(_checkpoints(trainer))
    yield from checkpoints
    if folder is not None:
        yield "log", folder
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, LearningCurve) and callback.path is not None:
            yield "learning curve", str(callback.path)
        elif isinstance(callback, RoundTrace) and finished:
            yield "trace", str(callback.path) if callback.written else "the run has no such round"
    if checkpoints:
        flags = _flags_to_continue(trainer, frames) if finished else []
        for name in _stopping(trainer) if finished and trainer.should_stop else ():
            yield "stopped by", f"{name}; a longer run too, unless its config leaves that out"
        yield from _commands(dict(checkpoints), Path(folder or ".", "config.yaml"), flags)


def _stopping(trainer: Trainer) -> Iterator[str]:
    """Yield the user's callbacks that have stopped a run, or may have."""
    for stops in trainer.early_stopping_callbacks:
        yield f"{type(stops).__name__}(monitor={stops.monitor})"
    for timer in _own_timers(trainer):
        left_s = timer.time_remaining()
        if left_s is not None and left_s <= 0:
            yield type(timer).__name__


def _own_timers(trainer: Trainer) -> list[Timer]:
    """Return the user's Timers; Lightning puts that of ``max_time`` behind all that it is given."""
    given = itertools.takewhile(lambda each: not isinstance(each, RunReport), trainer.callbacks)  # type: ignore[attr-defined]
    return [each for each in given if isinstance(each, Timer)]


def _checkpoints(trainer: Trainer) -> _Lines:
    """Yield what was written, the user's checkpoints before the run's own."""
    for callback in trainer.checkpoint_callbacks:
        path = getattr(callback, "best_model_path", "")
        if path and get_filesystem(path).exists(path):
            yield "best" if getattr(callback, "monitor", None) else "checkpoint", path


def _flags_to_continue(trainer: Trainer, frames: int) -> list[str]:
    """Return the flags without which a run would end at once: limits, or all of its frames."""
    schedule = trainer.datamodule.schedule  # type: ignore[attr-defined]
    total = schedule.num_rounds * schedule.frames_per_round
    flags = [f"--data.total_frames={2 * total}"] if frames >= total else []
    for name, of_whole_run in {"max_epochs": 1, "limit_train_batches": 1.0}.items():
        if repr(getattr(trainer, name)) != repr(of_whole_run):  # 1 is one batch
            flags.append(f"--trainer.{name}={of_whole_run}")
    if trainer.max_steps != -1:
        flags.append("--trainer.max_steps=-1")
    timed = any(isinstance(each, Timer) for each in trainer.callbacks)  # type: ignore[attr-defined]
    if timed and not _own_timers(trainer):
        flags.append("--trainer.max_time=null")
    return flags


def _commands(checkpoints: dict[str, str], config: Path, flags: list[str]) -> _Lines:
    """Yield the commands to use a run with; ``flags`` are those that continue it."""
    flag, path = f"--config={config}", checkpoints.get("best", checkpoints.get("checkpoint", ""))
    try:
        own = [flag] if CheckpointSettings.read(Path(path)).withheld else []
    except ConfigurationError as error:
        yield "commands", f"none, because of {path}: {error}"
        return
    if "checkpoint" in checkpoints:
        # The config has what no checkpoint gives: the run's name, its callbacks and devices.
        words = ["fit", flag, f"--ckpt_path={checkpoints['checkpoint']}", *flags]
        yield "continue", _typed(words)
    for name in ("play", "export"):
        yield name, _typed([name, *own, f"--ckpt_path={path}"])


def _typed(words: list[str]) -> str:
    return shlex.join(["hts-torchrl", *words])
