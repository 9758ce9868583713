"""From whatever the user gave to a TensorDict policy that actors can run."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
)
from torch import nn
from torch.nn.parameter import is_lazy
from torchrl.data import Bounded, Categorical, Composite, OneHot, TensorSpec
from torchrl.modules import AdditiveGaussianModule, EGreedyModule, RandomPolicy

from hts_torchrl.compat.torch import uncompiled
from hts_torchrl.envs.torchrl_specs import tensor_spec_of
from hts_torchrl.errors import ConfigurationError, in_one_line, require
from hts_torchrl.models.distributions import action_head, parameter_keys
from hts_torchrl.models.layers import evaluating
from hts_torchrl.policy.exploration import RandomActions
from hts_torchrl.policy.inference import first_inputs
from hts_torchrl.policy.limits import misfit, require_called, require_module, require_readable
from hts_torchrl.policy.memory import with_memory
from hts_torchrl.policy.probe import differ
from hts_torchrl.specs import ActionSpec, EnvSpec, Key

Policy: TypeAlias = nn.Module | Callable[[TensorDictBase], TensorDictBase]
"""A module; or a function that writes the action into the TensorDict ``[B]`` it is given."""


class FunctionPolicy(TensorDictModuleBase):
    """Makes a policy of a function of a TensorDict, which may write in place or return another.

    Args:
        function: writes the action; a module is trained as any other.
        spec: of the environment, whose observations it reads.

    Raises:
        ConfigurationError: if it takes no TensorDict or returns none, writes other entries when it
            is asked again, or reads what it wrote in the step before.
    """

    def __init__(self, function: Policy, spec: EnvSpec) -> None:
        super().__init__()
        try:
            with contextlib.suppress(ValueError):  # one in C may not tell how it is called
                inspect.signature(function).bind(None)
        except TypeError as error:
            raise ConfigurationError(
                f"the policy is a function, which is given one argument, a TensorDict: {error}"
            ) from error
        for name in _trained_modules(function):
            warnings.warn(
                f"the policy is a function that calls {name!r}, of which actors get a copy once: "
                "nobody publishes its weights; give the module itself, or requires_grad_(False)",
                stacklevel=4,
            )
        self.function = function
        self.in_keys: list[Key] = list(spec.observations)
        with evaluating(self), torch.no_grad():
            written, again = self(_trial(spec, self)), self(_trial(spec, self))
            keys = written.keys(include_nested=True, leaves_only=True)
            self.out_keys: list[Key] = [key for key in keys if key not in spec.inputs]
            if lacking := [key for key in self.out_keys if again.get(key, None) is None]:
                raise ConfigurationError(
                    f"the policy writes {lacking[0]!r} when it is asked first, and not when it is "
                    "asked again: it must write the same entries each time"
                )
            following = self(written.select(*self.out_keys).update(_trial(spec, self)))
        first, second, third = (
            [td[k] for k in self.out_keys] for td in (written, again, following)
        )
        if not differ(first, second) and differ(first, third):
            raise ConfigurationError(
                "the policy reads what it wrote in the step before, which no actor keeps: a memory "
                "needs a TensorDictModule, which writes it under 'next'"
            )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add what the function writes, ``[B, ...]`` each."""
        written = self.function(tensordict.copy())
        if not isinstance(written, TensorDictBase | Mapping):
            raise ConfigurationError(
                f"the policy is a function, and returned a {type(written).__name__}: a TensorDict "
                "with the action is needed"
            )
        return tensordict.update(written)


def _trained_modules(function: Any) -> list[str]:  # noqa: ANN401
    """Return the names by which a function, but no module, knows modules that may be trained."""
    if isinstance(function, nn.Module):
        return []
    known = {**getattr(function, "__dict__", {}), "self": getattr(function, "__self__", None)}
    with contextlib.suppress(TypeError):  # of what is no function of Python's
        variables = inspect.getclosurevars(function)
        known |= {**variables.globals, **variables.nonlocals}
    modules = {name: each for name, each in known.items() if isinstance(each, nn.Module)}
    return [n for n, each in modules.items() if any(p.requires_grad for p in each.parameters())]


def as_policy(policy: Policy, spec: EnvSpec) -> TensorDictModuleBase:
    """Return a TensorDict policy; a plain module is wrapped where that is obvious.

    A plain module maps the one observation to logits (discrete actions), or to the action or a pair
    of mean and standard deviation (continuous actions). A function reads and writes a TensorDict,
    as does a module whose one argument is called ``tensordict`` or ``td``. TorchRL's
    ``RandomPolicy`` becomes a module whose draws belong to the environments; it and an
    ``AdditiveGaussianModule`` are given the environment's spec, in place, if they have none. Lazy
    layers are initialised. What ``torch.compile`` returned acts as the module that it was given.

    Raises:
        ConfigurationError: if it is not obvious, or if the policy reads what nobody provides.
    """
    if isinstance(policy, RandomPolicy):
        if policy.action_spec is None:
            policy.action_spec = tensor_spec_of(spec.action)
        _require_all_actions(policy.action_spec, spec.action)
        return RandomActions(spec)
    acts, kind = callable(policy) and not isinstance(policy, type), type(policy).__name__
    require(acts, f"policy of type {kind}", "a module or a function of a TensorDict")
    if not isinstance(policy, nn.Module):
        return FunctionPolicy(policy, spec)
    policy = uncompiled(policy)
    require_module(policy)
    if isinstance(policy, TensorDictModuleBase):
        _complete(policy, spec)
        require_called(policy)
        require_readable(policy, spec)
        initialise(policy, spec)
        return policy
    _refuse_wrapper(policy)
    if list(_signature(policy).parameters) in (["tensordict"], ["td"]):
        return FunctionPolicy(policy, spec)
    return _with_keys(policy, spec)


