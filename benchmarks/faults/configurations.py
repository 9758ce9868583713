"""Settings that cannot work, one at a time, on the command line.

The time that a refusal may take is that of this project alone: processor seconds of the command and
of its children, less those of a Python that imports the libraries which every training needs.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import torch
from commands import CARTPOLE, FIT, Command, passed

_OWN_S = 3.0
_LIBRARIES = (
    "import gymnasium, ale_py, imageio, lightning.pytorch.cli, matplotlib.figure, tensorboard, "
    "torchrl.collectors, torchrl.modules, torchrl.objectives"
)
_PPO = "--model=PPO"
_ATARI = "--data.env=AtariEnvs --data.env.game=pong"
_FOOTBALL = "--data.env=FootballEnvs --data.env.scenario=empty_goal_close"

# Flags behind those of CartPole, and what the refusal must name.
WRONG = {
    "--data.num_envs=0": "num_envs",
    "--data.num_envs=four": "num_envs",
    "--data.num_envs=": "num_envs",
    "--data.num_actors=-1": "num_actors",
    "--data.num_actors=1000": "num_actors",
    "--data.envs_per_executor=3": "envs_per_executor",
    "--data.frames_per_batch=30": "frames_per_batch",
    "--data.frames_per_batch=400000000000": "frames_per_batch",
    "--data.frames_per_batch=${data.none}": "data.none",
    "--data.total_frames=0": "total_frames",
    "--data.total_frames=.nan": "total_frames",
    "--data.delay=2": "delay",
    "--data.inference_batch_size=0": "inference_batch_size",
    "--data.start_method=fork": "start_method",
    "--data.timeout_s=.nan": "timeout_s",
    "--data.recover=maybe": "recover",
    "--data.resume_envs=perhaps": "resume_envs",
    "--data.evaluation_episodes=0": "evaluation_episodes",
    "--data.evaluation_frames=-1": "evaluation_frames",
    "--data.seed=3": "seed",
    "--data.nums=3": "data.nums",
    "--seed_everything=-1": "seed",
    "--model=DQN": "DQN",
    "--model.learning_rate=-1": "learning_rate",
    "--model.learning_rate=.nan": "learning_rate",
    "--model.gamma=2": "gamma",
    "--model.gae_lambda=.nan": "gae_lambda",
    "--model.unroll=0": "unroll",
    "--model.epsilon=.inf": "epsilon",
    "--model.entropy_coef=.nan": "entropy_coef",
    "--model.value_coef=-1": "value_coef",
    "--model.num_threads=-1": "num_threads",
    "--model.gradient_chunks=0": "gradient_chunks",
    "--model.gradient_chunks=3": "gradient_chunks",
    "--model.optimizer=sgd": "sgd",
    "--model.network=": "network",
    "--model.network=nature": "network 'nature'",
    "--model.policy=torch.nn.Linear": "policy",
    f"{_PPO} --model.clip=0": "clip",
    f"{_PPO} --model.epochs=0": "epochs",
    f"{_PPO} --model.minibatches=5": "minibatches",
    f"{_PPO} --trainer.accumulate_grad_batches=3": "accumulate_grad_batches",
    "--data.env=FooEnvs": "FooEnvs",
    "--data.env.id=CartPol-v1": "CartPol-v1",
    '--data.env.kwargs={"foo":1}': "foo",
    f"{_ATARI}g": "pongg",
    f"{_ATARI} --data.env.frame_skip=0": "frame_skip",
    f"{_ATARI} --data.env.sticky_actions=2": "sticky_actions",
    f"{_FOOTBALL} --data.env.rewards=all": "rewards",
    "--trainer.max_epochs=2": "max_epochs",
    "--trainer.precision=64-true": "precision",
    "--trainer.devices=0": "devices",
    "--trainer.strategy=none": "strategy",
    "--trainer.gradient_clip_val=.nan": "gradient_clip_val",
    "--trainer.log_every_n_steps=0": "log_every_n_steps",
    "--trainer.val_check_interval=1000": "val_check_interval",
    "--trace=-1": "trace",
    "--name=file/run": "file",
    "--config=none.yaml": "none.yaml",
    "--config=base.yaml": "base",
    "--ckpt_path=file": "file",
    "--ckpt_path=other.ckpt": "other.ckpt",
    "--ckpt_path=list.ckpt": "list.ckpt",
    f"--data.total_frames={10**23}": "total_frames",
    f"--data.num_envs={10**23}": "num_envs",
    f"--data.num_envs={10**9} --data.frames_per_batch={10**9}": "num_envs",
    f"--data.inference_batch_size={10**13}": "inference_batch_size",
    f"--data.evaluation_episodes={10**9}": "evaluation_episodes",
    f"{_PPO} --model.epochs={10**23}": "epochs",
    f"{_PPO} --model.epochs={10**18}": "epochs",
    f"{_PPO} --model.minibatches={10**23}": "minibatches",
    "--model.num_threads=1000000": "num_threads",
    "--trainer.devices=1000": "devices",
    f"--trainer.max_steps={10**23}": "max_steps",
    f"--data.env.kwargs={'[' * 3000}{']' * 3000}": "data.env.kwargs",
    "--name=\udcff": "name",
    "--config=deep.yaml": "deep.yaml",
    "--config=itself.yaml": "itself.yaml",
    "--config=laughs.yaml": "laughs.yaml",
}

# What a shell does before it starts the command, and what the refusal must name.
_LONG = "x" * 100
SURROUNDINGS = {
    "ulimit -n 64": "ulimit -n",
    "mkdir gone; cd gone; rmdir ../gone": "working folder",
    f"mkdir {_LONG}; export TMPDIR=$PWD/{_LONG}": "TMPDIR",
}
_EXECUTORS = "--data.num_envs=32 --data.envs_per_executor=1"


def refused(cases: Iterator[tuple[str, str, str]], _: random.Random) -> bool:
    """Give the next wrong setting; one line says what is wrong, at once, and nothing is left."""
    before, flags, named = next(cases)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        _write_files(folder)
        command = [*FIT, *CARTPOLE, "--data.total_frames=3200", *flags.split(" ")]
        if before:
            command = ["sh", "-c", f'{before}; exec "$@"', "sh", *command]
        before_s = _children_s()
        with Command(command, folder) as fit:
            status = fit.status()
            own_s = _children_s() - before_s - _libraries_s()
            lines = [
                line
                for line in fit.errors.splitlines()
                if line.startswith("hts-torchrl: error: ") and named in line
            ]
            outcome = {
                "status": status == 2,
                "line": len(lines) == 1 and "Traceback" not in fit.errors,
                "seconds": own_s < _OWN_S,
                "left": fit.leaves_nothing(),
            }
            return passed(outcome, f"{flags}: status {status}, {own_s:.1f} s", fit.errors)


def _write_files(folder: Path) -> None:
    (folder / "runs").mkdir()
    for name in ("file", "runs/file"):
        (folder / name).write_text("neither a folder nor a checkpoint")
    (folder / "base.yaml").write_text("base: 3")
    torch.save({"state_dict": {}}, folder / "other.ckpt")
    torch.save({"state_dict": [1], "updates": 3}, folder / "list.ckpt")
    (folder / "deep.yaml").write_text("data: " + "[" * 3000 + "]" * 3000)
    (folder / "itself.yaml").write_text("trainer: &a {logger: *a}")
    aliases = (f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))
    (folder / "laughs.yaml").write_text("\n".join(["a0: &a0 [ha]", *aliases]))


@cache
def _libraries_s() -> float:
    """Processor seconds that importing the libraries takes."""
    before_s = _children_s()
    subprocess.run([sys.executable, "-c", _LIBRARIES], check=True, capture_output=True)
    return _children_s() - before_s


def _children_s() -> float:
    """Processor seconds of all children that have ended, and of theirs."""
    times = os.times()
    return times.children_user + times.children_system


def _in_random_order() -> Iterator[tuple[str, str, str]]:
    cases = [("", *case) for case in WRONG.items()]
    random.Random(0).shuffle(cases)  # a part of the trials is a fair sample
    return itertools.cycle(cases)


ROWS = {
    "a setting that cannot work: one line, status 2, within 3 s": (
        len(WRONG),
        partial(refused, _in_random_order()),
    ),
    "a surrounding in which nothing can run: the same": (
        len(SURROUNDINGS),
        partial(refused, itertools.cycle((b, _EXECUTORS, n) for b, n in SURROUNDINGS.items())),
    ),
}
