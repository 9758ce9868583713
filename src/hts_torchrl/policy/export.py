"""A policy in one safetensors file: tensors and a description in JSON, nothing that could be run.

The header's metadata has, each as JSON, ``hts_torchrl`` (the version that wrote it), ``network``
(name of the trunk, ``squash``, ``normalized`` and ``action_values``; null for a policy of the
user's own), ``spec`` (observations and actions) and ``about`` (for the reader alone: environment,
updates).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hts_torchrl.durable_file import replacing
from hts_torchrl.errors import ConfigurationError, in_one_line, reason_of, require_type
from hts_torchrl.models.actor_critic import make_actor_critic
from hts_torchrl.models.q_policy import make_q_policy, q_head_of
from hts_torchrl.models.trunks import is_built_in
from hts_torchrl.policy.forward import inputs_of, probabilistic_module
from hts_torchrl.policy.limits import require_module, require_tensors
from hts_torchrl.policy.normalization import NormalizedPolicy
from hts_torchrl.policy.spec_json import spec_as_json, spec_from_json
from hts_torchrl.specs import EnvSpec


def save_policy(
    policy: nn.Module,
    path: str | Path,
    *,
    spec: EnvSpec,
    network: str | None,
    squash: bool = False,
    normalized: bool = False,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a policy's weights, and what is needed to rebuild its network.

    Args:
        policy: whose ``state_dict`` is written.
        path: of the file; an old one is replaced once all of the new one is on the disk.
        spec: observations and actions of its environment.
        network: the name by which :func:`make_actor_critic` or :func:`make_q_policy` built it; None
            if neither did.
        squash: the argument of :func:`make_actor_critic`.
        normalized: whether ``policy`` is a :class:`NormalizedPolicy` around that network.
        about: further information for the reader, as plain values.

    Raises:
        ConfigurationError: if ``policy`` is not the ``network`` of this package for this ``spec``;
            or if its state is more than tensors.
        OSError: if it cannot be written; what was at ``path`` is still there.
    """
    require_type("spec", spec, EnvSpec, "env_spec_of(env)")
    require_type("network", network, str | None, "the name of one, or None,")
    require_module(policy)
    require_tensors(policy)
    built = (
        None
        if network is None
        else {
            "name": network,
            "squash": squash,
            "normalized": normalized,
            "action_values": q_head_of(policy) is not None,
        }
    )
    described = {
        "hts_torchrl": version("hts-torchrl"),
        "network": built,
        "spec": spec_as_json(spec),
        "about": dict(about or {}),
    }
    if network is not None and (is_built_in(network) or "." not in network):
        _require_described(policy, described)
    metadata = {name: json.dumps(value, default=str) for name, value in described.items()}
    tensors = {  # clones, because the format knows neither strides nor shared memory
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in policy.state_dict().items()
    }
    try:
        with replacing(Path(path)) as new:
            save_file(tensors, new, {"format": "pt", **metadata})
    except (OSError, SafetensorError) as error:
        reason = reason_of(error, path) if isinstance(error, OSError) else str(error)
        raise OSError(f"cannot write the policy {path}: {reason}") from error


def load_policy(path: str | Path, policy: nn.Module | None = None) -> nn.Module:
    """Return the policy that :func:`save_policy` wrote, with the same bits, on the CPU.

    Nothing in the file is executed: only networks of this package are built from it.

    Args:
        path: of the file.
        policy: the module to load into; needed for a network of your own.

    Raises:
        ConfigurationError: if the file is no such file, or its network cannot be built, or
            ``policy`` is another network.

    Example:
        >>> import numpy as np
        >>> from hts_torchrl import ActionSpec, ArraySpec, EnvSpec, load_policy, save_policy
        >>> from tensordict import TensorDict
        >>> observation = ArraySpec((4,), np.dtype(np.float32))
        >>> action = ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), sizes=(2,))
        >>> spec = EnvSpec({"observation": observation}, action)
        >>> policy = make_actor_critic("mlp", spec)
        >>> save_policy(policy, "policy.safetensors", spec=spec, network="mlp")
        >>> policy = load_policy("policy.safetensors")
        >>> policy(TensorDict({"observation": torch.zeros(3, 4)}, [3]))["action"].shape
        torch.Size([3])
    """
    if policy is not None:
        require_module(policy)
    tensors, metadata = _read(Path(path))
    policy = _build(Path(path), metadata, tensors) if policy is None else policy
    _require_same(Path(path), policy, tensors)
    try:
        policy.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigurationError(f"{path} is of another network: {in_one_line(error)}") from error
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


