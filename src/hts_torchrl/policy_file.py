"""A policy in one safetensors file: tensors and a description in JSON, nothing that could be run.

The header's metadata has, each as JSON, ``hts_torchrl`` (the version that wrote it), ``network``
(name of the trunk and ``squash``; null for a policy of the user's own), ``spec`` (observations and
actions) and ``about`` (for the reader alone: environment, updates).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hts_torchrl.config import ActionSpec, ArraySpec, EnvSpec, Key
from hts_torchrl.durable_file import replacing
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.actor_critic import BUILT_IN_TRUNKS, make_actor_critic


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
    policy = _build(Path(path), metadata) if policy is None else policy
    try:
        policy.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigurationError(f"{path} is of another network: {error}") from error
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


def _build(path: Path, described: dict[str, Any]) -> nn.Module:
    try:
        network, spec = (json.loads(described[name]) for name in ("network", "spec"))
        name = None if network is None else network["name"]
        if name in BUILT_IN_TRUNKS:
            with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
                return make_actor_critic(name, spec_from_json(spec), squash=network["squash"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"{path}: its description cannot be read: {error!r}") from error
    raise ConfigurationError(
        f"{path}: its network ({name or 'a policy of your own'}) is none of this package: give the "
        "module to load into, load_policy(path, policy)"
    )


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


def spec_from_json(spec: dict[str, Any]) -> EnvSpec:
    """Return observations and actions from what :func:`spec_as_json` returned."""
    observations = {_key(each["key"]): _array_from_json(each) for each in spec["observations"]}
    action, array = spec["action"], _array_from_json(spec["action"])
    low, high = (
        None if action[name] is None else _bound_from_json(action[name], array, infinity)
        for name, infinity in (("low", -np.inf), ("high", np.inf))
    )
    key = _key(action.get("key", ["action"]))  # files of version 0.1 have none
    return EnvSpec(
        observations, ActionSpec(action["kind"], array, tuple(action["sizes"]), low, high, key)
    )


def _path(key: Key) -> list[str]:
    return [key] if isinstance(key, str) else list(key)


def _key(path: list[str]) -> Key:
    return path[0] if len(path) == 1 else tuple(path)


def _array_as_json(array: ArraySpec) -> dict[str, Any]:
    return {"shape": list(array.shape), "dtype": array.dtype.name}


def _array_from_json(array: dict[str, Any]) -> ArraySpec:
    return ArraySpec(tuple(array["shape"]), np.dtype(array["dtype"]))


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
    return np.where(np.isnan(numbers), array.dtype.type(infinity), numbers)
