"""The command line in the test's own process, and policies to name on it."""

from __future__ import annotations

import contextvars
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import Logger
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import nn
from torchrl.modules import ValueOperator

from hts_torchrl.cli.main import main
from tests.policies import categorical_actor

CARTPOLE = [
    "--data.env=GymEnvs",
    "--data.env.id=CartPole-v1",
    "--data.num_envs=4",
    "--data.num_actors=0",
    "--data.frames_per_batch=32",
    "--data.total_frames=96",
    "--data.evaluation_episodes=2",
    "--trainer.enable_progress_bar=false",
    "--trainer.log_every_n_steps=1",
    "--trainer.accelerator=cpu",
]
A2C = ["--model=A2C"]


def run(*arguments: str) -> None:
    """Call the command line, and put back what it changes for the process."""
    before, threads = sys.argv[:], torch.get_num_threads()
    try:
        # In a context of its own, because in the test's one the parser would live on.
        contextvars.copy_context().run(main, arguments)
    finally:
        sys.argv[:] = before
        torch.set_num_threads(threads)


def refused(capsys, *arguments: str) -> str:
    """The one line with which wrong input ends."""
    with pytest.raises(SystemExit) as left:
        run(*arguments)
    assert left.value.code == 2
    errors = capsys.readouterr().err.splitlines()
    line = [error for error in errors if error.startswith("hts-torchrl: error: ")]
    assert len(line) == 1
    assert errors[-1] == line[0]
    assert not any("Traceback" in error for error in errors)
    return line[0].removeprefix("hts-torchrl: error: ")


def files(directory: Path) -> set[str]:
    """Names of all files below a directory."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


class ForeignLogger(Logger):
    """A logger with a store of its own and no folder for the run, as MLflow's or W&B's."""

    @property
    def name(self) -> str:
        return "experiment"

    @property
    def version(self) -> str:
        return "run-7"

    @property
    def save_dir(self) -> str:
        return "store"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        pass


class Valued(ProbabilisticTensorDictSequential):
    """A policy for CartPole of the user's own, its critic apart from its actor."""

    def __init__(self) -> None:
        critic = ValueOperator(nn.Linear(4, 1), in_keys=["observation"])
        super().__init__(critic, *categorical_actor(nn.Linear(4, 2)).module)
