"""Environments such as users bring: one that hides a part, and one with two actions in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium import spaces

from hts_torchrl.envs.group import EnvFactory, EnvGroup
from hts_torchrl.envs.make_group import make_group


@dataclass(frozen=True)
class OwnEnvs(EnvFactory):
    """Environments of one class, or of one function."""

    make: Callable[..., gymnasium.Env[Any, Any]]

    def group(self, indices: Sequence[int], *, render: bool = False) -> EnvGroup:
        return make_group(self.make, indices)


class HiddenVelocities(gymnasium.ObservationWrapper):
    """CartPole that shows places and no velocities: one observation is not enough to balance it."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        box = self.env.observation_space
        self.observation_space = spaces.Box(box.low[[0, 2]], box.high[[0, 2]])

    def observation(self, observation):
        return observation[[0, 2]]


class TorqueAndGear(gymnasium.ActionWrapper):
    """Pendulum whose action is a torque and one of three gears that scale it."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("Pendulum-v1", max_episode_steps=40))
        self.action_space = spaces.Dict(
            {"gear": spaces.Discrete(3), "torque": self.env.action_space}
        )

    def action(self, action):
        return action["torque"] * (1 + int(action["gear"])) / 3
