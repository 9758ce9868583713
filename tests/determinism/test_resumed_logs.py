"""What a resumed run logs is what one that was never stopped logs, step for step."""

from __future__ import annotations

import csv
import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from hts_torchrl import A2C, PPO, GymEnvs
from hts_torchrl.training.callbacks import LearningCurve, TrainingStatistics
from tests.fits import RESUMES, cartpole, quiet_trainer, saving

pytestmark = [
    *RESUMES,
    pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty"),
]

ROUNDS = 6
CARTPOLE = GymEnvs("CartPole-v1", {"max_episode_steps": 20})
LEARNERS: dict[str, Any] = {
    "A2C": lambda: (A2C(learning_rate=0.01, learning_rate_decay=True), {}),
    "A2C in chunks": lambda: (A2C(learning_rate=0.01), {"accumulate_grad_batches": 2}),
    "PPO": lambda: (PPO(epochs=2, minibatches=2), {}),
}
CASES = [
    pytest.param(name, marks=() if name == "A2C in chunks" else pytest.mark.thorough)
    for name in LEARNERS
]
PARTS = {"A2C": 1, "A2C in chunks": 2, "PPO": 4}
CLOCK = ("minutes", "steps_per_second", "wait/", "skew", "slowest")


class Send(Callback):
    """Sends this process a signal within a batch's backward pass, or within its evaluation."""

    def __init__(self, number: int, batch: int, *, evaluation: bool = False) -> None:
        self.number, self.batch, self.evaluation = number, batch, evaluation

    def on_before_backward(self, trainer, pl_module, loss):  # noqa: ARG002
        if trainer.fit_loop.batch_idx == self.batch and not self.evaluation:
            signal.raise_signal(self.number)

    def on_validation_batch_start(self, trainer, *_):
        if trainer.fit_loop.batch_idx == self.batch and self.evaluation:
            signal.raise_signal(self.number)


def logged(
    folder: Path, learner: str, ckpt_path: Path | None = None, callbacks=(), **settings: Any
) -> list[dict[str, str]]:
    """Train; return the rows of ``metrics.csv``, without empty cells and without the clock's."""
    torch.manual_seed(0)
    module, of_trainer = LEARNERS[learner]()
    data = {"env": CARTPOLE, "evaluation_episodes": 2, "evaluation_frames": 64}
    trainer = quiet_trainer(
        logger=CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1),
        callbacks=[TrainingStatistics(), LearningCurve(), *callbacks],
        enable_checkpointing=bool(callbacks),
        limit_val_batches=1,
        **{"log_every_n_steps": 2, **of_trainer, **settings},
    )
    try:
        trainer.fit(module, datamodule=cartpole(ROUNDS, **data), ckpt_path=ckpt_path)
    except (SIGTERMException, SystemExit):
        assert any(isinstance(each, Send) for each in callbacks)
    with (folder / "metrics.csv").open() as file:
        return [
            {k: v for k, v in row.items() if v and not any(word in k for word in CLOCK)}
            for row in csv.DictReader(file)
        ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an undisturbed run of a learner logs, and the folder of its checkpoints."""

    @functools.cache
    def run(learner: str) -> tuple[list[dict[str, str]], Path]:
        folder = tmp_path_factory.mktemp("whole")
        every = saving(folder, every_n_train_steps=5)
        evaluated = ModelCheckpoint(folder, filename="evaluated-{step}", save_top_k=-1)
        return logged(folder, learner, None, [every, evaluated]), folder

    return run


MOMENTS = {
    "SIGTERM in a round before an evaluation": (signal.SIGTERM, 3, False),
    "Ctrl-C in a round after an evaluation": (signal.SIGINT, 2, False),
    "SIGTERM in an evaluation": (signal.SIGTERM, 3, True),
    "Ctrl-C in an evaluation": (signal.SIGINT, 3, True),
}


@pytest.mark.parametrize("learner", CASES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_after_a_signal(learner, moment, whole, tmp_path):
    number, round_index, evaluation = MOMENTS[moment]
    first, last = round_index * PARTS[learner], (round_index + 1) * PARTS[learner] - 1
    saving = ModelCheckpoint(tmp_path, filename="last", save_on_exception=True, every_n_epochs=99)
    send = Send(number, last if evaluation else first, evaluation=evaluation)
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        stopped = logged(tmp_path / "1", learner, None, [send, saving])
    finally:
        signal.signal(signal.SIGINT, before)
    resumed = logged(tmp_path / "2", learner, tmp_path / "last.ckpt")
    # A round that was cut off is learned, and logged, again.
    kept = [row for row in stopped if row not in resumed]
    rows, _ = whole(learner)
    assert 0 < len(kept) < len(rows)
    assert kept + resumed == rows


@pytest.mark.parametrize("learner", CASES)
def test_after_a_checkpoint(learner, whole, tmp_path):
    rows, folder = whole(learner)
    paths = sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    assert {path.stem.split("step=")[0] for path in paths} == {"", "evaluated-"}
    for path in paths[:-1]:  # the last is of the end
        resumed = logged(tmp_path / path.stem, learner, path)
        assert resumed == rows[-len(resumed) :], path
        missing = [int(row["step"]) for row in rows[: -len(resumed)]]
        assert not missing or max(missing) < int(path.stem.split("=")[1]), path
