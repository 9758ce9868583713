"""One pass of any policy: its distribution and its value, without sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch import distributions as d

from hts_torchrl.config import IS_INIT, EnvSpec, Key
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.actor_critic import ActorCritic
from hts_torchrl.models.distributions import action_head, parameter_keys
from hts_torchrl.policy.normalization import NormalizedPolicy


@dataclass
class PolicyOutput:
    """What a policy says of B observations."""

    distribution: d.Distribution
    """B distributions of actions."""
    value: Tensor | None
    """Values ``[B, 1]``; None if the policy has no critic."""
    written: TensorDictBase | dict[Key, Tensor]
    """The parameters of the distribution, and whatever else the modules wrote."""


def evaluate(
    policy: nn.Module, inputs: dict[Key, Tensor], batch_size: int | torch.Size
) -> PolicyOutput:
    """Run actor and critic once, the common trunk once.

    TorchRL's own ``forward`` of a policy would sample, and its losses run actor and critic apart;
    here the modules of a sequence run in order with the sampling left out.

    Args:
        policy: an actor-critic, or any TensorDict policy with one probabilistic module.
        inputs: observations and memory by key, ``[B, ...]`` each.
        batch_size: B; or N and T for sequences, to a policy that reads them.
    """
    if isinstance(policy, NormalizedPolicy):
        return evaluate(policy.policy, policy.normalizer.of(inputs), batch_size)
    if isinstance(policy, ActorCritic) and policy.memory is None:
        features, parameters, value = policy.fused(inputs)
        written: dict[Key, Tensor] = {"hidden": features}
        written.update(parameters)
        return PolicyOutput(policy.distribution(parameters), value, written)
    tensordict = TensorDict(inputs, [batch_size] if isinstance(batch_size, int) else batch_size)
    distribution = None
    for module in modules_of(policy):
        if isinstance(module, ProbabilisticTensorDictModule):
            distribution = module.get_dist(tensordict)
        else:
            tensordict = module(tensordict)
    if distribution is None:
        raise ConfigurationError("the policy has no probabilistic module: nothing to sample from")
    return PolicyOutput(distribution, tensordict.get("state_value", None), tensordict)


def probabilistic_module(policy: nn.Module) -> ProbabilisticTensorDictModule:
    """Return the policy's one probabilistic module, which names action and log-probability.

    Raises:
        ConfigurationError: if it has none, or more than one.
    """
    found = [step for step in modules_of(policy) if isinstance(step, ProbabilisticTensorDictModule)]
    if len(found) != 1:
        raise ConfigurationError(
            f"the policy has {len(found)} probabilistic modules; exactly one, such as torchrl's "
            "ProbabilisticActor, is needed"
        )
    return found[0]


def modules_of(policy: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a policy in the order in which they run, also those of sequences."""
    if isinstance(policy, TensorDictSequential | ProbabilisticTensorDictSequential):
        for module in policy.module:
            yield from modules_of(module)
    else:
        yield policy


def as_policy(policy: nn.Module, spec: EnvSpec) -> TensorDictModuleBase:
    """Return a TensorDict policy; a plain module is wrapped where that is obvious.

    A plain module maps the one observation to logits (discrete actions) or to a pair of mean and
    standard deviation (continuous actions).

    Args:
        policy: a TensorDict policy, or a module that returns logits (or mean and scale).
        spec: observations and actions of the environment.

    Raises:
        ConfigurationError: if it is not obvious, or if the policy reads what nobody provides.
    """
    if isinstance(policy, TensorDictModuleBase):
        _require_readable(policy, spec)
        return policy
    if len(spec.observations) != 1:
        raise ConfigurationError(
            f"a plain module cannot tell the observations {sorted(map(str, spec.observations))} "
            "apart; wrap the policy in a TensorDictModule with in_keys"
        )
    keys = parameter_keys(spec.action)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(policy, in_keys=list(spec.observations), out_keys=keys),
        action_head(spec.action),
    )


def _require_readable(policy: TensorDictModuleBase, spec: EnvSpec) -> None:
    """Refuse what reads an entry that nobody provides, or writes one that nobody can use.

    Raises:
        ConfigurationError: naming the module, and the key if it has one.
    """
    names = {module: name for name, module in policy.named_modules()}
    steps = list(modules_of(policy))
    ahead = {path_of(key) for step in steps for key in getattr(step, "out_keys", ())}
    known = {path_of(key) for key in spec.observations} | {(IS_INIT,)}
    remembered = {key[1:] for key in ahead if key[0] == "next"}
    read: set[tuple[str, ...]] = set()
    for module in steps:
        named = _named(module, names.get(module, ""))
        for key in map(path_of, getattr(module, "in_keys", ())):
            read.add(key)
            if key in remembered:
                continue
            if not any(key == other[: len(key)] or other == key[: len(other)] for other in known):
                raise ConfigurationError(
                    f"the policy's {named} reads {_key(key)}, which is none of the observations "
                    f"{sorted(map(str, spec.observations))}, and which no earlier module writes; "
                    f"a memory is written as {('next', *key)}"
                )
        written = {path_of(key) for key in getattr(module, "out_keys", ())}
        if path_of(spec.action.key) in known & written:
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


def _named(module: nn.Module, name: str) -> str:
    return f"{type(module).__name__} ({name})" if name else type(module).__name__


def path_of(key: Key) -> tuple[str, ...]:
    """Return a key as a path, also where it is a single name."""
    return (key,) if isinstance(key, str) else tuple(unravel_key(key))


def _key(path: tuple[str, ...]) -> str:
    return repr(path[0] if len(path) == 1 else path)
