"""A policy in one safetensors file: tensors and a description in JSON, nothing that could be run.

The header's metadata has, each as JSON, ``hts_torchrl`` (the version that wrote it), ``network``
(name of the trunk and ``squash``; null for a policy of the user's own), ``spec`` (observations and
actions) and ``about`` (for the reader alone: environment, updates).
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hts_torchrl.config import ActionKind, ActionSpec, ArraySpec, EnvSpec, Key
from hts_torchrl.durable_file import replacing
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.actor_critic import BUILT_IN_TRUNKS, make_actor_critic

# Which torch counts with a sign, in bytes.
_MOST_ELEMENTS = 2**58


def save_policy(
    policy: nn.Module,
    path: str | Path,
    *,
    spec: EnvSpec,
    network: str | None,
    squash: bool = False,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a policy's weights and what is needed to build its network again.

    Args:
        policy: whose ``state_dict`` is written.
        path: of the file; what was there is replaced when all of the new one is on the disk.
        spec: observations and actions of its environment.
        network: the name by which :func:`make_actor_critic` built it; None if it did not.
        squash: as :func:`make_actor_critic` was given it.
        about: further things to tell the reader, plain values.

    Raises:
        OSError: if it cannot be written; what was at ``path`` is still there.
    """
    built = None if network is None else {"name": network, "squash": squash}
    described = {
        "hts_torchrl": version("hts-torchrl"),
        "network": built,
        "spec": spec_as_json(spec),
        "about": dict(about or {}),
    }
    metadata = {name: json.dumps(value, default=str) for name, value in described.items()}
    tensors = {  # clones, because the format knows neither strides nor shared memory
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in policy.state_dict().items()
    }
    try:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(path)) as new:
            save_file(tensors, new, {"format": "pt", **metadata})
    except (OSError, SafetensorError) as error:
        raise OSError(f"cannot write the policy {path}: {error}") from error


def load_policy(path: str | Path, policy: nn.Module | None = None) -> nn.Module:
    """Return the policy of a file that :func:`save_policy` wrote, the same bits, on the CPU.

    No code is run that the file could name: a network is built if it is one of this package.

    Args:
        path: of the file.
        policy: the module to load into; needed for a network of your own.

    Raises:
        ConfigurationError: if the file is none of these, or its network cannot be built, or
            ``policy`` is another network.

    Example:
        >>> policy = load_policy("policy.safetensors")     # doctest: +SKIP
        >>> policy(TensorDict({"observation": pixels}))    # doctest: +SKIP
    """
    tensors, metadata = _read(Path(path))
    policy = _build(Path(path), metadata, tensors) if policy is None else policy
    _require_same(Path(path), policy, tensors)
    try:
        policy.load_state_dict(tensors)
    except RuntimeError as error:
        told = " ".join(str(error).split())
        raise ConfigurationError(f"{path} is of another network: {told}") from error
    return policy


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            described = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{path}: this is no policy that can be read: {error}") from error
    if "hts_torchrl" not in described:
        raise ConfigurationError(f"{path}: this was not written by hts-torchrl export")
    return tensors, described


def _build(path: Path, described: dict[str, Any], tensors: dict[str, Tensor]) -> nn.Module:
    try:
        network, spec = (_from_json(described[name]) for name in ("network", "spec"))
        name = None if network is None else network["name"]
        squash = network is not None and network["squash"]
        if name in BUILT_IN_TRUNKS and isinstance(squash, bool):
            make = partial(make_actor_critic, name, spec_from_json(spec), squash=squash)
            # Whatever sizes are described, on this device nothing is allocated.
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _require_same(path, make(), tensors)
            with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
                return make()
    except ConfigurationError as error:
        told = " ".join(str(error).removeprefix(f"{path}").split())
        raise ConfigurationError(f"{path}: {told.removeprefix(': ')}") from error
    except (
        *(KeyError, IndexError, TypeError, ValueError, AttributeError),
        *(OverflowError, RecursionError, RuntimeError),
    ) as error:
        told = " ".join(repr(error).split())
        raise ConfigurationError(f"{path}: its description cannot be read: {told}") from error
    raise ConfigurationError(
        f"{path}: its network ({name or 'a policy of your own'}) is none of this package: give the "
        "module to load into, load_policy(path, policy)"
    )