def _make(network: Mapping[str, Any], spec: EnvSpec) -> nn.Module:
    policy: TensorDictModuleBase
    if network.get("action_values") is True:
        policy = make_q_policy(network["name"], spec)
    else:
        policy = make_actor_critic(network["name"], spec, squash=network["squash"])
    return NormalizedPolicy(policy, spec) if network.get("normalized") is True else policy


def _require_described(policy: nn.Module, described: Mapping[str, Any]) -> None:
    """Refuse a description by which another network would be built than the policy is."""
    network = described["network"]
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
            other = _make(network, spec_from_json(described["spec"]))
        difference = _difference(policy.state_dict(), other)
        if difference is None:
            for own, wanted in zip(_form(policy), _form(other), strict=True):
                if own != wanted:
                    difference = difference or f"it has {own}, but {wanted} is needed"
    except ValueError as error:  # there is no such network, or none for this spec
        difference = in_one_line(error)
    if difference is not None:
        settings = ", ".join(f"{name}={network[name]!r}" for name in ("squash", "normalized"))
        raise ConfigurationError(
            f"save_policy(network={network['name']!r}, {settings}) with this spec would describe "
            f"another network than the policy: {difference}"
        )


def _form(policy: nn.Module) -> list[str]:
    """Describe in which way a policy reads and acts, whatever its weights."""
    head = probabilistic_module(policy)
    arguments = {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in head.distribution_kwargs.items()
    }
    read, written = ([str(key) for key in keys] for keys in (inputs_of(policy), head.out_keys))
    return [
        f"in_keys {read}",
        f"out_keys {written}",
        f"a {head.distribution_class.__name__} with {arguments}",
    ]


def _build(path: Path, described: dict[str, Any], tensors: dict[str, Tensor]) -> nn.Module:
    try:
        network, spec = (
            json.loads(described[name], parse_constant=_refuse_constant)
            for name in ("network", "spec")
        )
        name = None if network is None else network["name"]
        squash = network is not None and network["squash"]
        if name is None or not is_built_in(name) or not isinstance(squash, bool):
            raise ConfigurationError(
                f"its network ({name or 'a policy of your own'}) is none of this package: give the "
                "module to load into, load_policy(path, policy)"
            )
        make = partial(_make, network, spec_from_json(spec))
        # Whatever sizes are described, on this device nothing is allocated.
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            trial = make()
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {in_one_line(error)}") from error
    except Exception as error:  # whatever a description that is none may lead to
        told = in_one_line(repr(error))
        raise ConfigurationError(f"{path}: its description cannot be read: {told}") from error
    _require_same(path, trial, tensors)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        return make()


def _require_same(path: Path, policy: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Refuse tensors of other names, shapes or types; a conversion would change their bits."""
    if (difference := _difference(tensors, policy)) is not None:
        raise ConfigurationError(f"{path} is of another network: {difference}")


def _difference(tensors: Mapping[str, Tensor], policy: nn.Module) -> str | None:
    """Return which of the tensors is not one of the policy's by name, shape and type; or None."""
    wanted = {
        name: tensor
        for name, tensor in policy.state_dict().items()
        if isinstance(tensor, Tensor) and not is_lazy(tensor)
    }
    for name in sorted(wanted.keys() & tensors.keys()):
        found, own = _described(tensors[name]), _described(wanted[name])
        if found != own:
            return f"its {name!r} is {found}, but {own} is needed"
    differ = sorted(wanted.keys() ^ tensors.keys())
    if not differ or any(map(is_lazy, policy.state_dict().values())):
        return None
    return f"{differ[0]!r} {'is missing' if differ[0] in wanted else 'has no place'}"


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
