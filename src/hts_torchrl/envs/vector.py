"""A Gymnasium vector environment, however it resets, as a group that resets within the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from hts_torchrl.envs.group import Observation, Transition
from hts_torchrl.envs.gym import spec_of, store
from hts_torchrl.envs.observed import DeclaredSpace, as_flag, as_reward, kind_of, observing
from hts_torchrl.envs.own_generators import OwnGenerators
from hts_torchrl.envs.spaces import action_maker
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import Array

_INSTEAD = {"AtariVectorEnv": "; hts_torchrl.AtariEnvs('pong') makes ale-py's own"}


class VectorGroup:
    """One Gymnasium vector environment (an :class:`EnvGroup`).

    One that resets itself within the step is taken as it is. Any other would reset in a further
    step, or not at all. So it is reset at once by ``options={"reset_mask": ...}``, in which only
    the environments whose episode ended take part: there is no step in which an action is ignored,
    and the others are not stepped.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], indices: Sequence[int]) -> None:
        if envs.num_envs != len(indices):
            raise ConfigurationError(
                f"the vector environment has {envs.num_envs} environments, but an executor has "
                f"{len(indices)}: set envs_per_executor={envs.num_envs}"
            )
        self._resets_itself = _mode_of(envs) is AutoresetMode.SAME_STEP
        self.envs = envs
        self.indices = list(indices)
        self.num_envs = envs.num_envs
        space, action_space = envs.single_observation_space, envs.single_action_space
        self.spec = spec_of(envs, self.indices[0], space, action_space)
        self._action_of = action_maker(action_space)
        self._declared = DeclaredSpace(space, self.spec.observations)
        self._batch = DeclaredSpace(
            space,
            {
                key: replace(array, shape=(self.num_envs, *array.shape))
                for key, array in self.spec.observations.items()
            },
        )
        self._generators = OwnGenerators()
        self._stepping = observing("step", self.indices)
        self._resetting = observing("reset", self.indices)

    def _flags(self, name: str, values: Any) -> Array:  # noqa: ANN401
        return self._of_each(name, values, "b", partial(as_flag, name))

    def _of_each(
        self,
        name: str,
        values: Any,  # noqa: ANN401
        kinds: str,
        as_one: Callable[[Any], float],
    ) -> Array:
        """Return one number or flag of each environment; those of ``kinds`` as they are.

        Raises:
            ConfigurationError: if there is another number of them.
        """
        array = np.asarray(values)
        if array.shape[:1] != (self.num_envs,):
            raise ConfigurationError(
                f"{name} is {kind_of(array)}, but one is needed for each of "
                f"{self.num_envs} environments"
            )
        as_it_is = array.ndim == 1 and array.dtype.kind in kinds
        return array if as_it_is else np.array([as_one(each) for each in array])

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Seed and reset every environment.

        Raises:
            ConfigurationError: if the vector environment takes no list of seeds.
        """
        many = [int(seed) for seed in seeds]
        try:
            with self._generators:
                self._generators.seed(many[0])
                observation, _ = self.envs.reset(seed=many)  # type: ignore[arg-type]
        except (gymnasium.error.Error, TypeError) as error:
            if isinstance(error, TypeError) and "seed" not in str(error):
                raise
            raise ConfigurationError(
                f"reset(seed=[...]) of environments {self.indices}: {error}; it must take a list "
                "with a seed for each, as that of make_vec(..., vectorization_mode='sync') does"
                f"{_INSTEAD.get(type(self.envs.unwrapped).__name__, '')}"
            ) from error
        with self._resetting:
            return self._batch.entries(observation)

    def step(self, actions: Array) -> Transition:
        """Step all environments at once, and reset those whose episode ended."""
        batch = self._action_of(actions)
        with self._generators:
            observation, reward, terminated, truncated, info = self.envs.step(batch)
        with self._stepping:
            following = self._batch.entries(observation)
            terminated = self._flags("terminated", terminated)
            truncated = self._flags("truncated", truncated)
            reward = self._of_each("the reward", reward, "biuf", as_reward)
        ends = terminated | truncated
        after = following
        if ends.any():
            after = {key: array.copy() for key, array in following.items()}
            if self._resets_itself:
                self._take_last(info, np.flatnonzero(ends).tolist(), after)
            else:  # which may clear the arrays that step returned
                reward, terminated, truncated = reward.copy(), terminated.copy(), truncated.copy()
                following = self._begin(ends, after)
        reward = reward.astype(np.float32)
        return Transition(after, following, reward, reward, terminated, truncated, ends)

    def _take_last(self, info: Any, ended: list[int], after: Observation) -> None:  # noqa: ANN401
        for row in ended:
            with observing("step", self.indices[row]):
                store(self._declared.entries(_last_of(info, row)), after, row)

    def _begin(self, ends: Array, before: Observation) -> Observation:
        """Reset the environments whose episode ended, and return what all of them observe.

        Raises:
            ConfigurationError: if others observe something else than before, or a wrapper takes no
                mask that leaves some out.
        """
        try:
            with self._generators:
                observation, _ = self.envs.reset(options={"reset_mask": ends.copy()})
        except ValueError as error:
            if "reset_mask" not in str(error):
                raise
            raise ConfigurationError(
                f"environments {self.indices} cannot be reset one by one: {error} Wrap each single "
                "environment instead"
            ) from error
        with self._resetting:
            following = self._batch.entries(observation)
        for key, array in following.items():
            # In any bit, of which NaN has some too.
            if array[~ends].tobytes() != before[key][~ends].tobytes():
                raise ConfigurationError(
                    f"reset(options={{'reset_mask': ...}}) of environments {self.indices} changed "
                    "those whose episode goes on: the vector environment must heed the mask, be "
                    "made with autoreset_mode=AutoresetMode.SAME_STEP, or have one environment"
                )
        return following

    def render(self) -> Array:
        """Return the first environment's picture."""
        frames = self.envs.render()
        if not frames:
            raise ConfigurationError("the vector environment renders nothing")
        return np.asarray(frames[0])

    def close(self) -> None:
        """Close the vector environment."""
        self.envs.close()


