"""Stable-Baselines3 on Atari and CartPole, for ``throughput.py``.

That program makes its environment and calls it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ale_py
import gymnasium
import torch
from harness import Stopwatch, keep_freed_memory
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack


class Watch(BaseCallback):
    """Ends the training when enough was measured."""

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self.watch, self.enough = watch, False

    def _on_rollout_start(self) -> None:
        """Count a round where its update has ended: before the next rollout."""
        self.enough = self.watch.round_ended()

    def _on_step(self) -> bool:
        return not self.enough


def main(run: dict[str, Any]) -> None:
    keep_freed_memory()
    gymnasium.register_envs(ale_py)
    torch.set_num_threads(run["main_threads"])
    vectorisation = {"subproc": SubprocVecEnv, "dummy": DummyVecEnv}[run["envs"]]
    count, policy = run["num_envs"], "CnnPolicy"
    if run["game"] == "cartpole":
        envs, policy = make_vec_env("CartPole-v1", count, vec_env_cls=vectorisation), "MlpPolicy"
    else:
        game = f"{run['game'].title().replace('_', '')}NoFrameskip-v4"
        envs = VecFrameStack(make_atari_env(game, count, vec_env_cls=vectorisation), 4)
    shared = {"n_steps": run["steps"], "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5}
    if run["algorithm"] == "ppo":
        batch_size = count * run["steps"] // 4
        model: Any = PPO(policy, envs, n_epochs=4, batch_size=batch_size, **shared)
    else:
        model = A2C(policy, envs, **shared)
    if run["channels_last"] and policy == "CnnPolicy":
        model.policy.to(memory_format=torch.channels_last)
    watch = Stopwatch(count * run["steps"], run["seconds"])
    model.learn(10**9, callback=Watch(watch))
    envs.close()
    print(watch.steps_per_s, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[2]))
