"""A Gymnasium vector environment, however it resets, in a group that resets within the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from hts_torchrl.envs.action_maker import action_maker
from hts_torchrl.envs.adapter import EnvAdapter, Step, spec_of, store
from hts_torchrl.envs.group import Observation
from hts_torchrl.envs.layers import is_a, layers_of
from hts_torchrl.envs.observed import (
    DeclaredSpace,
    Undeclared,
    array_of,
    as_flag,
    as_reward,
    called,
    kind_of,
)
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import Array

_INSTEAD = {"AtariVectorEnv": "; hts_torchrl.AtariEnvs('pong') makes ale-py's own"}


class VectorAdapter(EnvAdapter):
    """A Gymnasium vector environment.

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
        space, action_space = envs.single_observation_space, envs.single_action_space
        super().__init__(envs, [*indices], spec_of(envs, indices[0], space, action_space))
        self._action_of = action_maker(action_space)
        self._one = DeclaredSpace(space, self.spec.observations)
        self._batch = DeclaredSpace(space, self.declared)
        self._ends = np.zeros(envs.num_envs, bool)
        self._last: Observation = {}
        """What the last step led to, also where the episode ended; then in memory of its own."""
        self._following: Observation = {}
        """What it returned."""

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Seed and reset every environment; without seeds, those whose episode has ended.

        Raises:
            ConfigurationError: if the vector environment takes no list of seeds.
        """
        if not seeds:
            return self._following if self._resets_itself else self._reset_ended()
        try:
            with self._resetting:
                observation, _ = self.env.reset(seed=list(seeds))
                return self._batch.entries(observation)
        except (gymnasium.error.Error, TypeError) as error:
            if isinstance(error, TypeError) and "seed" not in str(error):
                raise
            raise ConfigurationError(
                f"reset(seed=[...]) of environments {self.indices}: {error}; it must take a list "
                "with a seed for each, as that of make_vec(..., vectorization_mode='sync') does"
                f"{_INSTEAD.get(type(self.env.unwrapped).__name__, '')}"
            ) from error

    def _reset_ended(self) -> Observation:
        """Reset the environments whose episode ended, and return what all of them observe."""
        ends = self._ends
        try:
            with self._resetting:
                observation, _ = self.env.reset(options={"reset_mask": ends.copy()})
                following = self._batch.entries(observation)
        except ValueError as error:
            if "reset_mask" not in str(error):
                raise
            raise ConfigurationError(
                f"environments {self.indices} cannot be reset one by one: {error} Wrap each single "
                "environment instead"
            ) from error
        for key, array in following.items():
            # In any bit, of which NaN has some too.
            if array[~ends].tobytes() != self._last[key][~ends].tobytes():
                raise ConfigurationError(
                    f"reset(options={{'reset_mask': ...}}) of environments {self.indices} changed "
                    "those whose episode goes on: the vector environment must heed the mask, be "
                    "made with autoreset_mode=AutoresetMode.SAME_STEP, or have one environment"
                )
        return following

    def step(self, action: Array) -> Step:
        """Step all environments at once."""
        with self._stepping:
            returned = self.env.step(self._action_of(action))
            observation, reward, terminated, truncated, info = returned
            self._last = self._following = self._batch.entries(observation)
            terminated = self._of_each("terminated", terminated, "b")
            truncated = self._of_each("truncated", truncated, "b")
            reward = self._of_each("the reward", reward, "biuf")
        self._ends = terminated | truncated
        if self._ends.any():
            self._last = {key: array.copy() for key, array in self._following.items()}
            if self._resets_itself:
                for row in np.flatnonzero(self._ends).tolist():
                    with called("step", self.indices[row]):
                        store(self._one.entries(_last_of(info, row)), self._last, row)
        return self._last, reward, reward, terminated, truncated

    def _of_each(self, name: str, values: Any, kinds: str) -> Array:  # noqa: ANN401
        """Return one number or flag of each environment; those of ``kinds`` as they are."""
        array = array_of(values)
        if array.shape[:1] != (len(self.indices),):
            raise Undeclared(
                f"{name} is {kind_of(array)}, but one is needed for each of "
                f"{len(self.indices)} environments"
            )
        if array.ndim == 1 and array.dtype.kind in kinds:
            return array
        return np.array([as_flag(name, e) if kinds == "b" else as_reward(e) for e in array])

    def render(self) -> Array:
        """Return the first environment's image."""
        frames = self.env.render()
        return np.asarray(None if frames is None else frames[0])


def _mode_of(envs: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return when a vector environment resets, if it can be a group."""
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
    if mode is not AutoresetMode.SAME_STEP and envs.num_envs > 1 and _sums_returns(envs):
        raise ConfigurationError(
            "gymnasium.wrappers.vector.NormalizeReward begins the returns of all environments anew "
            "where one is reset: make the vector environment with "
            "autoreset_mode=AutoresetMode.SAME_STEP, or wrap each single environment"
        )
    return mode


def _sums_returns(envs: VectorEnv[Any, Any, Any]) -> bool:
    """Return whether a wrapper of all environments keeps the return of each, not yet frozen."""
    return any(
        isinstance(layer, VectorEnv)
        and is_a(layer, "gymnasium.NormalizeReward")
        and getattr(layer, "update_running_mean", True)
        for layer in layers_of(envs)
    )


def _last_of(info: Any, row: int) -> Any:  # noqa: ANN401
    if not isinstance(info, dict):
        raise Undeclared(
            f"info is a {type(info).__name__}, but the last observation of an episode is needed as "
            "info['final_obs']: leave out gymnasium's DictInfoToList"
        )
    try:
        return info["final_obs"][row]
    except LookupError:  # in a dict of arrays, too
        raise Undeclared(
            "the last observation of an episode is missing: vector environments of Gymnasium give "
            "it as info['final_obs'], with an observation of each environment"
        ) from None
