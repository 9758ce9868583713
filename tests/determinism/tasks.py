"""The tasks on which runs are compared: environments with a policy, and the size of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from hts_torchrl import (
    A2C,
    PPO,
    PQN,
    AtariEnvs,
    EnvPoolEnvs,
    GymEnvs,
    HTSCollector,
    Impala,
    PettingZooEnvs,
)
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.learner import Learner
from hts_torchrl.models import make_actor_critic
from tests.fakes import CoordinateEnvs, DictEnv, MaskedEnvs, MultiDiscreteEnv, NestedActionEnv
from tests.policies import composite_policy, counting_policy, echo_policy, policy_with


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
        if self.network == "counting":
            return counting_policy(first=3.0)
        if self.network.startswith("composite"):
            return composite_policy(*self.network.split()[1:])
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


# Games of about 20 steps: many end, and start again, within the 48 of a run.
CARTPOLE = GymEnvs("CartPole-v1", {"max_episode_steps": 20})
PENDULUM = GymEnvs("Pendulum-v1", {"max_episode_steps": 20})


@dataclass(frozen=True)
class Learning:
    """What learns, on which environments."""

    make: Callable[..., Learner]
    env: GymEnvs | AtariEnvs = CARTPOLE
    trainer: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    make_layer: Callable[[], nn.Module] | None = None
    """Makes a layer for the trunk of the policy."""

    def learner(self, **settings: Any) -> Learner:
        """An untrained learner."""
        if self.make_layer is None:
            return self.make(**settings)
        return self.make(policy_with(self.make_layer(), self.env, frozen=True), **settings)


DECAYING_A2C = partial(A2C, learning_rate=0.01, learning_rate_decay=True)
DELAYED_A2C = partial(DECAYING_A2C, delayed_step="gradient")
SHORT_PPO = partial(PPO, epochs=2, minibatches=2, learning_rate_decay=True, delayed_step="ratio")
DISPLACING_PPO = partial(PPO, epochs=2, minibatches=1, delayed_step="displacement")
DECOUPLED_PPO = partial(SHORT_PPO, delayed_step="decoupled")
SHORT_PQN = partial(PQN, epochs=2, minibatches=2, learning_rate_decay=True)
CHUNKS = {"accumulate_grad_batches": 2}
STATISTICS = {"normalize_observation": True, "normalize_reward": True}
BF16 = {"precision": "bf16-mixed"}
LEARNINGS = {
    "A2C": Learning(DECAYING_A2C),
    "PPO": Learning(SHORT_PPO),
    "PPO displacement": Learning(DISPLACING_PPO),
    "PQN": Learning(SHORT_PQN),
}
"""What has one mode, no layer that draws, and 32 bits."""
SPECIAL_LEARNINGS = {
    "A2C gradient": Learning(DELAYED_A2C, trainer=CHUNKS),
    "A2C squashed": Learning(partial(DECAYING_A2C, squash=True), PENDULUM),
    "PPO squashed": Learning(partial(SHORT_PPO, squash=True), PENDULUM),
    "A2C dropout": Learning(DECAYING_A2C, trainer=CHUNKS, make_layer=nn.Dropout),
    "PPO dropout": Learning(DISPLACING_PPO, make_layer=nn.Dropout),
    "A2C normalised": Learning(DELAYED_A2C, trainer=CHUNKS, make_layer=partial(nn.BatchNorm1d, 16)),
    "PPO normalised": Learning(SHORT_PPO, make_layer=partial(nn.BatchNorm1d, 16)),
    "Impala normalised": Learning(Impala, make_layer=partial(nn.BatchNorm1d, 16)),
    "A2C bfloat16": Learning(DECAYING_A2C, trainer=BF16),
    "A2C statistics": Learning(
        partial(DELAYED_A2C, normalize_value=True), PENDULUM, CHUNKS, STATISTICS
    ),
    "PPO statistics": Learning(partial(SHORT_PPO, normalize_value=True), PENDULUM, {}, STATISTICS),
    "PPO pixels displacement": Learning(
        partial(DISPLACING_PPO, network="nips"),
        AtariEnvs("breakout", max_frames=120),
        data={"normalize_observation": True},
    ),
    "PPO statistics displacement": Learning(DISPLACING_PPO, PENDULUM, {}, STATISTICS),
    "A2C lstm": Learning(partial(DECAYING_A2C, network="lstm"), trainer=CHUNKS),
    "PPO gru": Learning(partial(SHORT_PPO, network="gru")),
    "PPO lstm displacement": Learning(partial(DISPLACING_PPO, network="lstm")),
    "PPO decoupled": Learning(DECOUPLED_PPO),
    "PPO lstm decoupled": Learning(partial(DECOUPLED_PPO, network="lstm")),
    "PPO bfloat16 decoupled": Learning(partial(DECOUPLED_PPO, squash=True), PENDULUM, BF16),
    "PQN gru": Learning(partial(SHORT_PQN, network="gru")),
    "PQN statistics": Learning(
        partial(SHORT_PQN, normalize_value=True, exploration_fraction=1.0),
        CARTPOLE,
        CHUNKS,
        STATISTICS,
    ),
    "PPO bfloat16": Learning(partial(SHORT_PPO, squash=True), PENDULUM, BF16 | CHUNKS),
}
"""What draws while it learns, has statistics or a memory, or computes in two precisions."""

TASKS = {
    "coordinates": Task(CoordinateEnvs(), "echo"),
    "cartpole": Task(GymEnvs("CartPole-v1"), "mlp", num_envs=8, steps=16),
    "pendulum": Task(GymEnvs("Pendulum-v1", {"max_episode_steps": 30}), "mlp", steps=16),
    "envpool": Task(EnvPoolEnvs("CartPole-v1"), "mlp", steps=24),
    "agents": Task(PettingZooEnvs("tests.fakes:Duel"), "mlp", num_envs=8, steps=12),
    "squashed": Task(
        GymEnvs("Pendulum-v1", {"max_episode_steps": 30}), "mlp", settings={"squash": True}
    ),
    "lstm": Task(CARTPOLE, "lstm", num_envs=8, steps=16),
    "gru": Task(PENDULUM, "mlp+gru"),
    "counting": Task(CARTPOLE, "counting"),
    "choices": Task(MultiDiscreteEnv, "mlp"),
    "masked": Task(MaskedEnvs((3, 5)), "mlp"),
    "mixed": Task(NestedActionEnv, "mlp"),
    "parts": Task(NestedActionEnv, "composite"),
    "parts remembered": Task(NestedActionEnv, "composite lstm", steps=6),
    "combined": Task(DictEnv, "impala"),
    "breakout": Task(AtariEnvs("breakout", max_frames=120), "nature", num_envs=2, rounds=6),
}
