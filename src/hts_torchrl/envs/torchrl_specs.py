"""From TorchRL's specs to this package's records, and back. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

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
from torchrl.envs import EnvBase

from hts_torchrl.envs.joined_action import joined, split
from hts_torchrl.envs.layers import is_a, layers_of
from hts_torchrl.envs.spaces import several_choices
from hts_torchrl.errors import ConfigurationError, in_one_line
from hts_torchrl.specs import ActionSpec, Array, ArraySpec, EnvSpec, Key, MemorySpec

_REFUSED = {
    "AsyncEnvPool": "an AsyncEnvPool takes no seed: a SerialEnv or a ParallelEnv does",
    "AutoResetTransform": "an AutoResetTransform (auto_reset=True) takes games that the "
    "environment begins itself, but each game begins with a seed here, and TorchRL does not keep "
    "its last observation: leave it out, so that reset() begins it",
    "MultiThreadedEnvWrapper": "EnvPool takes seeds only when it is made, so that all executors "
    "would play the same games: hts_torchrl.EnvPoolEnvs('CartPole-v1') makes it",
    "VecGymEnvTransform": "a vector environment in TorchRL's GymEnv(num_envs=...) or GymWrapper "
    "begins games itself, and TorchRL may lose their last observations: give the vector "
    "environment itself, or one with AutoresetMode.DISABLED",
}
"""By class of TorchRL's: what has no seed, or loses the ends of its games."""


def spec_of_one(env: EnvBase) -> EnvSpec:
    """Return what one environment observes and accepts, also where ``env`` is a batch of them.

    Raises:
        ConfigurationError: if it is not supported.
    """
    layers = [*layers_of(env)]
    for name, reason in _REFUSED.items():
        if any(is_a(layer, f"torchrl.{name}") for layer in layers):
            raise ConfigurationError(reason)
    if any(map(_records_without_end, layers)):
        raise ConfigurationError(
            "a VideoRecorder keeps every image until dump(), which nobody calls where environments "
            "are: give it dump_on_done=True or max_frames, or leave it out"
        )
    _require_one_game(env)
    primers = [layer for layer in layers if is_a(layer, "torchrl.TensorDictPrimer")]
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


def _records_without_end(layer: Any) -> bool:  # noqa: ANN401
    ends = ("dump_on_done", "max_frames")
    return is_a(layer, "torchrl.VideoRecorder") and not any(getattr(layer, e, None) for e in ends)


def _require_one_game(env: EnvBase) -> None:
    """Refuse several rewards or ends in a step."""
    rewards = env.full_reward_spec_unbatched
    sizes = {str(key): list(rewards[key].shape) for key in env.reward_keys}
    if [math.prod(size) for size in sizes.values()] != [1]:
        raise ConfigurationError(
            f"the rewards of a step have the shapes {sizes}, but one number is needed: torchrl's "
            "LineariseRewards weighs several objectives [n] into one, and rewards of several "
            "agents must be added up by the environment"
        )
    _array_spec(rewards[env.reward_key])
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
            f"a {type(primer).__name__} with random=True draws what a trajectory begins with, and "
            "the run's seed would not decide it: a TensorDictPrimer with a default_value is needed"
        )
    default: Any = primer.default_value
    for key, spec in primer.primers.items(include_nested=True, leaves_only=True):
        value = default[key] if isinstance(default, dict | TensorDictBase) else default
        if callable(value):
            raise ConfigurationError(
                f"a TensorDictPrimer fills {key!r} by a function, which may return other values in "
                "other workers: give it a number or a tensor as default_value"
            )
        dtype = torch.float32 if spec.dtype == torch.bfloat16 else spec.dtype  # numpy has none
        filled = torch.as_tensor(value, dtype=dtype, device="cpu").expand(spec.shape)
        yield key, filled.contiguous().numpy()


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
    specs = env.full_action_spec_unbatched
    if len(env.action_keys) != 1:
        return joined({key: _action_of(specs[key]) for key in env.action_keys})
    key = env.action_key
    masks = [layer.in_keys for layer in layers_of(env) if is_a(layer, "torchrl.ActionMask")]
    mask = next((mask for masked, mask in masks if masked == key), None)
    return replace(_action_of(specs[key]), key=key, mask=mask)


def action_maker(env: EnvBase) -> Callable[[Array], dict[Key, torch.Tensor]]:
    """Return what turns answers of the policy into what an environment reads, by its keys.

    Args:
        env: one environment, which is given one answer, or a batch, which is given a batch.
    """
    all_specs = env.full_action_spec_unbatched
    specs = {key: all_specs[key] for key in env.action_keys}
    parts = [_action_of(spec) for spec in specs.values()]

    def actions_of(answer: Array) -> dict[Key, torch.Tensor]:
        apart = [answer] if len(parts) == 1 else split(answer, parts)
        each = zip(specs.items(), parts, apart, strict=True)
        return {key: _env_action(part, spec, action) for (key, spec), part, action in each}

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
            tensor += spec.space.low.flatten().cpu()
    return tensor.reshape(*batch, *spec.shape).to(spec.dtype)


def _action_of(spec: TensorSpec) -> ActionSpec:
    """Describe an action under one key; several choices are flat, whatever the spec's shape."""
    match spec:
        case MultiOneHot():  # which is a OneHot too
            return several_choices([*spec.nvec] * spec.shape[:-1].numel())
        case OneHot() if spec.ndim == 1:
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
            low = spec.space.low.cpu().numpy() if isinstance(spec, Bounded) else None
            high = spec.space.high.cpu().numpy() if isinstance(spec, Bounded) else None
            return ActionSpec("continuous", array, low=low, high=high)
        case Bounded():
            bounds = zip(spec.space.low.flatten(), spec.space.high.flatten(), strict=True)
            return several_choices(int(high) - int(low) + 1 for low, high in bounds)
    raise ConfigurationError(
        f"the action spec {in_one_line(spec)} is not supported; OneHot, Categorical, "
        "MultiOneHot, MultiCategorical, Binary, Bounded, and Unbounded of floats are"
    )


def tensor_spec_of(action: ActionSpec, *batch_size: int) -> TensorSpec:
    """Return the spec of one action, or of a batch; unbounded for choices and numbers together."""
    shape = (*batch_size, *action.array.shape)
    match action.kind:
        case "discrete":
            return Categorical(action.sizes[0], shape=shape)
        case "one_hot":
            return OneHot(action.sizes[0], shape=shape)
        case "multi_discrete":
            return MultiCategorical(action.sizes, shape=shape)
    if action.kind == "mixed" or action.low is None or action.high is None:
        return Unbounded(shape, dtype=getattr(torch, action.array.dtype.name))
    low, high = (torch.as_tensor(bound).expand(shape) for bound in (action.low, action.high))
    return Bounded(low, high, shape=shape, dtype=low.dtype)
