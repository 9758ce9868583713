"""Each example runs: a few rounds, in the test's own process."""

import functools
import os
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from hts_torchrl import PPO, ConfigurationError, HTSCollector, HTSDataModule
from tests.fits import cartpole, watched_fit

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES = 80


def serial(name):
    """The example's ``main``, without worker processes."""
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    for maker in (HTSCollector, HTSDataModule):
        if maker.__name__ in main.__globals__:
            main.__globals__[maker.__name__] = functools.partial(maker, num_actors=0)
    return main


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_torchrl_loop_trains(capsys):
    score = serial("torchrl_loop")(3 * 1024)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1024", "2048", "3072"]
    assert score > 8  # a CartPole falls no sooner


# TorchRL's own way to register its optimiser.
@pytest.mark.filterwarnings("ignore:The 'optimizer' hook stage will be replaced:FutureWarning")
def test_torchrls_trainer_trains():
    assert serial("torchrl_trainer")(3 * 1024).collected_frames == 3 * 1024


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_lightning_loop_trains():
    assert serial("lightning_loop")(3 * 256) > 8


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_rate_by_kl_trains(capsys):
    assert serial("rate_by_kl")(3 * 512) > 8
    assert "\nlearning rate " in capsys.readouterr().out


def rate_by_kl(**settings):
    return runpy.run_path(str(EXAMPLES / "rate_by_kl.py"))["RateByKL"](**settings)


DIVERGENCES = [0.1, 0.1, 0.001, 0.02, 0.02, 0.0, 0.001, 0.001]


class Told(PPO):
    """PPO whose divergence is known: that of the round in the last epoch, and large before."""

    def log_losses(self, losses, group="loss"):
        divergence = 9.0 if self.part.index < self.minibatches else DIVERGENCES[self.updates]
        super().log_losses({**losses, "approx_kl": torch.tensor(divergence)}, group)


def test_the_rate_follows_the_divergence_of_the_last_epoch_once_a_round():
    callback = rate_by_kl(target_kl=0.02, factor=2.0, smallest=0.002, largest=0.005)
    learner = Told(epochs=2, minibatches=2, learning_rate=0.004)
    watch = watched_fit(learner, cartpole(8), callbacks=[callback])
    expected = [0.004, 0.002, 0.002, 0.004, 0.004, 0.004, 0.004, 0.005]
    assert watch.learning_rates[::4] == watch.learning_rates[3::4] == pytest.approx(expected)


def test_the_rate_follows_the_divergence_of_all_ranks():
    """The other rank of two has 0.1, and both have the rate of the mean."""

    def reduce(own, reduce_op):
        assert reduce_op == "mean"
        return (own + 0.1) / 2

    optimizer = SimpleNamespace(param_groups=[{"lr": 0.003}])
    trainer = SimpleNamespace(
        callback_metrics={"loss/approx_kl": torch.tensor(0.001)},
        strategy=SimpleNamespace(reduce=reduce),
        optimizers=[optimizer],
    )
    part = SimpleNamespace(index=0, count=1, is_first=True, is_last=True)
    learner = SimpleNamespace(minibatches=1)
    rate_by_kl().on_train_batch_end(trainer, learner, None, part, 0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.002)


def test_the_rate_by_kl_refuses_a_schedule_that_would_set_the_rate_again():
    learner = PPO(learning_rate_decay=True)
    with pytest.raises(ConfigurationError, match="set learning_rate_decay=False"):
        watched_fit(learner, cartpole(), callbacks=[rate_by_kl()])


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
def test_a_rate_by_kl_goes_on_from_any_checkpoint_with_the_same_bits(tmp_path):
    def fit(ckpt_path=None, callbacks=()):
        torch.manual_seed(0 if ckpt_path is None else 1)
        return watched_fit(
            PPO(epochs=2, minibatches=2, learning_rate=0.003),
            cartpole(5),
            ckpt_path,
            callbacks=[rate_by_kl(), *callbacks],
            enable_checkpointing=bool(callbacks),
        )

    whole = fit(
        callbacks=[ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)]
    )
    assert len(set(whole.learning_rates)) > 2
    for step in (3, 6, 7, 8, 13, 19):
        resumed = fit(tmp_path / f"step={step}.ckpt")
        left = len(resumed.learning_rates)
        assert left == 20 - step // 4 * 4
        assert resumed.learning_rates == whole.learning_rates[-left:]
        assert torch.equal(resumed.final_weights, whole.final_weights)


# Small layers of a user's own networks, on some processors; rows are answered one by one then.
@pytest.mark.filterwarnings("ignore:the policy's answer to an observation depends on:UserWarning")
@pytest.mark.parametrize(
    ("name", "env", "rounds", "updates"),
    [
        ("dqn", "CartPole-v1", 5, 2 * 128),
        ("dqn", "MinAtar/Breakout-v1", 5, 2 * 32),
        ("sac", "Pendulum-v1", 33, 2 * 16),
        ("sac", "HalfCheetah-v5", 33, 2 * 8),
    ],
)
def test_the_off_policy_examples_learn_a_few_times(name, env, rounds, updates, monkeypatch, capsys):
    """The buffer holds 1000 steps after 4 rounds of 256, or 32 of 32."""
    package = {"MinAtar/Breakout-v1": "minatar", "HalfCheetah-v5": "mujoco"}.get(env)
    if package:
        pytest.importorskip(package, reason=f"hts-torchrl[{package}]")
    steps = []
    adam = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self: steps.append(1) or adam(self))
    frames = rounds * {"dqn": 256, "sac": 32}[name]
    score = serial(name)(env, frames)
    assert len(steps) == updates
    assert capsys.readouterr().out.endswith(f"{frames} frames, greedy score {score:.1f}\n")


def test_there_is_a_test_for_each_example_and_each_is_short():
    lengths = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lengths.keys() == {
        "torchrl_loop", "torchrl_trainer", "lightning_loop", "rate_by_kl", "dqn", "sac",
    }  # fmt: skip
    assert max(lengths.values()) < MOST_LINES


@pytest.mark.parametrize("script", ["requeued", "several_ranks"])
def test_a_requeued_job_goes_on_from_its_newest_checkpoint(script, tmp_path, monkeypatch):
    """SLURM starts the script again, also where no signal told Lightning to save."""
    told = tmp_path / "told"
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {told}\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(srun.parent), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "77")

    def resumed():
        subprocess.run(["bash", EXAMPLES / f"{script}.sbatch", "--data.debug"], check=True)
        arguments = told.read_text().splitlines()
        assert arguments[-1] == "--data.debug"
        name = arguments[arguments.index("--name") + 1]
        paths = [arguments[i + 1] for i, flag in enumerate(arguments) if flag == "--ckpt_path"]
        return Path("runs", name), paths

    run, paths = resumed()
    assert paths == []
    other = Path("runs", run.name.replace("77", "78"), "version_0", "checkpoints", "last.ckpt")
    for age, path in enumerate(
        [
            run / "version_0" / "checkpoints" / "last.ckpt",
            run / "slurm_77" / "hpc_ckpt_1.ckpt",
            run / "version_1" / "checkpoints" / "last.ckpt",
        ]
    ):
        for file in (path, path.with_name(f"{path.name}.digests"), other):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        os.utime(path, (age, age))
        assert resumed() == (run, [str(path)])
