"""The whole schedule again, in plain loops: what every batch must hold.

It shares with the package only the pass of the policy; no draw, no buffer, no worker, no collector.
For Gymnasium environments with a flat observation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from hts_torchrl.policy.examination import find_outputs
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.specs import EnvSpec
from tests import philox

Cells = dict[Any, np.ndarray]


@dataclass
class _Place:
    """One environment, and what it counts."""

    env: Any
    index: int
    observation: Any
    score: Any = np.float32(0)  # noqa: RUF009
    steps: int = 0
    episode: int = 0
    memory: Cells = field(default_factory=dict)


@dataclass
class Oracle:
    """Plays rounds; ``weights_of(version)`` must be what the learner publishes."""

    make_env: Callable[[int], Any]
    policy: nn.Module
    spec: EnvSpec
    weights_of: Callable[[int], dict[str, Tensor]]
    num_envs: int
    steps: int
    seed: int = 0
    delay: int = 1
    batch_size: int = 8

    def rounds(self, count: int) -> Iterator[Cells]:
        """Yield the cells ``[N, T, ...]`` of each round by TensorDict key."""
        self._policy = copy.deepcopy(self.policy)
        self._inference = PolicyInference(self._policy, self.spec, batch_size=self.batch_size)
        find_outputs(self._inference)  # which finds what else the policy writes
        places = []
        for index in range(self.num_envs):
            env = self.make_env(index)
            first = env.reset(seed=philox.env_seed(self.seed, index))[0]
            places.append(_Place(env, index, first, memory=self._nothing()))
        for number in range(count):
            version = max(0, number - self.delay)
            if version:
                self._policy.load_state_dict(self.weights_of(version))
            first = number * self.steps
            columns = [self._step(places, first + step, version) for step in range(self.steps)]
            yield {key: np.stack([column[key] for column in columns], 1) for key in columns[0]}

    def _nothing(self) -> Cells:
        """What is remembered where a trajectory begins."""
        memory: Cells = {key: value.copy() for key, value in self.spec.memory.initial.items()}
        return memory | ({"is_init": np.array([True])} if self.spec.memory.reads_is_init else {})

    def _step(self, places: list[_Place], step: int, version: int) -> Cells:
        """All environments once: the cells ``[N, ...]`` of one column."""
        action = self.spec.action
        draw = philox.normal if action.kind == "continuous" else philox.uniform
        rows = []
        for place in places:
            draws = np.array([draw(self.seed, place.index, step, action.num_draws)])
            observation = np.array(place.observation)[None]
            inputs = {key: value[None] for key, value in place.memory.items()}
            answer = self._inference.answer({"observation": observation, **inputs}, draws)
            cells = {key: value[0] for key, value in answer.items()}
            rows.append(self._transition(place, cells, version))
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    def _transition(self, place: _Place, answer: Cells, version: int) -> Cells:
        sent = answer["action"]
        if self.spec.action.kind == "continuous":
            sent = np.clip(sent, self.spec.action.low, self.spec.action.high)
        after, reward, terminated, truncated, _ = place.env.step(sent)
        place.score = np.float32(place.score + np.float32(reward))
        place.steps += 1
        ends = terminated or truncated
        numbers = {"reward": np.float32(reward), "terminated": terminated, "truncated": truncated}
        numbers |= {"done": ends, "episode_end": ends}
        numbers |= {"episode_reward": place.score, "step_count": place.steps}
        cells = {("next", key): np.array([value]) for key, value in numbers.items()}
        cells |= {key: np.array([False]) for key in ("done", "terminated", "truncated")}
        cells |= place.memory
        place.memory = dict(place.memory)
        if "is_init" in place.memory:
            cells["next", "is_init"] = np.array([False])
        for key in place.memory:
            place.memory[key] = np.array([False]) if key == "is_init" else answer["next", key]
        cells |= {**answer, "observation": place.observation, ("next", "observation"): after}
        cells["collector", "traj_ids"] = np.array(place.index + place.episode * self.num_envs)
        cells["collector", "policy_version"] = np.array(version)
        place.observation = after
        if ends:
            place.score, place.steps, place.episode = np.float32(0), 0, place.episode + 1
            place.memory = self._nothing()
            seed = philox.env_seed(self.seed, place.index, place.episode)
            place.observation = place.env.reset(seed=seed)[0]
        return cells
