"""TorchRL environments as groups. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torchrl.envs import EnvBase, StepCounter, TransformedEnv

from hts_torchrl.envs.group import (
    Observation,
    Transition,
    called,
    close_each,
    require_alike,
    require_apart,
)
from hts_torchrl.envs.layers import is_a, layers_of
from hts_torchrl.envs.observed import as_declared, as_reward, observing
from hts_torchrl.envs.own_generators import TORCH, OwnGenerators
from hts_torchrl.envs.torchrl_specs import action_maker, spec_of_one
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import Array, ArraySpec, Key

_NEVER = torch.zeros(1, dtype=torch.bool)


class EnvBaseGroup:
    """Unbatched TorchRL environments stepped one after another (a ``SeededGroup``)."""

    steps_per_seed = 0
    next_seed: Callable[[int], int | None] | None = None

    def __init__(self, envs: Sequence[EnvBase], indices: Sequence[int]) -> None:
        self.envs = list(envs)
        self.indices = list(indices)
        self.num_envs = len(self.envs)
        specs = {}
        for index, env in zip(self.indices, self.envs, strict=True):
            try:
                _require_reset(env)
                specs[index] = spec_of_one(env)
            except ConfigurationError as error:
                raise ConfigurationError(f"environment {index}: {error}") from None
        self.spec = require_alike(specs)
        inner = zip(self.indices, self.envs, strict=True)
        require_apart({index: _environments_in(env) for index, env in inner})
        self._actions_of = [action_maker(env) for env in self.envs]
        self._reward_keys = [env.reward_key for env in self.envs]
        self._act_on: list[Any] = []
        self._generators = [OwnGenerators(TORCH) for _ in self.envs]
        for env in self.envs:
            env.maybe_reset = lambda tensordict: tensordict  # once a game, which needs its seed

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Seed and reset every environment."""
        self._act_on = [None] * self.num_envs
        return self.restart(range(self.num_envs), seeds)

    def restart(self, rows: Sequence[int], seeds: Sequence[int]) -> Observation:
        """Seed and reset some environments."""
        for row, seed in zip(rows, seeds, strict=True):
            self._act_on[row] = None
            self._begin(row, int(seed))
        return self._arrays(self._act_on, "reset")

    def _begin(self, row: int, seed: int | None) -> None:
        """Begin a game, after the end of the last one if there was one."""
        env, last = self.envs[row], self._act_on[row]
        with called("reset", self.indices[row]), self._generators[row] as generators:
            if seed is not None:
                generators.seed(seed)
                env.set_seed(seed)
            self._act_on[row] = env.reset() if last is None else type(env).maybe_reset(env, last)

    def _arrays(self, tensordicts: Sequence[Any], call: str) -> Observation:
        rows = []
        for index, tensordict in zip(self.indices, tensordicts, strict=True):
            with observing(call, index):
                rows.append(_observed(tensordict, self.spec.observations))
        return {key: np.stack([row[key] for row in rows]) for key in self.spec.observations}

    def step(self, actions: Array) -> Transition:
        """Step each environment, and reset those whose episode ended."""
        stepped, following = [], []
        for row, env in enumerate(self.envs):
            tensordict = self._act_on[row]
            for key, action in self._actions_of[row](actions[row]).items():
                tensordict.set(key, action)
            with called("step_and_maybe_reset", self.indices[row]), self._generators[row]:
                done, acted_on = env.step_and_maybe_reset(tensordict)
            stepped.append(done.get("next"))
            following.append(acted_on)
        self._act_on = following
        reward = np.array([self._reward(row, step) for row, step in enumerate(stepped)], np.float32)
        terminated = np.array([step.get("terminated").any().item() for step in stepped])
        done = np.array([step.get("done").any().item() for step in stepped])
        cut = np.array([step.get("truncated", _NEVER).any().item() for step in stepped])
        after = self._arrays(stepped, "step")  # a reset may write the same memory again
        for row in np.flatnonzero(done).tolist():
            self._begin(row, None if self.next_seed is None else self.next_seed(row))
        return Transition(
            after, self._arrays(self._act_on, "reset"), reward, reward,
            terminated, done & (cut | ~terminated), done,
        )  # fmt: skip

    def _reward(self, row: int, step: Any) -> float:  # noqa: ANN401
        with observing("step", self.indices[row]):
            return as_reward(_array(step, self._reward_keys[row]))

    def render(self) -> Array:
        """Return the first environment's picture, from its ``pixels`` key."""
        return _pixels(self._act_on[0])

    def close(self) -> None:
        """Close every environment."""
        envs = zip(self.indices, self.envs, strict=True)
        close_each({index: env for index, env in envs if not env.is_closed})