def made_by(
    factory: Callable[[], Policy], spec: EnvSpec, draws: torch.Tensor
) -> TensorDictModuleBase:
    """Return the policy of a factory that draws from torch's generator, in this state."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(draws)
        return as_policy(factory(), spec)


def _with_keys(module: nn.Module, spec: EnvSpec) -> TensorDictModuleBase:
    """Wrap a plain module, which maps the one observation to what :func:`as_policy` says."""
    _complete(module, spec)
    if len(spec.observations) != 1:
        raise ConfigurationError(
            f"a plain module cannot tell the observations {sorted(map(str, spec.observations))} "
            "apart; wrap the policy in a TensorDictModule with in_keys"
        )
    try:
        _signature(module).bind(None)
    except TypeError as error:
        raise ConfigurationError(
            f"a plain module is given the one observation, but {type(module).__name__}.forward is "
            f"{error}; wrap the policy in a TensorDictModule with in_keys"
        ) from error
    if spec.action.kind == "continuous" and _writes_action(module, spec):
        return TensorDictModule(module, list(spec.observations), [spec.action.key])
    keys = parameter_keys(spec.action)
    whole = ProbabilisticTensorDictSequential(
        TensorDictModule(module, in_keys=list(spec.observations), out_keys=keys),
        action_head(spec.action),
    )
    initialise(whole, spec)
    return whole


def _require_all_actions(given: TensorSpec, action: ActionSpec) -> None:
    """Refuse a RandomPolicy's spec of other actions than the environment's, which are sampled."""
    leaves = [*given.values(True, True)] if isinstance(given, Composite) else [given]
    for leaf in leaves if len(leaves) == 1 else ():
        same = True
        if isinstance(leaf, Bounded) and action.kind == "continuous":
            bounds = ((leaf.space.low, action.low), (leaf.space.high, action.high))
            same = leaf.shape[-1:] == action.array.shape[-1:] and all(
                theirs is not None
                and torch.allclose(ours.double(), torch.as_tensor(theirs).double())
                for ours, theirs in bounds
            )
        elif isinstance(leaf, Categorical | OneHot) and action.kind in ("discrete", "one_hot"):
            same = getattr(leaf.space, "n", None) == action.sizes[0]
        if not same:
            raise ConfigurationError(
                f"the RandomPolicy's spec is {in_one_line(leaf)}, but the environment's actions "
                f"are those of {in_one_line(tensor_spec_of(action))}, and all of these are drawn: "
                "leave its spec out, or give the environment's"
            )


def _signature(module: nn.Module) -> inspect.Signature:
    """Return how a module is called; torch says nothing of one that it has traced."""
    try:
        return inspect.signature(module.forward)
    except ValueError:
        return inspect.signature(nn.Identity().forward)


def _refuse_wrapper(module: nn.Module) -> None:
    """Refuse what hands any arguments on to a TensorDict policy, as Fabric and DDP wrap one."""
    children = [*module.children()]
    kinds = {each.kind for each in _signature(module).parameters.values()}
    hands_on = kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    if hands_on and len(children) == 1 and isinstance(children[0], TensorDictModuleBase):
        raise ConfigurationError(
            f"policy of type {type(module).__name__}: actors call the modules of the "
            f"{type(children[0]).__name__} in it one by one, and what wraps it would do nothing; "
            "give that policy itself"
        )


def _writes_action(module: nn.Module, spec: EnvSpec) -> bool:
    """Return whether a plain module answers the observation with one tensor, and not a pair."""
    seen = _trial(spec, module).select(*spec.observations).values()
    with contextlib.suppress(RuntimeError), evaluating(module), torch.no_grad():
        return isinstance(module(*seen), torch.Tensor)
    return False  # it does not fit, which is told where it is examined


def _trial(spec: EnvSpec, policy: nn.Module) -> TensorDict:
    """Return two rows of all that a policy may read, where its weights are."""
    weights = itertools.chain(policy.parameters(), policy.buffers())
    device = next((each.device for each in weights), torch.device("cpu"))
    return TensorDict({k: rows.to(device) for k, rows in first_inputs(spec, 2).items()}, [2])


def _complete(policy: nn.Module, spec: EnvSpec) -> None:
    """Give modules that explore the spec of actions that they lack, as TorchRL's collector does."""
    for module in policy.modules():
        if isinstance(module, AdditiveGaussianModule) and module.spec is None:
            module.spec = tensor_spec_of(spec.action)
        elif isinstance(module, EGreedyModule) and module.spec is None:
            kind = type(tensor_spec_of(spec.action)).__name__
            raise ConfigurationError(
                f"the policy has an EGreedyModule without a spec: give it torchrl's {kind} of the "
                f"environment's actions ({spec.action.kind} {list(spec.action.sizes)})"
            )


def initialise(policy: TensorDictModuleBase, spec: EnvSpec) -> None:
    """Give lazy layers their shapes and first weights, by one pass.

    Raises:
        ConfigurationError: if the policy cannot read the observation.
    """
    if any(map(is_lazy, policy.state_dict().values())):
        try:
            # The Trainer asks where tensors are made on the learner's GPU.
            with torch.device("cpu"), evaluating(policy), torch.no_grad():
                policy(_trial(with_memory(policy, spec), policy))
        except RuntimeError as error:
            raise misfit(spec, error) from error