def _require_same(path: Path, policy: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Refuse tensors of other names, shapes or types; a conversion would change their bits."""
    wanted = {
        name: tensor
        for name, tensor in policy.state_dict().items()
        if isinstance(tensor, Tensor) and not is_lazy(tensor)
    }
    for name in sorted(wanted.keys() & tensors.keys()):
        found, own = _described(tensors[name]), _described(wanted[name])
        if found != own:
            raise ConfigurationError(
                f"{path} is of another network: its {name!r} is {found}, but {own} is needed"
            )
    differ = sorted(wanted.keys() ^ tensors.keys())
    if differ and not any(map(is_lazy, policy.state_dict().values())):
        name = differ[0]
        problem = "is missing" if name in wanted else "has no place"
        raise ConfigurationError(f"{path} is of another network: {name!r} {problem}")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def spec_as_json(spec: EnvSpec) -> dict[str, Any]:
    """Return observations and actions as values that JSON has."""
    action = spec.action
    return {
        "observations": [
            {"key": _path(key), **_array_as_json(array)} for key, array in spec.observations.items()
        ],
        "action": {
            "kind": action.kind,
            "key": _path(action.key),
            **_array_as_json(action.array),
            "sizes": list(action.sizes),
            "low": _bound_as_json(action.low),
            "high": _bound_as_json(action.high),
        },
    }


def _from_json(text: str) -> Any:  # noqa: ANN401
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


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
    continuous = kind == "continuous"
    if continuous == bool(sizes) or (continuous and array.dtype.kind != "f"):
        raise ValueError(f"{kind} actions of {array} with {sizes} choices")
    low, high = (
        None if action[name] is None else _bound_from_json(action[name], array, infinity)
        for name, infinity in (("low", -np.inf), ("high", np.inf))
    )
    if continuous and (low is None or high is None or not (low <= high).all()):
        raise ValueError(f"actions from {action['low']} to {action['high']}")
    key = _key(action.get("key", ["action"]))  # files of version 0.1 have none
    return EnvSpec(observations, ActionSpec(kind, array, sizes, low, high, key))


def _sizes_from_json(sizes: list[int]) -> tuple[int, ...]:
    if not all(type(size) is int and 0 < size < _MOST_ELEMENTS for size in sizes):
        raise ValueError(f"sizes {str(sizes)[:100]}")
    return tuple(sizes)


def _path(key: Key) -> list[str]:
    return [key] if isinstance(key, str) else list(key)


def _key(path: list[str]) -> Key:
    if not path or not all(isinstance(name, str) and name for name in path):
        raise ValueError(f"an entry named {path}")
    return path[0] if len(path) == 1 else tuple(path)


def _array_as_json(array: ArraySpec) -> dict[str, Any]:
    return {"shape": list(array.shape), "dtype": array.dtype.name}


def _array_from_json(array: dict[str, Any]) -> ArraySpec:
    dtype = np.dtype(str(array["dtype"]))
    if dtype.kind not in "biuf":
        raise ValueError(f"numbers of type {dtype}")
    shape = _sizes_from_json(array["shape"])
    if math.prod(shape) >= _MOST_ELEMENTS:
        raise ValueError(f"the shape {str(shape)[:100]}")
    return ArraySpec(shape, dtype)


def _bound_as_json(bound: np.ndarray[Any, Any] | None) -> list[Any] | None:
    """Return numbers, with null for what is infinite, which JSON cannot say."""
    if bound is None:
        return None
    numbers = bound.astype(object)
    numbers[~np.isfinite(bound)] = None
    as_list: list[Any] = numbers.tolist()
    return as_list


def _bound_from_json(bound: list[Any], array: ArraySpec, infinity: float) -> np.ndarray[Any, Any]:
    numbers = np.array(bound, array.dtype)  # null becomes NaN
    if numbers.shape != array.shape:
        raise ValueError(f"bounds of shape {numbers.shape} for actions of {array}")
    return np.where(np.isnan(numbers), array.dtype.type(infinity), numbers)
