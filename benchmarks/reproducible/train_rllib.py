"""RLlib's PPO (its new API), for ``reproducibility.py``.

Workers: env runners, processes of Ray, beside a learner in this process. Seeds:
``debugging(seed=...)``, as in its example ``deterministic_sampling_and_training.py``. An iteration
ends with its samples, not with the clock (``min_time_s_per_iteration=None``). Checkpoint:
``save_to_path`` and ``restore_from_path``.
"""

from __future__ import annotations

import logging
import os
import warnings

os.environ |= {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import ale_py
import gymnasium
import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack
from ray.tune.registry import register_env
from training import EPOCHS, FRAMES, GAMES, MINIBATCHES, NUM_ENVS, Training, tell


def make_atari(config: dict) -> gymnasium.Env:
    gymnasium.register_envs(ale_py)
    env = gymnasium.make(GAMES["breakout"], **config)
    return wrap_atari_for_new_api_stack(env, framestack=4)


def settings(training: Training) -> PPOConfig:
    return (
        PPOConfig()
        .environment("CartPole-v1" if training.task == "cartpole" else "atari")
        .framework("torch")
        .env_runners(
            num_env_runners=training.workers,
            num_envs_per_env_runner=NUM_ENVS // training.workers,
            sample_timeout_s=300.0,
        )
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=FRAMES,
            minibatch_size=FRAMES // MINIBATCHES,
            num_epochs=EPOCHS,
        )
        .reporting(min_time_s_per_iteration=None)
        .debugging(seed=training.seed, log_level="ERROR")
    )


def main(training: Training) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(training.threads)
    torch.use_deterministic_algorithms(True)
    register_env("atari", make_atari)
    # A folder of its own, of a short name: Ray puts sockets there.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=training.folder)
    algorithm = settings(training).build_algo()
    if training.resumed:
        algorithm.restore_from_path(str(training.checkpoint))
    for update in range(training.begins + 1, training.ends + 1):
        algorithm.train()
        weights = algorithm.learner_group.get_weights()["default_policy"]
        tell(update, weights.items())
    if training.is_stopped:
        algorithm.save_to_path(str(training.checkpoint))
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main(Training.asked_for())
