"""Any Gymnasium environment: a factory by id, and the groups that wrap single and vector ones."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from hts_torchrl.config import EnvSpec
from hts_torchrl.envs.group import (
    Array,
    EnvFactory,
    EnvGroup,
    Observation,
    Transition,
    called,
    close_each,
    require_alike,
)
from hts_torchrl.envs.gym_action import action_maker
from hts_torchrl.envs.observed import DeclaredSpace, as_flag, as_returned, as_reward, observing
from hts_torchrl.envs.spaces import env_spec
from hts_torchrl.errors import ConfigurationError

_RESET = ("observation", "info")
_STEP = ("observation", "reward", "terminated", "truncated", "info")


@dataclass(frozen=True)
class GymEnvs(EnvFactory):
    """Environments of one Gymnasium id.

    What they return as ``info`` is not kept: what a policy or a loss needs belongs into the
    observation, by a wrapper of yours around an environment made by a function of yours.

    Example:
        >>> from hts_torchrl import GymEnvs, env_spec_of
        >>> env_spec_of(GymEnvs("CartPole-v1")).action.sizes
        (2,)
    """

    id: str
    """Gymnasium's id, ``CartPole-v1``; ``module:Name-v0`` imports the module first."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``gymnasium.make``."""

    def group(self, indices: Sequence[int], *, render: bool = False) -> EnvGroup:
        """Make the environments of the given indices (:class:`EnvFactory`).

        Raises:
            ConfigurationError: if Gymnasium knows no such environment or lacks what it needs.
        """
        kwargs = {**self.kwargs, **({"render_mode": "rgb_array"} if render else {})}
        try:
            envs = [self._make(index, kwargs) for index in indices]
        except gymnasium.error.UnregisteredEnv as error:
            near = difflib.get_close_matches(self.id, gymnasium.registry, n=3)
            hint = f"; near to it: {', '.join(near)}" if near else ""
            raise ConfigurationError(f"Gymnasium knows no environment {self.id!r}{hint}") from error
        except (gymnasium.error.Error, ImportError, TypeError, ValueError, AssertionError) as error:
            raise ConfigurationError(f"environment {self.id!r}: {error}") from error
        return SerialGroup(envs, indices)

    def _make(self, index: int, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
        with called("make", index):
            return gymnasium.make(self.id, **kwargs)


class SerialGroup:
    """Single Gymnasium environments stepped one after another (a :class:`SeededGroup`)."""

    steps_per_seed = 0
    next_seed: Callable[[int], int | None] | None = None

    def __init__(self, envs: Sequence[gymnasium.Env[Any, Any]], indices: Sequence[int]) -> None:
        self.envs = list(envs)
        self.indices = list(indices)
        self.num_envs = len(self.envs)
        spaces = [(env.observation_space, env.action_space) for env in self.envs]
        specs = {
            index: _spec_of(env, index, *pair)
            for env, index, pair in zip(self.envs, self.indices, spaces, strict=True)
        }
        self.spec: EnvSpec = require_alike(specs)
        self._action_of = [action_maker(self.spec.action, space) for _, space in spaces]
        self._declared = [DeclaredSpace(space, self.spec.observations) for space, _ in spaces]
        self._after = self._empty()
        self._next = self._empty()
        self._stepping = [observing("step", index) for index in self.indices]

    def _empty(self) -> Observation:
        return {
            key: np.empty((self.num_envs, *spec.shape), spec.dtype)
            for key, spec in self.spec.observations.items()
        }

    def _reset(self, row: int, seed: int | None) -> Observation:
        with observing("reset", self.indices[row]):
            observation, _ = as_returned(self.envs[row].reset(seed=seed), _RESET)
            return self._declared[row].entries(observation)

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Seed and reset every environment."""
        return self.restart(range(self.num_envs), seeds)

    def restart(self, rows: Sequence[int], seeds: Sequence[int]) -> Observation:
        """Seed and reset some environments."""
        for row, seed in zip(rows, seeds, strict=True):
            _store(self._reset(row, int(seed)), self._next, row)
        return self._next

    def step(self, actions: Array) -> Transition:
        """Step each environment, and reset those whose episode ended."""
        rewards = np.zeros(self.num_envs, np.float32)
        terminated = np.zeros(self.num_envs, bool)
        truncated = np.zeros(self.num_envs, bool)
        ended = []
        for row, env in enumerate(self.envs):
            with self._stepping[row]:
                action = self._action_of[row](actions[row])
                observation, reward, terminates, truncates, _ = as_returned(env.step(action), _STEP)
                rewards[row] = as_reward(reward)
                if terminates is not False:
                    terminated[row] = as_flag("terminated", terminates)
                if truncates is not False:
                    truncated[row] = as_flag("truncated", truncates)
                seen = self._declared[row].entries(observation)
            if terminated[row] or truncated[row]:
                ended.append(row)
                _store(seen, self._after, row)
                seen = self._reset(row, None if self.next_seed is None else self.next_seed(row))
            _store(seen, self._next, row)
        after = self._observed_after(ended) if ended else self._next
        ends = terminated | truncated
        return Transition(after, self._next, rewards, rewards, terminated, truncated, ends)

    def _observed_after(self, ended: list[int]) -> Observation:
        """Return what the step led to: also where it ended an episode, whose last is stored."""
        for key, array in self._after.items():
            last = array[ended]
            array[:] = self._next[key]
            array[ended] = last
        return self._after

    def render(self) -> Array:
        """Return the first environment's picture."""
        return np.asarray(self.envs[0].render())

    def close(self) -> None:
        """Close every environment."""
        close_each(dict(zip(self.indices, self.envs, strict=True)))


class VectorGroup:
    """A Gymnasium vector environment that resets within the step (an :class:`EnvGroup`)."""

    def __init__(self, envs: VectorEnv[Any, Any, Any], indices: Sequence[int]) -> None:
        if envs.num_envs != len(indices):
            raise ConfigurationError(
                f"the vector environment has {envs.num_envs} environments, but an executor has "
                f"{len(indices)}: set envs_per_executor={envs.num_envs}"
            )
        if envs.metadata.get("autoreset_mode") is not AutoresetMode.SAME_STEP:
            raise ConfigurationError(
                "the vector environment must reset within the step that ends an episode: make it "
                "with autoreset_mode=AutoresetMode.SAME_STEP"
            )
        self.envs = envs
        self.indices = list(indices)
        self.num_envs = envs.num_envs
        space, action_space = envs.single_observation_space, envs.single_action_space
        self.spec = _spec_of(envs, self.indices[0], space, action_space)
        self._action_of = action_maker(self.spec.action, action_space)
        self._declared = DeclaredSpace(space, self.spec.observations)
        self._stepping = observing("step", self.indices)

    def _arrays(self, observation: Any) -> Observation:  # noqa: ANN401
        if isinstance(observation, dict):
            return {key: observation[key] for key in self.spec.observations}
        return {"observation": observation}

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Seed and reset every environment."""
        many = [int(seed) for seed in seeds]
        return self._arrays(self.envs.reset(seed=many)[0])  # type: ignore[arg-type]

    def step(self, actions: Array) -> Transition:
        """Step all environments at once."""
        batch = self._action_of(actions)
        observation, reward, terminated, truncated, info = self.envs.step(batch)
        following = self._arrays(observation)
        ends = terminated | truncated
        after = following
        if ends.any():
            after = {key: array.copy() for key, array in following.items()}
            for row in np.flatnonzero(ends).tolist():
                with observing("step", self.indices[row]):
                    _store(self._declared.entries(_last_of(info, row)), after, row)
        if reward.shape != ends.shape:
            with self._stepping:
                reward = np.array([as_reward(each) for each in reward])
        reward = reward.astype(np.float32)
        return Transition(after, following, reward, reward, terminated, truncated, ends)

    def render(self) -> Array:
        """Return the first environment's picture."""
        frames = self.envs.render()
        if not frames:
            raise ConfigurationError("the vector environment renders nothing")
        return np.asarray(frames[0])

    def close(self) -> None:
        """Close the vector environment."""
        self.envs.close()


def _spec_of(
    env: Any,  # noqa: ANN401 - a single or a vector environment
    index: int,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
) -> EnvSpec:
    try:
        return env_spec(observation_space, action_space)
    except ConfigurationError as error:
        name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
        raise ConfigurationError(f"environment {index} ({name}): {error}") from None


def _last_of(info: Any, row: int) -> Any:  # noqa: ANN401
    if not isinstance(info, dict) or "final_obs" not in info:
        raise ConfigurationError(
            "the last observation of an episode is missing: vector environments of Gymnasium give "
            "it as info['final_obs']"
        )
    return info["final_obs"][row]


def _store(entries: Observation, into: Observation, row: int) -> None:
    for key, array in into.items():
        array[row] = entries[key]
