"""From whatever the user gave to a TensorDict policy that actors can run."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
)
from torch import nn
from torch.nn.parameter import is_lazy
from torchrl.modules import AdditiveGaussianModule, EGreedyModule, RandomPolicy

from hts_torchrl.compat.torch import uncompiled
from hts_torchrl.config import IS_INIT, EnvSpec
from hts_torchrl.envs.action_spec import tensor_spec_of
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.distributions import action_head, parameter_keys
from hts_torchrl.policy.exploration import RandomActions
from hts_torchrl.policy.forward import modules_of, path_of


def as_policy(policy: nn.Module, spec: EnvSpec) -> TensorDictModuleBase:
    """Return a TensorDict policy; a plain module is wrapped where that is obvious.

    A plain module maps the one observation to logits (discrete actions) or to a pair of mean and
    standard deviation (continuous actions). TorchRL's ``RandomPolicy`` becomes a module whose draws
    belong to the environments. Lazy layers are initialised, and an ``AdditiveGaussianModule`` that
    has no spec is given the environment's, in place. What ``torch.compile`` returned acts as the
    module that it was given.

    Args:
        policy: a TensorDict policy, or a module that returns logits (or mean and scale).
        spec: observations and actions of the environment.

    Raises:
        ConfigurationError: if it is not obvious, or if the policy reads what nobody provides.
    """
    if isinstance(policy, RandomPolicy):
        return RandomActions(spec)
    policy = uncompiled(policy)
    if isinstance(policy, nn.Module):
        _complete(policy, spec)
    if isinstance(policy, TensorDictModuleBase):
        _require_readable(policy, spec)
        _initialise(policy, spec)
        return policy
    if len(spec.observations) != 1:
        raise ConfigurationError(
            f"a plain module cannot tell the observations {sorted(map(str, spec.observations))} "
            "apart; wrap the policy in a TensorDictModule with in_keys"
        )
    keys = parameter_keys(spec.action)
    whole = ProbabilisticTensorDictSequential(
        TensorDictModule(policy, in_keys=list(spec.observations), out_keys=keys),
        action_head(spec.action),
    )
    _initialise(whole, spec)
    return whole


def _complete(policy: nn.Module, spec: EnvSpec) -> None:
    """Give modules that explore the spec of actions that they lack, as TorchRL's collector does.

    Raises:
        ConfigurationError: for one that takes none later.
    """
    for module in policy.modules():
        if isinstance(module, AdditiveGaussianModule) and module.spec is None:
            module.spec = tensor_spec_of(spec.action)
        elif isinstance(module, EGreedyModule) and module.spec is None:
            kind = type(tensor_spec_of(spec.action)).__name__
            raise ConfigurationError(
                f"the policy has an EGreedyModule without a spec: give it torchrl's {kind} of the "
                f"environment's actions ({spec.action.kind} {list(spec.action.sizes)})"
            )


def _initialise(policy: TensorDictModuleBase, spec: EnvSpec) -> None:
    """Give lazy layers their shapes and first weights, by one pass."""
    if any(map(is_lazy, policy.parameters())):
        zeros = {
            key: torch.from_numpy(np.zeros((2, *array.shape), array.dtype))
            for key, array in spec.inputs.items()
        }
        with torch.no_grad():
            policy(TensorDict(zeros, [2]))


def _require_readable(policy: TensorDictModuleBase, spec: EnvSpec) -> None:
    """Refuse what reads an entry that nobody provides, or writes one that nobody can use.

    Raises:
        ConfigurationError: naming the module, and the key if it has one.
    """
    names = {module: name for name, module in policy.named_modules()}
    steps = list(modules_of(policy))
    ahead = {path_of(key) for step in steps for key in getattr(step, "out_keys", ())}
    known = {path_of(key) for key in spec.observations} | {(IS_INIT,)}
    heads = [step for step in steps if isinstance(step, ProbabilisticTensorDictModule)]
    drawn = {path_of(key) for head in heads for key in head.dist_sample_keys}
    if covered := [key for key in drawn if any(_overlap(key, other) for other in known)]:
        raise ConfigurationError(
            f"the policy writes an action to {_key(covered[0])}, where the environment observes "
            f"something: write it to {('action', *covered[0])}"
        )
    remembered = {key[1:] for key in ahead if key[0] == "next"}
    read: set[tuple[str, ...]] = set()
    for module in steps:
        named = _named(module, names.get(module, ""))
        for key in map(path_of, getattr(module, "in_keys", ())):
            read.add(key)
            if key in remembered:
                continue
            if not any(_overlap(key, other) for other in known):
                raise ConfigurationError(
                    f"the policy's {named} reads {_key(key)}, which is none of the observations "
                    f"{sorted(map(str, spec.observations))}, and which no earlier module writes; "
                    f"a memory is written as {('next', *key)}"
                )
        written = {path_of(key) for key in getattr(module, "out_keys", ())}
        if drawn & known & written:
            raise ConfigurationError(
                f"the policy's {named} changes an action that was drawn, whose log-probability "
                "would be another's: exploration belongs into the distribution"
            )
        known |= written
    if unread := sorted(remembered - read):
        raise ConfigurationError(
            f"the policy writes {('next', *unread[0])} for the next step, but no module reads "
            f"{_key(unread[0])}"
        )


def _overlap(key: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return key == other[: len(key)] or other == key[: len(other)]


def _named(module: nn.Module, name: str) -> str:
    return f"{type(module).__name__} ({name})" if name else type(module).__name__


def _key(path: tuple[str, ...]) -> str:
    return repr(path[0] if len(path) == 1 else path)
