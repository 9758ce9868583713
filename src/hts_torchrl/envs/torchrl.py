"""TorchRL environments as a group. The only environment module that imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch.nn.functional import one_hot
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import EnvBase, StepCounter, TransformedEnv

from hts_torchrl.envs.group import (
    Observation,
    Transition,
    called,
    close_each,
    require_alike,
    require_apart,
)
from hts_torchrl.envs.joined_action import joined, split
from hts_torchrl.envs.layers import is_a, layers_of
from hts_torchrl.envs.observed import as_declared, as_reward, observing, require_known
from hts_torchrl.envs.own_generators import TORCH, OwnGenerators
from hts_torchrl.envs.spaces import in_one_line, several_choices
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import ActionSpec, Array, ArraySpec, EnvSpec, Key, MemorySpec

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
                rows.append(self._entries(tensordict))
        return {key: np.stack([row[key] for row in rows]) for key in self.spec.observations}

    def _entries(self, tensordict: Any) -> Observation:  # noqa: ANN401
        entries: Observation = {}
        for key, spec in self.spec.observations.items():
            tensor = tensordict.get(key, None)
            array = None if tensor is None else tensor.cpu().numpy()
            entries[key] = as_declared(key, array, spec).astype(spec.dtype, copy=False)
            require_known(key, entries[key][None], spec)
        return entries

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
        reward = step.get(self._reward_keys[row], None)
        with observing("step", self.indices[row]):
            return as_reward(None if reward is None else reward.cpu().numpy())

    def render(self) -> Array:
        """Return the first environment's picture, from its ``pixels`` key.

        Raises:
            ConfigurationError: if it observes none.
        """
        if (pixels := self._act_on[0].get("pixels", None)) is None:
            raise ConfigurationError(
                "the environment observes no 'pixels', so there are no pictures of it: "
                "GymEnv(..., from_pixels=True, pixels_only=False) adds them"
            )
        return np.asarray(pixels.cpu())

    def close(self) -> None:
        """Close every environment."""
        envs = zip(self.indices, self.envs, strict=True)
        close_each({index: env for index, env in envs if not env.is_closed})


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


def spec_of_one(env: EnvBase) -> EnvSpec:
    """Return what one environment observes and accepts, also where ``env`` is a batch of them.

    Raises:
        ConfigurationError: if it is not supported.
    """
    _require_one_game(env)
    primers = [layer for layer in layers_of(env) if is_a(layer, "torchrl.TensorDictPrimer")]
    if primers and env.batch_size:
        raise ConfigurationError(
            "a TensorDictPrimer of a batch: leave it out where a module of the policy has it, as "
            "torchrl's LSTMModule and GRUModule do, or give it to each environment"
        )
    filled = {key: value for primer in primers for key, value in primer_values(primer)}
    observations = {
        key: _observation_spec(key, spec)
        for key, spec in env.observation_spec_unbatched.items(include_nested=True, leaves_only=True)
        if not isinstance(spec, Composite) and key not in filled
    }
    action = _action_spec(env)
    if action.mask_key in env.state_spec.keys(include_nested=True):
        raise ConfigurationError(
            f"{action.mask_key!r} is in the state_spec, of which torchrl's step_mdp hands on what "
            "was before the step: it is needed in the observation_spec"
        )
    if action.mask is not None and action.mask not in observations:
        raise ConfigurationError(
            f"an ActionMask reads {action.mask!r}, which is none of the observations "
            f"{sorted(map(str, observations))}: policies need it there, under that name"
        )
    return EnvSpec(observations, action, MemorySpec(filled))


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


def _require_one_game(env: EnvBase) -> None:
    """Refuse several rewards or ends in a step.

    Raises:
        ConfigurationError: naming the spec.
    """
    rewards = env.full_reward_spec_unbatched
    sizes = {str(key): list(rewards[key].shape) for key in env.reward_keys}
    if [math.prod(size) for size in sizes.values()] != [1]:
        raise ConfigurationError(
            f"the rewards of a step have the shapes {sizes}, but one number is needed: torchrl's "
            "LineariseRewards weighs several objectives [n] into one, and rewards of several "
            "agents must be added up by the environment"
        )
    ends = env.full_done_spec_unbatched
    several = [k for k in env.done_keys if not isinstance(k, str) or math.prod(ends[k].shape) != 1]
    if several:
        raise ConfigurationError(
            f"{several} end for several agents apart, but one 'done' of one element is needed"
        )
    if not {"done", "terminated"} <= {*env.done_keys}:
        raise ConfigurationError(
            f"the keys of its done_spec are {sorted(env.done_keys)}, but 'done' and 'terminated' "
            "are needed"
        )


def primer_values(primer: Any) -> Iterator[tuple[Key, Array]]:  # noqa: ANN401
    """Yield key and value of what a ``TensorDictPrimer`` fills where an episode begins.

    Raises:
        ConfigurationError: if the values are drawn, or made by a function.
    """
    if primer.random:
        raise ConfigurationError(
            "a TensorDictPrimer with random=True draws what a trajectory begins with, and the "
            "run's seed would not decide it: give it a default_value"
        )
    default: Any = primer.default_value
    for key, spec in primer.primers.items(include_nested=True, leaves_only=True):
        per_key = isinstance(default, dict | TensorDictBase)
        yield key, _filled(key, spec, default[key] if per_key else default)


def _filled(key: Key, spec: TensorSpec, value: Any) -> Array:  # noqa: ANN401
    if callable(value):
        raise ConfigurationError(
            f"a TensorDictPrimer fills {key!r} by a function, which may return other values in "
            "other workers: give it a number or a tensor as default_value"
        )
    dtype = torch.float32 if spec.dtype == torch.bfloat16 else spec.dtype  # numpy has none
    array: Array = torch.as_tensor(value, dtype=dtype).expand(spec.shape).contiguous().numpy()
    return array


def _array_spec(spec: TensorSpec) -> ArraySpec:
    if spec.dtype is None or -1 in spec.shape or isinstance(spec, NonTensor):
        raise ConfigurationError(f"the spec {in_one_line(spec)} is not of a tensor of fixed shape")
    if spec.dtype == torch.bfloat16:
        raise ConfigurationError(
            "the spec is of bfloat16, a type that arrays of numpy lack: torchrl's "
            "DTypeCastTransform(torch.bfloat16, torch.float32) turns it into another"
        )
    return ArraySpec(tuple(spec.shape), torch.empty((), dtype=spec.dtype).numpy().dtype)


def _observation_spec(key: Key, spec: TensorSpec) -> ArraySpec:
    try:
        array = _array_spec(spec)
    except ConfigurationError as error:
        raise ConfigurationError(f"observation {key!r}: {error}") from None
    match spec:
        case MultiCategorical() if spec.nvec.shape == spec.shape:  # which is a Categorical too
            return replace(array, choices=tuple(range(int(n)) for n in spec.nvec.flatten()))
        case Categorical() if not isinstance(spec, MultiCategorical | Binary):
            number = int(spec.space.n)  # -1 if it is not known
            if number > 0 and spec.dtype != torch.bool:
                return replace(array, choices=(range(number),) * spec.shape.numel())
    return array


def _action_spec(env: EnvBase) -> ActionSpec:
    if len(env.action_keys) != 1:
        return joined(_parts_of(env))
    key = env.action_key
    masks = [layer.in_keys for layer in layers_of(env) if is_a(layer, "torchrl.ActionMask")]
    mask = next((mask for masked, mask in masks if masked == key), None)
    return replace(_action_of(env.full_action_spec_unbatched[key]), key=key, mask=mask)


def _parts_of(env: EnvBase) -> dict[Key, ActionSpec]:
    """Return what one environment accepts under each key of actions."""
    return {key: _action_of(spec) for key, spec in _action_specs(env).items()}


def _action_specs(env: EnvBase) -> dict[Key, TensorSpec]:
    specs = env.full_action_spec_unbatched
    return {key: specs[key] for key in env.action_keys}


def action_maker(env: EnvBase) -> Callable[[Array], dict[Key, torch.Tensor]]:
    """Return what turns answers of the policy into what an environment reads, by its keys.

    Args:
        env: one environment, which is given one answer, or a batch, which is given a batch.
    """
    specs, parts = _action_specs(env), _parts_of(env)

    def actions_of(answer: Array) -> dict[Key, torch.Tensor]:
        apart = [answer] if len(parts) == 1 else split(answer, [*parts.values()])
        each = zip(parts.items(), specs.values(), apart, strict=True)
        return {key: _env_action(part, spec, action) for (key, part), spec, action in each}

    return actions_of


def _env_action(part: ActionSpec, spec: TensorSpec, action: Array) -> torch.Tensor:
    tensor = torch.tensor(action)  # a copy: the buffer is reused
    if part.kind != "multi_discrete":
        return tensor
    batch = tensor.shape[:-1]
    match spec:
        case OneHot():
            choices = zip(tensor.unbind(-1), part.sizes, strict=True)
            tensor = torch.cat([one_hot(choice, size) for choice, size in choices], -1)
        case Bounded():
            tensor += spec.space.low.flatten()
    return tensor.reshape(*batch, *spec.shape).to(spec.dtype)


def _action_of(spec: TensorSpec) -> ActionSpec:
    """Describe an action under one key; several choices are flat, whatever the spec's shape."""
    match spec:
        case MultiOneHot():  # which is a OneHot too
            return several_choices([*spec.nvec] * spec.shape[:-1].numel())
        case OneHot() if spec.shape[:-1].numel() == 1:
            return ActionSpec("one_hot", _array_spec(spec), (int(spec.n),))
        case OneHot():
            return several_choices([int(spec.n)] * spec.shape[:-1].numel())
        case MultiCategorical():  # which is a Categorical too
            return several_choices(spec.nvec.flatten(), _array_spec(spec).dtype)
        case Binary():
            return several_choices([2] * spec.shape.numel(), _array_spec(spec).dtype)
        case Categorical() if spec.ndim:
            sizes = [int(spec.n)] * spec.shape.numel()
            return several_choices(sizes, _array_spec(spec).dtype)
        case Categorical():
            return ActionSpec("discrete", _array_spec(spec), (int(spec.n),))
        case Bounded() | Unbounded() if spec.dtype.is_floating_point:
            array = _array_spec(spec)
            low = spec.space.low.numpy() if isinstance(spec, Bounded) else None
            high = spec.space.high.numpy() if isinstance(spec, Bounded) else None
            return ActionSpec("continuous", array, low=low, high=high)
        case Bounded():
            bounds = zip(spec.space.low.flatten(), spec.space.high.flatten(), strict=True)
            return several_choices(int(high) - int(low) + 1 for low, high in bounds)
    raise ConfigurationError(
        f"the action spec {in_one_line(spec)} is not supported; OneHot, Categorical, "
        "MultiOneHot, MultiCategorical, Binary, Bounded, and Unbounded of floats are"
    )
