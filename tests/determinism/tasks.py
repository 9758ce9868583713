"""The tasks on which runs are compared: environments with a policy, and the size of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hts_torchrl import AtariEnvs, GymEnvs, HTSCollector
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.models import make_actor_critic
from tests.fakes import CoordinateEnvs, MultiDiscreteEnv
from tests.policies import echo_policy


@dataclass(frozen=True)
class Task:
    """Everything a run depends on but the seed and the workers."""

    create_env_fn: Any
    network: str
    num_envs: int = 4
    steps: int = 5
    rounds: int = 4
    settings: dict[str, Any] = field(default_factory=dict)

    def policy(self) -> nn.Module:
        """The same weights at each call."""
        if self.network == "echo":
            return echo_policy()
        group = make_group(self.create_env_fn, [0])
        group.close()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return make_actor_critic(self.network, group.spec, **self.settings)

    def collector(
        self, kind: Callable[..., HTSCollector] = HTSCollector, **settings: Any
    ) -> HTSCollector:
        """A collector of the task; serial unless told otherwise."""
        frames = self.num_envs * self.steps
        defaults: dict[str, Any] = {
            "num_envs": self.num_envs,
            "frames_per_batch": frames,
            "total_frames": frames * self.rounds,
            "num_actors": 0,
        }
        return kind(self.create_env_fn, self.policy(), **(defaults | settings))


TASKS = {
    "coordinates": Task(CoordinateEnvs(), "echo"),
    "cartpole": Task(GymEnvs("CartPole-v1"), "mlp", num_envs=8, steps=16),
    "pendulum": Task(GymEnvs("Pendulum-v1", {"max_episode_steps": 30}), "mlp", steps=16),
    "squashed": Task(
        GymEnvs("Pendulum-v1", {"max_episode_steps": 30}), "mlp", settings={"squash": True}
    ),
    "choices": Task(MultiDiscreteEnv, "mlp"),
    "breakout": Task(AtariEnvs("breakout", max_frames=120), "nature", num_envs=2, rounds=6),
}
