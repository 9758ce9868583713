"""One pass of any policy: its distribution and its value, without sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch import distributions as d
from torchrl.modules import ValueOperator

from hts_torchrl.compat.tensordict import drawing_options
from hts_torchrl.compat.torch import hooks_of
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.actor_critic import ActorCritic
from hts_torchrl.policy.composite import VECTOR, ActionParts, distribution_of
from hts_torchrl.policy.normalization import NormalizedPolicy
from hts_torchrl.specs import EnvSpec, Key

_UNCHANGED = (TensorDictModule, ValueOperator)
_NOT_ASKED = ("get_dist_params", "heads")
"""Methods of sequences, and of :class:`ActorCritic`, in whose place the modules are asked."""


@dataclass
class PolicyOutput:
    """What a policy says of B observations."""

    _distribution: d.Distribution | None
    value: Tensor | None
    """Values ``[B, 1]``; None if the policy has no critic."""
    written: TensorDictBase | dict[Key, Tensor]
    """The parameters of the distribution, and whatever else the modules wrote."""

    @property
    def distribution(self) -> d.Distribution:
        """B distributions of actions.

        Raises:
            ConfigurationError: if the policy writes the action itself.
        """
        if self._distribution is None:
            raise ConfigurationError(NO_DISTRIBUTION)
        return self._distribution


NO_DISTRIBUTION = (
    "the policy has no probabilistic module, such as torchrl's ProbabilisticActor: A2C, PPO and "
    "Impala need distributions of actions"
)


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
    if isinstance(policy, ActorCritic) and _is_fused(policy):
        features, parameters, value = policy.fused(inputs)
        written: dict[Key, Tensor] = {"hidden": features}
        written.update(parameters)
        return PolicyOutput(policy.distribution(parameters), value, written)
    tensordict = TensorDict(inputs, [batch_size] if isinstance(batch_size, int) else batch_size)
    distribution = None
    for module in modules_of(policy):
        if isinstance(module, ProbabilisticTensorDictModule):
            distribution = distribution_of(module, tensordict)
        else:
            tensordict = module(tensordict)
    if distribution is None:
        raise ConfigurationError(NO_DISTRIBUTION)
    return PolicyOutput(distribution, tensordict.get("state_value", None), tensordict)


def _is_fused(policy: ActorCritic) -> bool:
    """Return whether its one pass leaves nothing out: no memory, and no hooks of its modules.

    Those of this package, which look at all modules for a while, do not count.
    """
    if policy.memory is not None:
        return False
    common, actor, value = policy.module
    steps = (common, actor.module[0], value)
    return all(type(each) in _UNCHANGED and all(map(_is_own, hooks_of(each))) for each in steps)


def is_probabilistic(policy: nn.Module) -> bool:
    """Return whether a policy gives distributions of actions; if not, it writes actions."""
    return any(isinstance(step, ProbabilisticTensorDictModule) for step in modules_of(policy))


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


def with_parts(policy: nn.Module, spec: EnvSpec) -> EnvSpec:
    """Return a specification whose action has a key of its own, if the policy writes its parts.

    Raises:
        ConfigurationError: if the policy draws actions under keys that are not the environment's.
    """
    if not is_probabilistic(policy):
        return spec
    if ActionParts(probabilistic_module(policy), spec.action).is_whole:
        return spec
    return replace(spec, action=replace(spec.action, key=VECTOR))


def inputs_of(policy: nn.Module) -> list[Key]:
    """Return what a policy reads, without entries of which its own modules write the parts.

    TorchRL counts such an entry among the ``in_keys``: a ``CompositeDistribution``'s parameters.
    """
    written = (path_of(key) for step in modules_of(policy) for key in getattr(step, "out_keys", ()))
    above = {path[:depth] for path in written for depth in range(1, len(path))}
    read: list[Key] = list(getattr(policy, "in_keys", ()))
    return [key for key in read if path_of(key) not in above]


def modules_of(policy: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a policy in the order in which they run, also those of sequences.

    A sequence that is called by code of a user's is one module.
    """
    if is_sequence(policy) and users_call(policy) is None:
        modules: Any = policy.module
        for module in modules.values() if isinstance(modules, nn.ModuleDict) else modules:
            yield from modules_of(module)
    else:
        yield policy


