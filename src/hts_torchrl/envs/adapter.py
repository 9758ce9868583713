"""The one way from an environment of any library to a group: an adapter, and what steps adapters.

Shapes: R environments of an adapter, G of the group.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import gymnasium
import numpy as np

from hts_torchrl.envs.action_maker import action_maker
from hts_torchrl.envs.group import Observation, Transition, require_alike
from hts_torchrl.envs.layers import is_a
from hts_torchrl.envs.observed import DeclaredSpace, as_flag, as_returned, as_reward, called
from hts_torchrl.envs.own_generators import GlobalGenerator, OwnGenerators
from hts_torchrl.envs.spaces import env_spec
from hts_torchrl.errors import ConfigurationError, in_one_line
from hts_torchrl.specs import Array, ArraySpec, EnvSpec, Key

Step: TypeAlias = tuple[Observation, Any, Any, Any, Any]
"""Observation, reward, score, ``terminated`` and ``truncated`` of one environment, or ``[R]``."""
_STEP = ("observation", "reward", "terminated", "truncated", "info")


class EnvAdapter(ABC):
    """One environment, or R that step together, in the form in which groups step them.

    Its group's loop; what is returned is valid until the next call::

        observation = adapter.reset(seeds)
        observation, reward, score, terminated, truncated = adapter.step(action)
        observation = adapter.reset([])  # if an episode has ended: its next one begins

    Arrays have no first dimension for the one environment; of several they lead with R, also if
    that is 1.

    Args:
        env: what is stepped, as its library has it.
        index: global, of the environment; or a list of them, of several that step together.
        spec: of one environment.
        kept: global generators that it draws from for certain.
    """

    def __init__(
        self,
        env: Any,  # noqa: ANN401
        index: int | Sequence[int],
        spec: EnvSpec,
        *kept: GlobalGenerator,
    ) -> None:
        self.env, self.spec = env, spec
        self.single = isinstance(index, int)
        self.index = index if isinstance(index, int) else list(index)
        self.indices = [index] if isinstance(index, int) else list(index)
        self.parts: list[object] = [env]
        """What it steps, and no other may."""
        self.generators = OwnGenerators(*kept)
        lead = () if self.single else (len(self.indices),)
        self.declared: dict[Key, ArraySpec] = {
            key: replace(array, shape=(*lead, *array.shape))
            for key, array in spec.observations.items()
        }
        """What its observations must be."""
        self._resetting = called("reset", self.index)
        self._stepping = called("step", self.index)

    @abstractmethod
    def reset(self, seeds: Sequence[int]) -> Observation:
        """Begin a game in all environments; without seeds, in those whose episode has ended.

        Args:
            seeds: one for each environment; the first decides where all have one generator.
        """

    @abstractmethod
    def step(self, action: Array) -> Step:
        """Step by one action, or by one of each environment, and reset nothing."""

    def render(self) -> Array:
        """Return the first environment's image."""
        return np.asarray(self.env.render())

    def close(self) -> None:
        """Free what the environment holds."""
        with called("close", self.index):
            self.env.close()