class BatchedEnvGroup:
    """One TorchRL environment of batch size ``[G]`` (an ``EnvGroup``), such as a ``SerialEnv``.

    It is seeded as a whole, by the first environment's seed.

    Raises:
        ConfigurationError: if it is not a batch of as many environments as an executor has.
    """

    def __init__(self, env: EnvBase, indices: Sequence[int]) -> None:
        if tuple(env.batch_size) != (len(indices),):
            wanted = f"set envs_per_executor={env.batch_size.numel()}"
            raise ConfigurationError(
                f"a {type(env).__name__} has batch size {tuple(env.batch_size)}, but an executor "
                f"has {len(indices)} environments: "
                + (wanted if len(env.batch_size) == 1 else "give one with one dimension")
            )
        self.env = env
        self.indices = list(indices)
        self.num_envs = len(self.indices)
        with called("specs", self.indices):
            self.spec = spec_of_one(env)
        self._actions_of, self._reward_key = action_maker(env), env.reward_key
        self._declared = {
            key: replace(array, shape=(self.num_envs, *array.shape))
            for key, array in self.spec.observations.items()
        }
        self._act_on: Any = None
        self._generators = OwnGenerators(TORCH)
        env.maybe_reset = lambda tensordict: tensordict  # after its last step has been read

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Seed and reset all environments."""
        with called("reset", self.indices), self._generators:
            self._generators.seed(int(seeds[0]))
            self.env.set_seed(int(seeds[0]))
            self._act_on = self.env.reset()
        return self._arrays(self._act_on, "reset")

    def _arrays(self, tensordict: Any, call: str) -> Observation:  # noqa: ANN401
        with observing(call, self.indices):
            return _observed(tensordict, self._declared)

    def step(self, actions: Array) -> Transition:
        """Step all environments at once, and reset those whose episode ended."""
        for key, action in self._actions_of(actions).items():
            self._act_on.set(key, action)
        with called("step_and_maybe_reset", self.indices), self._generators:
            done, self._act_on = self.env.step_and_maybe_reset(self._act_on)
        step = done.get("next")
        reward = step.get(self._reward_key).cpu().numpy().reshape(-1).astype(np.float32)
        terminated, ends = (_array(step, key).reshape(-1).copy() for key in ("terminated", "done"))
        said = _array(step, "truncated")
        truncated = ends & ((np.False_ if said is None else said.reshape(-1)) | ~terminated)
        after = self._arrays(step, "step")
        if ends.any():
            after = {key: array.copy() for key, array in after.items()}  # a reset may write there
            with called("reset", self.indices), self._generators:
                self._act_on = type(self.env).maybe_reset(self.env, self._act_on)
        following = self._arrays(self._act_on, "reset")
        return Transition(after, following, reward, reward, terminated, truncated, ends)

    def render(self) -> Array:
        """Return the first environment's picture, from its ``pixels`` key."""
        return np.asarray(_pixels(self._act_on)[0])

    def close(self) -> None:
        """Close the environments."""
        if not self.env.is_closed:
            self.env.close()


def _observed(tensordict: Any, specs: Mapping[Key, ArraySpec]) -> Observation:  # noqa: ANN401
    return {key: as_declared(key, _array(tensordict, key), spec) for key, spec in specs.items()}


def _array(tensordict: Any, key: Any) -> Any:  # noqa: ANN401
    tensor = tensordict.get(key, None)
    return None if tensor is None else tensor.cpu().numpy()


def _pixels(tensordict: Any) -> Array:  # noqa: ANN401
    """Return what is observed as pictures; refuses an environment that observes none."""
    if (pixels := _array(tensordict, "pixels")) is None:
        raise ConfigurationError(
            "the environment observes no 'pixels', so there are no pictures of it: "
            "GymEnv(..., from_pixels=True, pixels_only=False) adds them"
        )
    return np.asarray(pixels)


def limited(env: EnvBase, most_steps: int) -> EnvBase:
    """Return an environment that counts its steps and truncates each game after so many.

    Args:
        env: which has no ``step_count`` yet.
        most_steps: of a game.

    Raises:
        ConfigurationError: if it counts its steps already.
    """
    if "step_count" in env.observation_spec.keys():  # noqa: SIM118 - a spec
        raise ConfigurationError(
            f"max_frames_per_traj={most_steps}, but the environment has a step_count already: set "
            "max_steps of its StepCounter"
        )
    return TransformedEnv(env, StepCounter(max_steps=most_steps))


def _environments_in(env: EnvBase) -> list[Any]:
    kinds = ("torchrl.EnvBase", "gymnasium.Env")
    return [layer for layer in layers_of(env) if any(is_a(layer, kind) for kind in kinds)]


def _require_reset(env: EnvBase) -> None:
    """Refuse an environment that hands out the first observation of a game it has begun itself.

    Raises:
        ConfigurationError: naming the transform that takes it for one.
    """
    if any(is_a(layer, "torchrl.AutoResetTransform") for layer in layers_of(env)):
        raise ConfigurationError(
            "an AutoResetTransform (auto_reset=True) takes games that the environment begins "
            "itself, but each game begins with a seed here: leave it out, so that reset() begins it"
        )
