"""The folder of a run: found, made, and kept from being written over."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from hts_torchrl.compat.lightning import take_next_version
from hts_torchrl.errors import ConfigurationError, reason_of, require
from hts_torchrl.training.callbacks import BestCheckpoint, LastCheckpoint


def make_run_folder(trainer: Trainer, *, anew: bool, goes_on: bool) -> None:
    """Make the folder of a Trainer's logs before anything else of the run is made.

    Args:
        trainer: with its loggers.
        anew: whether the loggers are this project's own, which take the next version that is free.
        goes_on: whether the run continues one that has files there.

    Raises:
        ConfigurationError: if it is none of this machine, cannot be made, or has a file of the
            user's own where the run saves its config.
    """
    if trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
        return  # nothing is written; or all ranks write into the folder of rank 0
    for folder in (trainer.default_root_dir, trainer.log_dir):
        here = "://" not in str(folder)
        require(here, f"the run's folder {folder}", "one of this machine")
    _require_written_out(trainer.loggers)
    directory = Path(trainer.log_dir or ".")
    try:
        while not _made(directory, anew=anew and trainer.loggers != []):
            take_next_version(trainer.loggers)
            directory = Path(trainer.log_dir or ".")
    except OSError as error:
        raise ConfigurationError(
            f"the run's folder {directory}: {reason_of(error, directory)}"
        ) from error
    _require_no_loss(directory / "config.yaml")
    csv = (each for each in trainer.loggers if isinstance(each, CSVLogger))
    old = [Path(each.log_dir, "metrics.csv") for each in csv]
    old += [] if goes_on else [directory / "checkpoints" / "last.ckpt", *_own(trainer)]
    for path in filter(Path.is_file, old):
        warnings.warn(f"{path} is of an earlier run: this one writes over it", stacklevel=3)


def folder_of_job(settings: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return ``default_root_dir`` for a job of SLURM, which keeps its number when it is requeued.

    There Lightning saves what the job goes on from, and looks for it whenever a job starts. In the
    working directory it would find that of another job.
    """
    if settings["default_root_dir"] is not None or not SLURMEnvironment.detect():
        return {}
    return {"default_root_dir": str(Path("runs", name, f"slurm_{SLURMEnvironment.job_id()}"))}


def expanded(path: str | os.PathLike[str]) -> str:
    """Return a path with variables and ``~`` replaced as TensorBoardLogger does, and no other."""
    return os.path.expanduser(os.path.expandvars(path))  # noqa: PTH111 - takes any ~name


def _made(directory: Path, *, anew: bool) -> bool:
    """Make a run's folder; return False if another run has made the one that must be new."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(exist_ok=not anew)
    except FileExistsError:
        if not anew:
            raise
        return False
    return True


def _own(trainer: Trainer) -> list[Path]:
    """Return the files of ``LastCheckpoint`` and ``BestCheckpoint`` in folders that a user gave."""
    ours = (each for each in trainer.callbacks if isinstance(each, LastCheckpoint | BestCheckpoint))  # type: ignore[attr-defined]
    return [Path(each.dirpath, f"{each.filename}.ckpt") for each in ours if each.dirpath]


def _require_written_out(loggers: list[Logger]) -> None:
    """Refuse a folder with a variable or ``~``, which Lightning replaces in some paths only."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger) and expanded(logger.root_dir) != logger.root_dir:
            raise ConfigurationError(
                f"the TensorBoardLogger's folder {logger.root_dir}: checkpoints would go to one of "
                f"that very name; write it out, {expanded(logger.root_dir)}"
            )


def _require_no_loss(config: Path) -> None:
    """Refuse to save the run's config over one that no run has saved."""
    if config.is_file() and "\nbase: null" not in config.read_text("utf-8", errors="replace"):
        raise ConfigurationError(
            f"{config} is a file of your own, and the run saves its config there: rename it, or "
            "name another folder (--trainer.default_root_dir, or that of a logger)"
        )