def users_call(module: nn.Module) -> str | None:
    """Return which code of a user's runs when the module is called; None if it is a library's.

    That is ``a forward``, of its class or of itself, or ``a hook``. A library is tensordict,
    torchrl or this one.
    """
    kind = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    if "forward" in vars(module) or not _is_known(kind.__module__):
        return "a forward"
    return None if all(_is_known(_module_of(hook)) for hook in hooks_of(module)) else "a hook"


def require_called(policy: nn.Module, *, learns: bool = False) -> None:
    """Refuse what only a call of the policy would do, or a method that no pass asks.

    A pass calls neither the probabilistic module, which is asked for its distribution, nor the
    sequences that hold it, whose other modules run one by one.

    Args:
        policy: as a user gave it.
        learns: whether a learner has it, which does not ask its ``get_dist``, as losses do.

    Raises:
        ConfigurationError: naming the module, and what would have no effect.
    """
    for name, module in policy.named_modules():
        is_head = isinstance(module, ProbabilisticTensorDictModule)
        if not is_head and not (is_sequence(module) and _has_head(module)):
            continue
        code = users_call(module)
        if code is None and not is_head:
            code = _users_method(module, learns=learns)
        if code is not None:
            raise ConfigurationError(
                f"the policy's {named(module, name)} has {code} of its own, which would not run: "
                "its distribution is asked for, and it is not called; put that into a module "
                "before the probabilistic one"
            )
        for option, value in drawing_options(module).items() if is_head else ():
            if value is not None:
                raise ConfigurationError(
                    f"the policy's {named(module, name)} has {option}={value}: an environment "
                    "takes one action, drawn by random numbers of its own; leave it out"
                )


def require_copyable(policy: nn.Module) -> None:
    """Refuse weights that a hook computes from others: torch copies no module that holds them.

    Raises:
        ConfigurationError: naming the module and the weights.
    """
    for name, module in policy.named_modules():
        parameters = {key for key, _ in module.named_parameters(recurse=False)}
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and (not value.is_leaf or f"{key}_orig" in parameters):
                raise ConfigurationError(
                    f"the policy's {named(module, name)} computes its {key!r} in a hook, and torch "
                    "cannot copy it for the actors: use torch.nn.utils.parametrizations in place "
                    "of torch.nn.utils.weight_norm or spectral_norm, and a parametrization in "
                    "place of prune"
                )


def _users_method(sequence: nn.Module, *, learns: bool) -> str | None:
    """Return which method a user's class has in place of a library's that no pass asks."""
    names = [*_NOT_ASKED, *(["get_dist"] if learns else [])]
    if isinstance(sequence, ActorCritic) and not _is_fused(sequence):
        names += ["fused", "distribution"]
    for name in names:
        owners = [kind.__module__ for kind in type(sequence).__mro__ if name in vars(kind)]
        replaced = name in vars(sequence) or (owners and not _is_known(owners[0]))
        if replaced and any(map(_is_known, owners)):
            return f"a {name}"
    return None


def _has_head(module: nn.Module) -> bool:
    return any(isinstance(each, ProbabilisticTensorDictModule) for each in module.modules())


def named(module: nn.Module, name: str) -> str:
    """Return a module as a user knows it: its class, and its name within the policy."""
    return f"{type(module).__name__} ({name})" if name else type(module).__name__


def _module_of(hook: Callable[..., Any]) -> str:
    return str(getattr(hook, "__module__", ""))


def _is_own(hook: Callable[..., Any]) -> bool:
    return _module_of(hook).startswith("hts_torchrl.")


def _is_known(name: str) -> bool:
    return name.partition(".")[0] in ("tensordict", "torchrl", "hts_torchrl")


def is_sequence(module: nn.Module) -> bool:
    """Return whether a module is one of tensordict's sequences of modules."""
    return isinstance(module, TensorDictSequential | ProbabilisticTensorDictSequential)


def path_of(key: Key) -> tuple[str, ...]:
    """Return a key as a path, also where it is a single name."""
    return (key,) if isinstance(key, str) else tuple(unravel_key(key))
