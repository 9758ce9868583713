"""From Gymnasium spaces to this package's records of observations and actions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from hts_torchrl.envs.joined_action import joined
from hts_torchrl.envs.layers import is_a
from hts_torchrl.errors import ConfigurationError, in_one_line
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec, Key

_INTEGERS = np.dtype(np.int64)

Path: TypeAlias = tuple[Any, ...]
"""Names in ``Dict`` spaces and places in ``Tuple`` spaces, one within the other."""


def env_spec(observation_space: spaces.Space, action_space: spaces.Space) -> EnvSpec:  # type: ignore[type-arg]
    """Describe one environment by its two spaces.

    Each part of a ``Dict`` or ``Tuple`` observation space, nested or not, has a key of its own.
    Every other space has the key ``observation``. The parts of such an action space make one
    action together.

    Raises:
        ConfigurationError: if a space, or a part of it, is neither box, discrete, multi-discrete
            nor multi-binary.
    """
    observations: dict[Key, ArraySpec] = {}
    for path, leaf in leaves_of(observation_space).items():
        key = key_of(path)
        if key in observations:
            raise ConfigurationError(f"two parts of the observation space have the key {key!r}")
        observations[key] = _observation_spec(
            leaf, f"observation {key!r}" if path else "observation"
        )
    return EnvSpec(observations, _action_spec(action_space))


def _array_spec(space: spaces.Space, what: str) -> ArraySpec:  # type: ignore[type-arg]
    if is_a(space, "gym.Space"):
        raise ConfigurationError(
            f"the {what} space {in_one_line(space)} is of the old Gym; gymnasium.spaces is needed"
        )
    supported = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(space, supported) or space.shape is None or space.dtype is None:
        part = what.startswith("observation ")
        raise ConfigurationError(
            f"the {what} space {in_one_line(space)} is not supported; Box, Discrete, "
            "MultiDiscrete, MultiBinary, and Dict and Tuple of these are"
            f"{'; gymnasium.wrappers.FilterObservation leaves parts out' if part else ''}"
        )
    if 0 in space.shape:
        raise ConfigurationError(f"the {what} space {in_one_line(space)} has no elements")
    # torch knows no other order of bytes than the machine's
    return ArraySpec(tuple(space.shape), np.dtype(space.dtype).newbyteorder("="))


def _observation_spec(space: spaces.Space, what: str) -> ArraySpec:  # type: ignore[type-arg]
    array = _array_spec(space, what)
    if array.dtype.itemsize > 8:
        raise ConfigurationError(
            f"the {what} space {in_one_line(space)} is of {array.dtype}, which torch lacks; "
            "float64 or less is needed: gymnasium.wrappers.DtypeObservation turns it into that"
        )
    match space:
        case spaces.Discrete():
            return replace(array, choices=(_choices(space.start, space.n),))
        case spaces.MultiDiscrete():
            each = zip(space.start.flat, space.nvec.flat, strict=True)
            return replace(array, choices=tuple(_choices(*pair) for pair in each))
    return array


def _choices(start: Any, number: Any) -> range:  # noqa: ANN401 - integers of numpy's
    return range(int(start), int(start) + int(number))


def _action_spec(space: spaces.Space) -> ActionSpec:  # type: ignore[type-arg]
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return joined({key_of(path): action_of(leaf) for path, leaf in leaves_of(space).items()})
    return action_of(space)


def leaves_of(space: spaces.Space[Any], path: Path = ()) -> dict[Path, spaces.Space[Any]]:
    """Return the spaces within a ``Dict`` or ``Tuple``, at whatever depth, in their order.

    Args:
        space: any other is its one leaf.
        path: of the space itself.
    """
    parts: Iterable[tuple[Any, spaces.Space[Any]]]
    match space:
        case spaces.Dict():
            parts = space.spaces.items()
        case spaces.Tuple():
            parts = enumerate(space.spaces)
        case _:
            return {path: space}
    found = [leaves_of(part, (*path, name)) for name, part in parts]
    return {place: leaf for leaves in found for place, leaf in leaves.items()}


def key_of(path: Path) -> Key:
    """Return the name that a leaf has in a TensorDict: ``gear``, or ``("arm", "grip")``.

    Those of a ``Dict`` are named as by TorchRL's ``GymWrapper``; the number of a place in a
    ``Tuple`` is a name.
    """
    names = tuple(map(str, path))
    if len(names) > 1:
        return names
    return names[0] if names else "observation"


def action_of(space: spaces.Space) -> ActionSpec:  # type: ignore[type-arg]
    """Describe an action space that is neither ``Dict`` nor ``Tuple``.

    Several choices are flat, in C order, whatever the shape of the space.

    Raises:
        ConfigurationError: if it is not supported.
    """
    array = _array_spec(space, "action")
    match space:
        case spaces.Discrete():
            integers = ArraySpec((), _INTEGERS)
            return ActionSpec("discrete", integers, (int(space.n),))
        case spaces.MultiDiscrete():
            return several_choices(space.nvec.flat)
        case spaces.MultiBinary():
            return several_choices([2] * math.prod(array.shape))
        case spaces.Box() if np.issubdtype(array.dtype, np.floating):
            with np.errstate(over="ignore"):  # what float32 does not reach is no bound
                low, high = space.low.astype(np.float32), space.high.astype(np.float32)
            if not (low <= high).all():  # which NaN is not either
                raise ConfigurationError(
                    f"the action space {in_one_line(space)} has bounds that are not numbers"
                )
            spec = ArraySpec(array.shape, np.dtype(np.float32))
            return ActionSpec("continuous", spec, low=low, high=high)
        case spaces.Box() if space.is_bounded():
            bounds = zip(space.low.flat, space.high.flat, strict=True)
            return several_choices(int(high) - int(low) + 1 for low, high in bounds)
    raise ConfigurationError(
        f"the action space {in_one_line(space)} is not supported; Discrete, MultiDiscrete, "
        "MultiBinary, a Box of floats and a bounded Box of integers are: "
        "gymnasium.wrappers.TransformAction turns one into another"
    )


def several_choices(sizes: Iterable[int], dtype: np.dtype[Any] = _INTEGERS) -> ActionSpec:
    """Return the action of several choices, of so many each."""
    each = tuple(map(int, sizes))
    return ActionSpec("multi_discrete", ArraySpec((len(each),), dtype), each)