def _mode_of(envs: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return when a vector environment resets, if it can be a group.

    Raises:
        ConfigurationError: if it does not tell, or cannot be seeded or reset by a mask.
    """
    mode = envs.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise ConfigurationError(
            f"the vector environment does not tell when it resets: metadata['autoreset_mode'] is "
            f"{mode!r}, but a gymnasium.vector.AutoresetMode is needed"
        )
    if any(base.__module__.startswith("envpool.") for base in type(envs).__mro__):
        raise ConfigurationError(
            "EnvPool takes seeds only when it is made, so it cannot be seeded here: "
            "hts_torchrl.EnvPoolEnvs('CartPole-v1') makes it"
        )
    unwrapped = envs.unwrapped
    forgets = isinstance(unwrapped, AsyncVectorEnv) and not unwrapped.shared_memory
    if mode is AutoresetMode.NEXT_STEP and forgets:
        # Its workers do not notice the reset, and reset once more instead of the next step.
        raise ConfigurationError(
            "an AsyncVectorEnv with shared_memory=False that resets in the next step cannot be "
            "reset at once: make it with autoreset_mode=AutoresetMode.SAME_STEP"
        )
    return mode


def _last_of(info: Any, row: int) -> Any:  # noqa: ANN401
    if not isinstance(info, dict):
        raise ConfigurationError(
            f"info is a {type(info).__name__}, but the last observation of an episode is needed as "
            "info['final_obs']: leave out gymnasium's DictInfoToList"
        )
    if "final_obs" not in info:
        raise ConfigurationError(
            "the last observation of an episode is missing: vector environments of Gymnasium give "
            "it as info['final_obs']"
        )
    return info["final_obs"][row]
