"""Sample Factory's PPO (APPO), for ``reproducibility.py``: its examples of a gym and an Atari game.

Workers: rollout workers, in processes of their own but for ``serial_mode``, which runs everything
in one process, one thing after the other. Seeds: ``--seed``, which its learner takes; environments
are seeded with their index, whatever the seed. It tells no weights to its observers, so the method
that trains on a batch is wrapped, in every process that imports this file. Checkpoint: its own at
the end of a run, and ``--restart_behavior=resume``, its default.
"""

from __future__ import annotations

import sys
from typing import Any

import ale_py  # noqa: F401  registers the games, in every process
import torch
from sample_factory.algo.learning.learner import Learner
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.train import make_runner
from sf_examples.atari.train_atari import parse_atari_args, register_atari_components
from sf_examples.train_gym_env import register_custom_components
from training import EPOCHS, FRAMES, MINIBATCHES, STEPS, Training, tell

train_on_batch = Learner.train


def train_and_tell(learner: Learner, batch: Any) -> Any:
    result = train_on_batch(learner, batch)
    tell(learner.env_steps // FRAMES, learner.actor_critic.named_parameters())
    return result


Learner.train = train_and_tell


def arguments(training: Training) -> list[str]:
    values = {
        "algo": "APPO", "train_dir": training.folder, "experiment": "run", "device": "cpu",
        "seed": training.seed, "serial_mode": training.system.endswith("serial"),
        "async_rl": training.system.endswith("async"), "num_workers": training.workers,
        "num_envs_per_worker": training.envs_per_worker, "worker_num_splits": 1,
        "rollout": STEPS, "batch_size": FRAMES // MINIBATCHES,
        "num_batches_per_epoch": MINIBATCHES, "num_epochs": EPOCHS, "use_rnn": False,
        "env": "CartPole-v1" if training.task == "cartpole" else f"atari_{training.task}",
        "lr_schedule": "constant", "summaries_use_frameskip": False,
        "train_for_env_steps": FRAMES * training.ends, "save_every_sec": 10**6,
        "save_best_every_sec": 10**6, "decorrelate_envs_on_one_worker": False,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in values.items()]


def main(training: Training) -> None:
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(training.seed)
    training.seed_python_and_numpy()
    register_atari_components()
    register_custom_components()
    if training.task == "cartpole":
        parser, _ = parse_sf_args(arguments(training))
        cfg = parse_full_cfg(parser, arguments(training))
    else:
        cfg = parse_atari_args(arguments(training))
    _, runner = make_runner(cfg)
    status = runner.init()
    if status == ExperimentStatus.SUCCESS:
        status = runner.run()
    if status != ExperimentStatus.SUCCESS:
        sys.exit("the training did not start, or ended too early")


if __name__ == "__main__":
    main(Training.asked_for())
