"""One pass of any policy: its distribution and its value, without sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
from torchrl.modules import GRUModule, LSTMModule

from hts_torchrl.config import EnvSpec, Key
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.actor_critic import ActorCritic
from hts_torchrl.models.distributions import action_head, parameter_keys


@dataclass
class PolicyOutput:
    """What a policy says of B observations."""

    distribution: d.Distribution
    """B distributions of actions."""
    value: Tensor | None
    """Values ``[B, 1]``; None if the policy has no critic."""
    written: TensorDictBase | dict[Key, Tensor]
    """The parameters of the distribution, and whatever else the modules wrote."""


def evaluate(policy: nn.Module, observations: dict[Key, Tensor], batch_size: int) -> PolicyOutput:
    """Run actor and critic once, the common trunk once.

    TorchRL's own ``forward`` of a policy would sample, and its losses run actor and critic apart;
    here the modules of a sequence run in order with the sampling left out.

    Args:
        policy: an actor-critic, or any TensorDict policy with one probabilistic module.
        observations: by key, ``[B, ...]`` each.
        batch_size: B.
    """
    if isinstance(policy, ActorCritic):
        features, parameters, value = policy.fused(observations)
        written: dict[Key, Tensor] = {"hidden": features}
        written.update(parameters)
        return PolicyOutput(policy.distribution(parameters), value, written)
    tensordict = TensorDict(observations, [batch_size])
    distribution = None
    for module in _steps(policy):
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
    found = [step for step in _steps(policy) if isinstance(step, ProbabilisticTensorDictModule)]
    if len(found) != 1:
        raise ConfigurationError(
            f"the policy has {len(found)} probabilistic modules; exactly one, such as torchrl's "
            "ProbabilisticActor, is needed"
        )
    return found[0]


def _steps(policy: nn.Module) -> Iterator[nn.Module]:
    if isinstance(policy, TensorDictSequential | ProbabilisticTensorDictSequential):
        for module in policy.module:
            yield from _steps(module)
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
        ConfigurationError: if it is not obvious, or if the policy has a memory of earlier steps.
    """
    if isinstance(policy, TensorDictModuleBase):
        _require_no_memory(policy, spec)
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


def _require_no_memory(policy: TensorDictModuleBase, spec: EnvSpec) -> None:
    """Refuse what an answer to this observation alone would leave out, without a word.

    Raises:
        ConfigurationError: naming the module, and the key if it has one.
    """
    for name, module in policy.named_modules():
        if isinstance(module, LSTMModule | GRUModule):
            raise ConfigurationError(f"the policy has a {_named(module, name)}: {_NO_MEMORY}")
    names = {module: name for name, module in policy.named_modules()}
    known = {path_of(key) for key in spec.observations}
    for module in _steps(policy):
        named = _named(module, names.get(module, ""))
        for key in map(path_of, getattr(module, "in_keys", ())):
            if not any(key == other[: len(key)] or other == key[: len(other)] for other in known):
                raise ConfigurationError(
                    f"the policy's {named} reads {_key(key)}, which is none of the observations "
                    f"{sorted(map(str, spec.observations))} and written by no earlier module: "
                    f"{_NO_MEMORY}"
                )
        written = {path_of(key) for key in getattr(module, "out_keys", ())}
        if ahead := sorted(key for key in written if key[0] == "next"):
            raise ConfigurationError(
                f"the policy's {named} writes {_key(ahead[0])} for the next step: {_NO_MEMORY}"
            )
        if path_of(spec.action.key) in known & written:
            raise ConfigurationError(
                f"the policy's {named} changes an action that was drawn, whose log-probability "
                "would be another's: exploration belongs into the distribution"
            )
        known |= written


_NO_MEMORY = (
    "policies with a memory are not supported yet; gymnasium's FrameStackObservation and torchrl's "
    "CatFrames show earlier observations to a policy without one"
)


def _named(module: nn.Module, name: str) -> str:
    return f"{type(module).__name__} ({name})" if name else type(module).__name__


def path_of(key: Key) -> tuple[str, ...]:
    """Return a key as a path, also where it is a single name."""
    return (key,) if isinstance(key, str) else tuple(unravel_key(key))


def _key(path: tuple[str, ...]) -> str:
    return repr(path[0] if len(path) == 1 else path)
