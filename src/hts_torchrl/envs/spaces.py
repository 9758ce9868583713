"""From Gymnasium spaces to this package's records."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from hts_torchrl.config import ActionSpec, ArraySpec, EnvSpec, Key
from hts_torchrl.errors import ConfigurationError


def env_spec(observation_space: spaces.Space, action_space: spaces.Space) -> EnvSpec:  # type: ignore[type-arg]
    """Describe one environment by its two spaces.

    A dictionary space gives one key for each entry; every other space has the key ``observation``.

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
        raise ConfigurationError(
            f"the {what} space {space} is not supported; Box, Discrete, MultiDiscrete, "
            "MultiBinary and (for observations) a flat Dict of these are"
        )
    return ArraySpec(tuple(space.shape), np.dtype(space.dtype))


def _action_spec(space: spaces.Space) -> ActionSpec:  # type: ignore[type-arg]
    array = _array_spec(space, "action")
    match space:
        case spaces.Discrete():
            return ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (int(space.n),))
        case spaces.MultiDiscrete() if len(space.shape) == 1:
            sizes = tuple(int(n) for n in space.nvec)
            return ActionSpec("multi_discrete", ArraySpec(array.shape, np.dtype(np.int64)), sizes)
        case spaces.Box() if np.issubdtype(array.dtype, np.floating):
            low, high = space.low.astype(np.float32), space.high.astype(np.float32)
            spec = ArraySpec(array.shape, np.dtype(np.float32))
            return ActionSpec("continuous", spec, low=low, high=high)
    raise ConfigurationError(
        f"the action space {space} is not supported; Discrete, a flat MultiDiscrete and a Box of "
        "floats are"
    )
