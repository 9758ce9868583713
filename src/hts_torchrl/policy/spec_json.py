"""Observations and actions of an environment as JSON, for files and checkpoints, and back."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np

from hts_torchrl.specs import ActionKind, ActionSpec, Array, ArraySpec, EnvSpec, Key, path_of

# Which torch counts with a sign, in bytes.
_MOST_ELEMENTS = 2**58


def spec_as_json(spec: EnvSpec) -> dict[str, Any]:
    """Return observations and actions as values that JSON has."""
    action = spec.action
    mask = {} if action.mask is None else {"mask": list(path_of(action.mask))}
    return {
        "observations": [
            {"key": list(path_of(key)), **_array_as_json(array)}
            for key, array in spec.observations.items()
        ],
        "action": {
            "kind": action.kind,
            "key": list(path_of(action.key)),
            **_array_as_json(action.array),
            "sizes": list(action.sizes),
            "low": _bound_as_json(action.low),
            "high": _bound_as_json(action.high),
            **mask,
        },
    }


def spec_from_json(spec: dict[str, Any]) -> EnvSpec:
    """Return observations and actions from what :func:`spec_as_json` returned.

    Raises:
        ValueError: for what no environment has; other errors for what has another form.
    """
    observations = {_key(each["key"]): _array_from_json(each) for each in spec["observations"]}
    action, array = spec["action"], _array_from_json(spec["action"])
    kind, sizes = action["kind"], _sizes_from_json(action["sizes"])
    if kind not in get_args(ActionKind):
        raise ValueError(f"actions of kind {kind!r}")
    has_numbers = kind in ("continuous", "mixed")
    if (kind == "continuous") == bool(sizes) or (has_numbers and array.dtype.kind != "f"):
        raise ValueError(f"{kind} actions of {array} with {sizes} choices")
    numbers = array
    if kind == "mixed":
        if len(array.shape) != 1 or array.shape[0] <= len(sizes):
            raise ValueError(f"mixed actions of {array} with {len(sizes)} choices")
        numbers = ArraySpec((array.shape[0] - len(sizes),), array.dtype)
    low, high = (
        None if action[name] is None else _bound_from_json(action[name], numbers, infinity)
        for name, infinity in (("low", -np.inf), ("high", np.inf))
    )
    fits = low is high  # where both are None: of choices, and of TorchRL's Unbounded
    if low is not None and high is not None:
        fits = bool((low <= high).all())
    if not fits:
        raise ValueError(f"actions from {action['low']} to {action['high']}")
    key = _key(action.get("key", ["action"]))  # files of version 0.1 have none
    mask = _key(action["mask"]) if "mask" in action else None
    return EnvSpec(observations, ActionSpec(kind, array, sizes, low, high, key, mask=mask))


def _sizes_from_json(sizes: list[int]) -> tuple[int, ...]:
    if not all(type(size) is int and 0 < size < _MOST_ELEMENTS for size in sizes):
        raise ValueError(f"sizes {str(sizes)[:100]}")
    return tuple(sizes)


def _key(path: list[str]) -> Key:
    if not path or not all(isinstance(name, str) and name for name in path):
        raise ValueError(f"an entry named {path}")
    return path[0] if len(path) == 1 else tuple(path)


def _array_as_json(array: ArraySpec) -> dict[str, Any]:
    choices = [[each.start, each.stop] for each in array.choices]
    also = {"choices": choices} if choices else {}
    return {"shape": list(array.shape), "dtype": array.dtype.name, **also}


def _array_from_json(array: dict[str, Any]) -> ArraySpec:
    dtype = np.dtype(str(array["dtype"]))
    if dtype.kind not in "biuf":
        raise ValueError(f"numbers of type {dtype}")
    shape = _sizes_from_json(array["shape"])
    if math.prod(shape) >= _MOST_ELEMENTS:
        raise ValueError(f"the shape {str(shape)[:100]}")
    choices = tuple(range(*_ends_from_json(ends)) for ends in array.get("choices", []))
    if choices and len(choices) != math.prod(shape):
        raise ValueError(f"choices for {len(choices)} elements of {math.prod(shape)}")
    return ArraySpec(shape, dtype, choices)


def _ends_from_json(ends: list[int]) -> tuple[int, int]:
    start, stop = ends
    if not (type(start) is type(stop) is int and 0 < stop - start < _MOST_ELEMENTS):
        raise ValueError(f"choices from {str(start)[:100]} to {str(stop)[:100]}")
    return start, stop


def _bound_as_json(bound: Array | None) -> list[Any] | None:
    """Return numbers, with null for what is infinite, which JSON cannot say."""
    if bound is None:
        return None
    numbers = bound.astype(object)
    numbers[~np.isfinite(bound)] = None
    as_list: list[Any] = numbers.tolist()
    return as_list


def _bound_from_json(bound: list[Any], array: ArraySpec, infinity: float) -> Array:
    numbers = np.array(bound, array.dtype)  # null becomes NaN
    if numbers.shape != array.shape:
        raise ValueError(f"bounds of shape {numbers.shape} for actions of {array}")
    return np.where(np.isnan(numbers), array.dtype.type(infinity), numbers)
