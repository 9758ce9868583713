"""One pass of any policy: its distribution and its value, without sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch import distributions as d
from torchrl.modules import Delta, GRUModule, LSTMModule, TanhDelta, ValueOperator

from hts_torchrl.compat.torch import hooks_of
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.actor_critic import ActorCritic
from hts_torchrl.models.recurrent import TrunkModule
from hts_torchrl.policy.composite import VECTOR, ActionParts, distribution_of
from hts_torchrl.policy.normalization import NormalizedPolicy
from hts_torchrl.specs import EnvSpec, Key, next_key, path_of

_UNCHANGED = (TensorDictModule, ValueOperator)


@dataclass
class PolicyOutput:
    """What a policy says of B observations."""

    _distribution: d.Distribution | None
    value: Tensor | None
    """Values ``[B, 1]``; None if the policy has no critic."""
    written: TensorDictBase | dict[Key, Tensor]
    """The parameters of the distribution, and whatever else the modules wrote."""
    _of_written: Callable[[Any], d.Distribution] | None = None

    @property
    def distribution(self) -> d.Distribution:
        """B distributions of actions, of a policy that does not write the action itself."""
        assert self._distribution is not None
        return self._distribution

    def of_row(self, row: int) -> d.Distribution:
        """Return the distribution of one row alone, batch size 1."""
        assert self._of_written is not None
        rows, written = slice(row, row + 1), self.written
        if isinstance(written, TensorDictBase):
            return self._of_written(written[rows])
        return self._of_written({key: value[rows] for key, value in written.items()})

    def tensors(self) -> dict[Key, Tensor]:
        """Return all that was written, by key."""
        if isinstance(self.written, TensorDictBase):
            return dict(self.written.items(include_nested=True, leaves_only=True))
        return self.written


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
    if isinstance(policy, ActorCritic) and is_fused(policy):
        features, parameters, value = policy.fused(inputs)
        written: dict[Key, Tensor] = {"hidden": features}
        written.update(parameters)

        def of_written(rows: dict[Key, Tensor]) -> d.Distribution:
            return policy.distribution({key: rows[key] for key in parameters})

        return PolicyOutput(of_written(written), value, written, of_written)
    tensordict = TensorDict(inputs, batch_size)
    head = distribution = None
    for module in modules_of(policy):
        if is_head(module):
            head, distribution = module, distribution_of(module, tensordict)
        else:
            tensordict = _called(module, tensordict)
    if head is None:
        raise ConfigurationError(
            "the policy has no probabilistic module, such as torchrl's ProbabilisticActor: A2C, "
            "PPO and Impala need distributions of actions"
        )
    value = tensordict.get("state_value", None)
    return PolicyOutput(distribution, value, tensordict, partial(distribution_of, head))


def _called(module: nn.Module, tensordict: TensorDictBase) -> TensorDictBase:
    """Call a module as actors do, with rows ``[B, ...]``; of sequences, what reads none gets rows.

    A layer such as ``nn.Flatten`` or ``nn.Conv2d`` would take the steps for features.
    """
    if tensordict.ndim == 1 or isinstance(module, LSTMModule | GRUModule | TrunkModule):
        result: TensorDictBase = module(tensordict)
        return result
    read: Any = module.in_keys
    rows = module(tensordict.select(*read, strict=False).reshape(-1))
    return tensordict.update(rows.reshape(tensordict.shape))


def is_fused(policy: ActorCritic) -> bool:
    """Return whether its one pass leaves nothing out: no memory, and no code of a user's.

    Hooks of this package, which look at all modules for a while, do not count.
    """
    common, actor, value = policy.module
    steps = (common, actor.module[0], value)
    return all(
        type(each) in _UNCHANGED
        and "forward" not in vars(each)
        and all(_module_of(hook).startswith("hts_torchrl.") for hook in hooks_of(each))
        for each in steps
    )


def heads_of(policy: nn.Module) -> list[ProbabilisticTensorDictModule]:
    """Return what makes a policy's distributions of actions; without any, it writes actions."""
    return [step for step in modules_of(policy) if is_head(step)]


