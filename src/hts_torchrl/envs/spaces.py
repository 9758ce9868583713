"""From Gymnasium spaces to this package's records."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from hts_torchrl.config import ActionSpec, ArraySpec, EnvSpec, Key
from hts_torchrl.envs.joined_action import joined
from hts_torchrl.errors import ConfigurationError


def env_spec(observation_space: spaces.Space, action_space: spaces.Space) -> EnvSpec:  # type: ignore[type-arg]
    """Describe one environment by its two spaces.

    A dictionary space gives one key for each entry; every other space has the key ``observation``.
    The parts of a ``Dict`` or ``Tuple`` action space, nested or not, make one action together.

    Args:
        observation_space: of a single environment.
        action_space: of the same.

    Raises:
        ConfigurationError: if a space is neither box, discrete, multi-discrete, multi-binary nor
            (for observations) a dictionary of those.
    """
    observations: dict[Key, ArraySpec] = {}
    if isinstance(observation_space, spaces.Dict):
        for name, space in observation_space.spaces.items():
            observations[str(name)] = _array_spec(space, f"observation {name!r}")
    else:
        observations["observation"] = _array_spec(observation_space, "observation")
    return EnvSpec(observations, _action_spec(action_space))


def _array_spec(space: spaces.Space, what: str) -> ArraySpec:  # type: ignore[type-arg]
    supported = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(space, supported) or space.shape is None or space.dtype is None:
        nested = isinstance(space, spaces.Dict | spaces.Tuple)
        hint = "; gymnasium.wrappers.FlattenObservation makes it a Box" if nested else ""
        raise ConfigurationError(
            f"the {what} space {in_one_line(space)} is not supported; Box, Discrete, "
            f"MultiDiscrete, MultiBinary and (for observations) a flat Dict of these are{hint}"
        )
    if 0 in space.shape:
        raise ConfigurationError(f"the {what} space {in_one_line(space)} has no elements")
    return ArraySpec(tuple(space.shape), np.dtype(space.dtype))


def in_one_line(space: object) -> str:
    """Describe a space; the bounds of an array would take several lines."""
    return " ".join(str(space).split())


def _action_spec(space: spaces.Space) -> ActionSpec:  # type: ignore[type-arg]
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return joined({key: action_of(part) for key, part in leaves_of(space).items()})
    return action_of(space)


def leaves_of(space: spaces.Dict | spaces.Tuple) -> dict[Key, spaces.Space]:  # type: ignore[type-arg]
    """Return the spaces within a ``Dict`` or ``Tuple``, at whatever depth, in their order.

    They have the names that TorchRL's ``GymWrapper`` gives those of a ``Dict``, such as ``gear`` or
    ``("arm", "grip")``; the number of a place in a ``Tuple`` is a name.
    """
    named = space.spaces if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
    leaves: dict[Key, spaces.Space] = {}  # type: ignore[type-arg]
    for name, part in named.items():
        if isinstance(part, spaces.Dict | spaces.Tuple):
            for key, leaf in leaves_of(part).items():
                leaves[str(name), *((key,) if isinstance(key, str) else key)] = leaf
        else:
            leaves[str(name)] = part
    return leaves


def action_of(space: spaces.Space) -> ActionSpec:  # type: ignore[type-arg]
    """Describe an action space that is neither ``Dict`` nor ``Tuple``.

    Raises:
        ConfigurationError: if it is not supported.
    """
    array = _array_spec(space, "action")
    integers = ArraySpec(array.shape, np.dtype(np.int64))
    match space:
        case spaces.Discrete():
            return ActionSpec("discrete", integers, (int(space.n),))
        case spaces.MultiDiscrete() if len(space.shape) == 1:
            return ActionSpec("multi_discrete", integers, tuple(int(n) for n in space.nvec))
        case spaces.MultiBinary() if len(array.shape) == 1:
            return ActionSpec("multi_discrete", integers, (2,) * array.shape[0])
        case spaces.Box() if np.issubdtype(array.dtype, np.floating):
            low, high = space.low.astype(np.float32), space.high.astype(np.float32)
            if not (low <= high).all():  # which NaN is not either
                raise ConfigurationError(
                    f"the action space {in_one_line(space)} has bounds that are not numbers"
                )
            spec = ArraySpec(array.shape, np.dtype(np.float32))
            return ActionSpec("continuous", spec, low=low, high=high)
    raise ConfigurationError(
        f"the action space {in_one_line(space)} is not supported; Discrete, a flat MultiDiscrete "
        "or MultiBinary and a Box of floats are: gymnasium.wrappers.TransformAction turns one into "
        "another"
    )