class GymAdapter(EnvAdapter):
    """A single Gymnasium environment."""

    def __init__(self, env: gymnasium.Env[Any, Any], index: int) -> None:
        # A class may have forgotten one, which is refused.
        space: Any = getattr(env, "observation_space", None)
        action_space: Any = getattr(env, "action_space", None)
        super().__init__(env, index, spec_of(env, index, space, action_space))
        self.parts = [env.unwrapped]
        self._is_minatar = is_a(env.unwrapped, "minatar.BaseEnv")
        self._action_space = action_space
        self._action_of = action_maker(action_space)
        self._space = DeclaredSpace(space, self.declared)

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Begin a game."""
        self._require_same_actions()  # a game may have changed them, and reset() put them back
        with self._resetting:
            if seeds and self._is_minatar:
                self.env.unwrapped.game.last_action = 0  # a sticky one would go on
            returned = self.env.reset(seed=seeds[0] if seeds else None)
            observation, _ = as_returned(returned, ("observation", "info"))
            entries = self._space.entries(observation)
        self._require_same_actions()
        return entries

    def _require_same_actions(self) -> None:
        space, first = self.env.action_space, self._action_space
        if space is not first and space != first:
            raise ConfigurationError(
                f"environment {self.index} has the action space {in_one_line(space)}, but "
                f"had {in_one_line(first)} when it was made: declare all actions from the start, "
                "and tell by an 'action_mask' in the observation which of them are allowed"
            )

    def step(self, action: Array) -> Step:
        """Step the environment."""
        with self._stepping:
            returned = as_returned(self.env.step(self._action_of(action)), _STEP)
            observation, reward, terminated, truncated, _ = returned
            reward = as_reward(reward)
            terminated = terminated is not False and as_flag("terminated", terminated)
            truncated = truncated is not False and as_flag("truncated", truncated)
            return self._space.entries(observation), reward, reward, terminated, truncated


class AdapterGroup:
    """Adapters stepped one after another (an :class:`EnvGroup`)."""

    def __init__(self, adapters: Sequence[EnvAdapter]) -> None:
        self.adapters = list(adapters)
        self.spec = require_alike([(each.indices[0], each.spec) for each in adapters])
        self.num_envs = 0
        self._rows: list[range] = []
        self._places: list[int | slice] = []
        owner: dict[int, int] = {}
        for each in adapters:
            index = each.indices[0]
            for part in each.parts:
                if (other := owner.setdefault(id(part), index)) != index:
                    raise ConfigurationError(
                        f"environments {other} and {index} are the same {type(part).__name__}, and "
                        "a step of one would be a step of the other: make a new one in each call "
                        "of the function"
                    )
            first, self.num_envs = self.num_envs, self.num_envs + len(each.indices)
            self._rows.append(range(first, self.num_envs))
            self._places.append(first if each.single else slice(first, self.num_envs))
        self._is_whole = len(adapters) == 1 and not adapters[0].single
        self._next: Observation = {
            key: np.empty((self.num_envs, *spec.shape), spec.dtype)
            for key, spec in self.spec.observations.items()
        }

    @property
    def envs(self) -> list[Any]:
        """What is stepped, as its library has it."""
        return [each.env for each in self.adapters]

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Seed and reset every environment.

        Raises:
            ConfigurationError: if there are seeds for another number of environments.
        """
        if len(seeds) != self.num_envs:
            agents = len(self._rows[0])
            raise ConfigurationError(
                f"{agents} agents share a game, but these are {len(seeds)} environments: "
                f"set num_envs and envs_per_executor to multiples of {agents}"
            )
        for number, rows in enumerate(self._rows):
            self._begin(number, [int(seeds[row]) for row in rows])
        return self._next

    def _begin(self, number: int, seeds: Sequence[int]) -> None:
        adapter = self.adapters[number]
        with adapter.generators as generators:
            if seeds:
                generators.seed(seeds[0])
            self._store(self._places[number], adapter.reset(seeds))

    def _store(self, place: int | slice, observation: Observation) -> None:
        if self._is_whole:  # nothing is to be copied
            self._next = observation
        else:
            store(observation, self._next, place)

    def step(self, actions: Array) -> Transition:
        """Step each environment, and reset those whose episode ended."""
        reward, score = np.zeros(self.num_envs, np.float32), np.zeros(self.num_envs, np.float32)
        terminated, truncated = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        for adapter, place in zip(self.adapters, self._places, strict=True):
            with adapter.generators:
                observation, reward[place], score[place], terminated[place], truncated[place] = (
                    adapter.step(actions[place])
                )
            self._store(place, observation)
        ends = terminated | truncated
        after = self._next
        if np.count_nonzero(ends):  # a reset may write the same memory again
            after = {key: array.copy() for key, array in after.items()}
            for number, rows in enumerate(self._rows):
                if ends[rows].any():
                    self._begin(number, self._new_seeds(rows))
        return Transition(after, self._next, reward, score, terminated, truncated, ends)

    def _new_seeds(self, rows: range) -> list[int]:  # noqa: ARG002
        """Return the seeds of the next games; none go on without."""
        return []

    def render(self) -> Array:
        """Return the first environment's image."""
        return self.adapters[0].render()

    def close(self) -> None:
        """Close every environment, also where one raises."""
        with contextlib.ExitStack() as stack:
            for adapter in reversed(self.adapters):  # the last callback comes first
                stack.callback(adapter.close)


class SerialGroup(AdapterGroup):
    """The same of adapters whose environments begin and end together (a :class:`SeededGroup`)."""

    steps_per_seed = 0
    next_seed: Callable[[int], int | None] | None = None

    def restart(self, rows: Sequence[int], seeds: Sequence[int]) -> Observation:
        """Seed and reset some environments: of a game of several agents, all."""
        seed_of = dict(zip(rows, seeds, strict=True))
        for number, own in enumerate(self._rows):
            if own[0] in seed_of:
                assert seed_of.keys() >= set(own), "a game begins for all of its agents"
                self._begin(number, [int(seed_of[row]) for row in own])
        return self._next

    def _new_seeds(self, rows: range) -> list[int]:
        if self.next_seed is None:
            return []
        seeds = [self.next_seed(row) for row in rows]  # every agent counts its seeds
        return [seed for seed in seeds if seed is not None]


def spec_of(
    env: Any,  # noqa: ANN401 - a single or a vector environment
    index: int,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
) -> EnvSpec:
    """Describe the environment of an index, which is named where a space is refused."""
    try:
        return env_spec(observation_space, action_space)
    except ConfigurationError as error:
        name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
        raise ConfigurationError(f"environment {index} ({name}): {error}") from None


def store(observation: Observation, into: Observation, place: int | slice) -> None:
    """Write an observation into its rows."""
    for key, array in into.items():
        array[place] = observation[key]