def is_head(module: nn.Module) -> TypeGuard[ProbabilisticTensorDictModule]:
    """Return whether a module draws an action: one from a ``Delta`` is written, as any other is."""
    probabilistic = isinstance(module, ProbabilisticTensorDictModule)
    return probabilistic and module.distribution_class not in (Delta, TanhDelta)


def probabilistic_module(policy: nn.Module) -> ProbabilisticTensorDictModule:
    """Return the policy's one probabilistic module, which names action and log-probability.

    Raises:
        ConfigurationError: if it has none, or more than one.
    """
    found = heads_of(policy)
    if len(found) != 1:
        raise ConfigurationError(
            f"the policy has {len(found)} probabilistic modules; exactly one, such as torchrl's "
            "ProbabilisticActor, is needed, and a Delta or TanhDelta, of one action alone, is none"
        )
    return found[0]


def is_composite(head: ProbabilisticTensorDictModule) -> bool:
    """Return whether a probabilistic module writes parts of an action, and not the action."""
    return len(head.dist_sample_keys) > 1 or head.distribution_class is CompositeDistribution


def with_parts(policy: nn.Module, spec: EnvSpec) -> EnvSpec:
    """Return a specification whose action has a key of its own, if the policy writes its parts.

    Raises:
        ConfigurationError: if the policy draws actions under keys that are not the environment's.
    """
    if not heads_of(policy) or ActionParts(probabilistic_module(policy), spec.action).is_whole:
        return spec
    return replace(spec, action=replace(spec.action, key=VECTOR))


def inputs_of(policy: nn.Module) -> list[Key]:
    """Return what a policy reads, without entries of which its own modules write the parts.

    TorchRL counts such an entry among the ``in_keys``: a ``CompositeDistribution``'s parameters.
    """
    written = written_by(*modules_of(policy))
    above = {path[:depth] for path in written for depth in range(1, len(path))}
    return [key for key in getattr(policy, "in_keys", ()) if path_of(key) not in above]


def memory_keys(policy: nn.Module) -> list[Key]:
    """Return the keys that a policy reads, and writes under ``next`` for the step after."""
    written = written_by(*modules_of(policy))
    return [key for key in getattr(policy, "in_keys", ()) if path_of(next_key(key)) in written]


def modules_of(policy: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a policy in the order in which they run, also those of sequences.

    A sequence that is called by code of a user's is one module.
    """
    if isinstance(policy, TensorDictSequential) and users_call(policy) is None:
        modules: Any = policy.module
        for module in modules.values() if isinstance(modules, nn.ModuleDict) else modules:
            yield from modules_of(module)
    else:
        yield policy


def users_call(module: nn.Module) -> str | None:
    """Return which code of a user's runs when the module is called; None if it is a library's.

    That is ``a forward``, of its class or of itself, or ``a hook``. A library is tensordict,
    torchrl or this one; Lightning has hooks that look at calls alone, as its ModelSummary.
    """
    others = (hook for hook in hooks_of(module) if not is_of_lightning(hook))
    hooks = [hook for hook in others if not _is_of_a_library(_module_of(hook))]
    return users_method(module, "forward") or ("a hook" if hooks else None)


def users_method(module: nn.Module, *names: str) -> str | None:
    """Return which method a user's class, or the module itself, has in place of a library's."""
    for name in names:
        owners = [kind.__module__ for kind in type(module).__mro__ if name in vars(kind)]
        replaced = name in vars(module) or (owners and not _is_of_a_library(owners[0]))
        if replaced and any(map(_is_of_a_library, owners)):
            return f"a {name}"
    return None


def _module_of(hook: Callable[..., Any]) -> str:
    return str(getattr(getattr(hook, "func", hook), "__module__", ""))  # also of a partial


def is_of_lightning(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is one of Lightning's, as its PyTorchProfiler puts on all modules."""
    return _module_of(hook).startswith("lightning.")


def _is_of_a_library(name: str) -> bool:
    return name.partition(".")[0] in ("tensordict", "torchrl", "hts_torchrl")


def written_by(*modules: nn.Module) -> set[tuple[str, ...]]:
    """Return the paths of what modules write, by their ``out_keys``."""
    return {path_of(key) for module in modules for key in getattr(module, "out_keys", ())}
