"""A job that SLURM requeues goes on with the bits of a run that was never stopped."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from hts_torchrl import PPO
from hts_torchrl.training.checkpoints import DurableCheckpointIO
from tests.command_line import CARTPOLE, run
from tests.fits import cartpole, quiet_trainer
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.weights_only. was not set")

ROUNDS, PARTS = 6, 4
ROUND = 2


class Scheduled(PPO):
    """Its weights and its learning rate move one after the other."""

    before_schedule = staticmethod(lambda: None)

    def lr_scheduler_step(self, *args):
        self.before_schedule()
        super().lr_scheduler_step(*args)


class Requeued(Callback):
    """Sends SIGUSR1 in a round, and SIGTERM in the next one, as SLURM does to a job."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def setup(self, trainer, pl_module, stage):  # noqa: ARG002
        pl_module.before_schedule = lambda: self._send(
            trainer, "before the rate of the next round", (ROUND + 1) * PARTS - 1
        )

    def _send(self, trainer, moment, batch) -> None:
        if self.moment == moment and trainer.fit_loop.batch_idx == batch:
            signal.raise_signal(signal.SIGUSR1)

    def on_before_backward(self, trainer, pl_module, loss):  # noqa: ARG002
        self._send(trainer, "in a backward pass", ROUND * PARTS + 1)
        if trainer.fit_loop.batch_idx == (ROUND + 1) * PARTS:
            signal.raise_signal(signal.SIGTERM)

    def on_validation_batch_start(self, trainer, *_):
        self._send(trainer, "in an evaluation", (ROUND + 1) * PARTS - 1)


MOMENTS = {
    "in a backward pass": ROUND,
    "before the rate of the next round": ROUND + 1,
    "in an evaluation": ROUND + 1,
}
"""Each with the rounds that are done then."""


class Signalled(Callback):
    """Sends signals in backward passes, each in that of a batch."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self.numbers = numbers

    def on_before_backward(self, trainer, pl_module, loss):  # noqa: ARG002
        if trainer.fit_loop.batch_idx in self.numbers:
            signal.raise_signal(self.numbers[trainer.fit_loop.batch_idx])


def trained(folder, *callbacks, **settings) -> list[torch.Tensor]:
    torch.manual_seed(0)
    learner = Scheduled(epochs=2, minibatches=2, learning_rate_decay=True)
    trainer = quiet_trainer(
        default_root_dir=folder,
        plugins=[DurableCheckpointIO()],
        callbacks=[*callbacks],
        limit_val_batches=1,
        **settings,
    )
    trainer.fit(learner, cartpole(ROUNDS, evaluation_episodes=1, evaluation_frames=32))
    return [parameter.detach() for parameter in learner.parameters()]


@pytest.fixture
def requeues(monkeypatch, tmp_path):
    """A job of SLURM, and the file of what ``scontrol`` was asked for."""
    before = signal.getsignal(signal.SIGUSR1)
    asked, program = tmp_path / "asked", tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    for name, value in job_of(1, 0).items():
        monkeypatch.setenv(name, value)
    yield asked
    signal.signal(signal.SIGUSR1, before)


def job_of(ranks: int, rank: int) -> dict[str, str]:
    """SLURM's variables for one of so many ranks of a node."""
    variables = {
        "NTASKS": ranks, "NTASKS_PER_NODE": ranks, "JOB_NAME": "train", "JOB_ID": 77,
        "PROCID": rank, "LOCALID": rank, "NODEID": 0, "NODELIST": "localhost", "STEP_ID": 0,
    }  # fmt: skip
    return {f"SLURM_{name}": str(value) for name, value in variables.items()}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_requeued_job_has_the_bits_of_an_undisturbed_run(moment, requeues, tmp_path):
    wanted = trained(tmp_path / "undisturbed")
    with pytest.raises(SIGTERMException):
        trained(tmp_path / "job", Requeued(moment))
    assert requeues.read_text() == "requeue 77\n"
    saved = torch.load(tmp_path / "job" / "hpc_ckpt_1.ckpt", weights_only=True)
    assert saved["updates"] == MOMENTS[moment]
    for mine, undisturbed in zip(trained(tmp_path / "job"), wanted, strict=True):
        assert torch.equal(mine, undisturbed)


def rank_of_a_job(folder, numbers) -> None:
    """Be one of two ranks, each of which is sent other signals."""
    rank = int(os.environ["RANK"])
    os.environ.update(job_of(2, rank))
    ranks = {"devices": 2, "strategy": "ddp"}
    wanted = trained(folder / "undisturbed", **ranks)
    at_the_end = ModelCheckpoint(folder / "end", every_n_train_steps=1000, save_on_exception=True)
    callbacks = (Signalled(numbers[rank]), at_the_end)
    with pytest.raises(SIGTERMException) as left:
        trained(folder / "job", *callbacks, **ranks, enable_checkpointing=True)
    assert left.value.code == (0 if rank else 128 + signal.SIGTERM)
    (last,) = (folder / "end").glob("*.ckpt")
    for path, updates in {folder / "job" / "hpc_ckpt_1.ckpt": ROUND + 1, last: ROUND + 3}.items():
        assert torch.load(path, weights_only=True)["updates"] == updates
    for mine, undisturbed in zip(trained(folder / "job", **ranks), wanted, strict=True):
        assert torch.equal(mine, undisturbed)


def test_ranks_are_requeued_together_and_once(requeues, tmp_path):
    later = {(ROUND + 1) * PARTS + 1: signal.SIGUSR1, (ROUND + 2) * PARTS: signal.SIGTERM}
    run_ranks(2, rank_of_a_job, tmp_path, [later, {ROUND * PARTS + 1: signal.SIGUSR1}])
    assert requeues.read_text() == "requeue 77\n"
    assert not (tmp_path / "job" / "hpc_ckpt_2.ckpt").exists()


def test_the_command_line_keeps_jobs_apart(requeues, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    fit = [
        *("fit", *CARTPOLE, "--data.total_frames=192", "--name=job"),
        *("--model=PPO", "--model.epochs=2", "--model.minibatches=2"),
    ]
    requeued = f"--trainer.callbacks={__name__}.Requeued"
    with pytest.raises(SystemExit) as left:
        run(*fit, requeued, "--trainer.callbacks.moment=in a backward pass")
    assert left.value.code == 128 + signal.SIGTERM
    assert requeues.read_text() == "requeue 77\n"
    saved = "runs/job/slurm_77/hpc_ckpt_1.ckpt"
    assert (tmp_path / saved).is_file()
    run(*fit)
    assert f"Restoring states from the checkpoint path at {saved}" in caplog.text
    caplog.clear()
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    run(*fit)
    assert "Restoring" not in caplog.text
    with pytest.raises(SystemExit):
        run(
            *(*fit, requeued, "--trainer.callbacks.moment=in a backward pass"),
            f"--trainer.default_root_dir={tmp_path / 'own'}",
        )
    assert (tmp_path / "own" / "hpc_ckpt_1.ckpt").is_file()
