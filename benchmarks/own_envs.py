"""Environments such as users bring: pictures and numbers, nested actions, masks, two agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from hts_torchrl.envs.group import EnvFactory, EnvGroup
from hts_torchrl.envs.make_group import make_group

SIDE = 16


@dataclass(frozen=True)
class OwnEnvs(EnvFactory):
    """Environments of one class of this module."""

    make: Callable[[], gymnasium.Env[Any, Any]]

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


class PictureAndNumbers(gymnasium.ObservationWrapper):
    """CartPole that shows a picture of the cart's place beside the four numbers."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1", max_episode_steps=40))
        picture = spaces.Box(0, 255, (1, SIDE, SIDE), np.uint8)
        self.observation_space = spaces.Dict(
            {"numbers": self.env.observation_space, "picture": picture}
        )

    def observation(self, observation):
        picture = np.zeros((1, SIDE, SIDE), np.uint8)
        column = int(np.clip((observation[0] / 2.4 + 1) / 2 * SIDE, 0, SIDE - 1))
        picture[0, :, column] = 255
        return {"numbers": observation, "picture": picture}


class TorqueAndGear(gymnasium.ActionWrapper):
    """Pendulum whose action is a torque and one of three gears that scale it."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("Pendulum-v1", max_episode_steps=40))
        self.action_space = spaces.Dict(
            {"gear": spaces.Discrete(3), "torque": self.env.action_space}
        )

    def action(self, action):
        return action["torque"] * (1 + int(action["gear"])) / 3


class NoThirdTime(gymnasium.Wrapper):
    """CartPole that forbids to push the same way a third time, and raises for it."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1", max_episode_steps=40))
        self.observation_space = spaces.Dict(
            {"action_mask": spaces.MultiBinary(2), "observation": self.env.observation_space}
        )

    def _seen(self, observation):
        mask = np.ones(2, np.int8)
        if len(self.last) == 2 and self.last[0] == self.last[1]:
            mask[self.last[0]] = 0
        return {"action_mask": mask, "observation": observation}

    def reset(self, **settings):
        self.last: list[int] = []
        observation, info = self.env.reset(**settings)
        return self._seen(observation), info

    def step(self, action):
        if self.last == [action, action]:
            raise ValueError(f"{action} is forbidden")
        self.last = [*self.last, int(action)][-2:]
        observation, *rest = self.env.step(action)
        return self._seen(observation), *rest


def two_carts(render_mode: str | None = None) -> TwoCarts:  # noqa: ARG001
    """Make a game of two agents, for ``PettingZooEnvs``."""
    return TwoCarts()


class TwoCarts:
    """PettingZoo's parallel interface: two CartPoles, and the game ends when one falls."""

    def __init__(self) -> None:
        self.possible_agents = ["left", "right"]
        self.agents: list[str] = []
        self.carts = {name: gymnasium.make("CartPole-v1") for name in self.possible_agents}

    def observation_space(self, agent):
        return self.carts[agent].observation_space

    def action_space(self, agent):
        return self.carts[agent].action_space

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        seeds = [None, None] if seed is None else [seed, seed + 1]
        pairs = zip(self.agents, seeds, strict=True)
        seen = {name: self.carts[name].reset(seed=each)[0] for name, each in pairs}
        return seen, {name: {} for name in self.agents}

    def step(self, actions):
        results = {name: self.carts[name].step(action) for name, action in actions.items()}
        ends = any(result[2] or result[3] for result in results.values())
        self.agents = [] if ends else self.agents
        seen, rewards = ({name: r[part] for name, r in results.items()} for part in (0, 1))
        every = dict.fromkeys(results, ends)
        return seen, rewards, every, dict.fromkeys(results, False), {name: {} for name in results}

    def close(self):
        for cart in self.carts.values():
            cart.close()
