"""What a policy cannot have where its modules are asked one by one, by actors that get copies."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchrl.data import Bounded
from torchrl.modules import (
    ConsistentDropoutModule,
    MultiStepActorWrapper,
    TanhNormal,
    TruncatedNormal,
)

from hts_torchrl.compat.tensordict import drawing_options
from hts_torchrl.compat.torch import compiles_calls, hooks_of, tree_leaves, uncompiled
from hts_torchrl.errors import ConfigurationError, in_one_line, require
from hts_torchrl.models.actor_critic import ActorCritic
from hts_torchrl.policy.forward import (
    heads_of,
    is_fused,
    is_of_lightning,
    modules_of,
    users_call,
    users_method,
    written_by,
)
from hts_torchrl.policy.sampling import specs_of
from hts_torchrl.specs import IS_INIT, ActionSpec, EnvSpec, Key, path_of


def require_module(policy: object) -> None:
    """Refuse what is no module that acts.

    Raises:
        ConfigurationError: if it is none, or a learner, which has one.
    """
    kind = type(policy).__name__
    hint = " (network=... names one of this package)" if isinstance(policy, str) else ""
    require(isinstance(policy, nn.Module), f"policy of type {kind}{hint}", "a module")
    if hasattr(type(policy), "learning_from"):
        raise ConfigurationError(f"policy of type {kind}, which learns; its own policy is needed")


def require_called(policy: nn.Module, *, learns: bool = False) -> None:
    """Refuse what only a call of the policy would do, or a method that no pass asks.

    A pass calls neither the probabilistic module, which is asked for its distribution, nor the
    sequences that hold it, whose other modules run one by one.

    Args:
        policy: as a user gave it.
        learns: whether a learner has it, which does not ask its ``get_dist``, as losses do, and
            calls no compiled policy.
    """
    require_module(policy)
    for name, parameter in policy.named_parameters():
        if parameter.is_meta:
            raise ConfigurationError(
                f"the policy's {name} is on the device 'meta', where it has no value: call "
                "policy.to_empty(device='cpu'), and load its weights or draw them"
            )
    if learns and (uncompiled(policy) is not policy or compiles_calls(policy)):
        raise ConfigurationError(
            "a learner calls the modules of its policy one by one, so torch.compile(policy) would "
            "do nothing, nor would policy.compile(); compile modules within it, or set "
            "compile_policy for its actors"
        )
    heads = {each for each in policy.modules() if isinstance(each, ProbabilisticTensorDictModule)}
    for name, module in policy.named_modules():
        if any(map(is_of_lightning, hooks_of(module))):
            raise ConfigurationError(
                f"the policy's {named(module, name)} has a hook of Lightning's PyTorchProfiler, "
                "and actors get copies of it: give the Trainer "
                "PyTorchProfiler(record_module_names=False)"
            )
        is_head = module in heads
        is_sequence = isinstance(module, TensorDictSequential)
        if not is_head and not (is_sequence and heads & {*module.modules()}):
            continue
        names = [] if is_head else _not_asked(module, learns=learns)
        if code := users_call(module) or users_method(module, *names):
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


def _not_asked(sequence: nn.Module, *, learns: bool) -> list[str]:
    """Return the methods of a sequence in whose place its modules are asked."""
    names = ["get_dist_params", "heads", *(["get_dist"] if learns else [])]
    if isinstance(sequence, ActorCritic) and not is_fused(sequence):
        names += ["fused", "distribution"]
    return names


def require_readable(policy: nn.Module, spec: EnvSpec) -> None:
    """Refuse what reads an entry that nobody provides, or writes one that nobody can use."""
    names = {module: name for name, module in policy.named_modules()}
    steps = list(modules_of(policy))
    known = {path_of(key) for key in spec.observations} | {(IS_INIT,)}
    primed = {path_of(key) for key in spec.memory.initial}
    actions = {path_of(key) for head in heads_of(policy) for key in head.dist_sample_keys}
    if covered := [key for key in actions if _overlaps(key, known)]:
        raise ConfigurationError(
            f"the policy writes an action to {_shown(covered[0])}, where the environment observes "
            f"something: write it to {('action', *covered[0])}"
        )
    remembered = {key[1:] for key in written_by(*steps) if key[0] == "next"}
    read: set[tuple[str, ...]] = set()
    for module in steps:
        step = named(module, names.get(module, ""))
        _refuse_kept_outside(module, step)
        own = [path_of(key) for key in getattr(module, "in_keys", ())]
        read.update(own)
        for key in own:
            if key in remembered or _overlaps(key, known):
                continue
            if key in primed:
                raise ConfigurationError(
                    f"the policy's {step} reads {_shown(key)}, with which the environment's "
                    f"TensorDictPrimer begins, but no module writes {('next', *key)}: keep what "
                    "stays the same in a buffer of the policy"
                )
            raise ConfigurationError(
                f"the policy's {step} reads {_shown(key)}, which is none of the observations "
                f"{sorted(map(str, spec.observations))}, and which no earlier module writes; a "
                f"memory is written as {('next', *key)}"
            )
        written = written_by(module)
        if actions & known & written:
            raise ConfigurationError(
                f"the policy's {step} changes an action that was drawn, whose log-probability "
                "would be another's: exploration belongs into the distribution"
            )
        if actions & known & {*own}:
            raise ConfigurationError(
                f"the policy's {step} reads the action, which is drawn when all modules have run: "
                "compute from the batch what depends on it"
            )
        known |= written
    if unread := sorted(remembered - read):
        raise ConfigurationError(
            f"the policy writes {('next', *unread[0])} for the next step, but no module reads "
            f"{_shown(unread[0])}"
        )


def _refuse_kept_outside(module: nn.Module, step: str) -> None:
    """Refuse TorchRL's modules that keep what no actor does, beside ``next``."""
    if isinstance(module, MultiStepActorWrapper):
        raise ConfigurationError(
            f"the policy's {step} reads the actions that it wrote in an earlier step, which no "
            "actor keeps: give a policy that writes one action in each step"
        )
    if isinstance(module, ConsistentDropoutModule):
        raise ConfigurationError(
            f"the policy's {step} drops in train mode only, and actors run a policy in eval "
            "mode: leave it out, and let the distribution or a NoisyLinear explore"
        )


def _overlaps(key: tuple[str, ...], known: Iterable[tuple[str, ...]]) -> bool:
    """Return whether an entry is one of the known ones, in one of them, or has one in it."""
    return any(key == other[: len(key)] or other == key[: len(other)] for other in known)


def _shown(path: tuple[str, ...]) -> str:
    return repr(path[0] if len(path) == 1 else path)


def require_copyable(policy: nn.Module) -> None:
    """Refuse weights that a hook computes from others: torch copies no module that holds them."""
    for name, module in policy.named_modules():
        parameters = {key for key, _ in module.named_parameters(recurse=False)}
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and not parameters.isdisjoint({f"{key}_orig", f"{key}_g"}):
                raise ConfigurationError(
                    f"the policy's {named(module, name)} computes its {key!r} in a hook, and torch "
                    "cannot copy it for the actors: use torch.nn.utils.parametrizations in place "
                    "of torch.nn.utils.weight_norm or spectral_norm, and a parametrization in "
                    "place of prune, with num_actors=0"
                )


def require_tensors(policy: nn.Module) -> None:
    """Refuse state that is no dense tensor: no file and no actor takes it."""
    for name, value in policy.state_dict().items():
        if not isinstance(value, Tensor) or is_lazy(value) or value.layout != torch.strided:
            kind = value.layout if type(value) is Tensor else type(value).__name__
            raise ConfigurationError(
                f"the policy's state_dict() has {name!r}, a {kind}, but actors and files get dense "
                "tensors only: quantise an exported policy, and keep other state in buffers"
            )


def copied(policy: nn.Module) -> nn.Module:
    """Return a copy of a policy, without the graphs of what its modules keep of their last pass.

    Raises:
        ConfigurationError: naming the attribute, if the copy of one fails.
    """
    own = [(name, module, vars(module)) for name, module in policy.named_modules()]
    kept = [leaf for *_, attributes in own for leaf in tree_leaves(attributes)]
    of_passes = [leaf for leaf in kept if isinstance(leaf, Tensor) and not leaf.is_leaf]
    memo: dict[int, Any] = {id(leaf): leaf.detach().clone() for leaf in of_passes}
    try:
        return copy.deepcopy(policy, dict(memo))
    except Exception as error:
        for name, module, attributes in reversed(own):  # others may hold the inner ones again
            for key in attributes.keys() - {"_modules"}:
                try:
                    copy.deepcopy(attributes[key], dict(memo))
                except Exception as reason:
                    raise ConfigurationError(
                        f"the policy's {named(module, name)} cannot be copied for the actors: its "
                        f"{key!r} ({type(reason).__name__}: {in_one_line(reason)}); keep "
                        "it outside of the policy"
                    ) from error
        raise


def named(module: nn.Module, name: str) -> str:
    """Return a module as a user knows it: its class, and its name within the policy."""
    return f"{type(module).__name__} ({name})" if name else type(module).__name__


def require_fitting_specs(
    head: ProbabilisticTensorDictModule, parts: Mapping[Key, ActionSpec]
) -> None:
    """Refuse a ``safe`` module whose specs are not those of the environment's actions."""
    for key, spec in specs_of(head).items():
        part, shape = parts[key], tuple(spec.shape)
        if len(shape) > len(part.array.shape):
            raise ConfigurationError(
                f"the policy has safe=True and a spec of {key!r} of shape {shape}, but an action "
                f"of one environment has the shape {part.array.shape}: give it that one's spec"
            )
        choices = getattr(spec.space, "n", None)
        if choices is not None and choices != max(part.sizes, default=0):
            raise ConfigurationError(
                f"the policy has safe=True and a spec of {key!r} of {choices} choices, but the "
                f"environment's are {part.kind} {list(part.sizes)}: give it the environment's spec"
            )


def require_unclamped(head: ProbabilisticTensorDictModule) -> None:
    """Refuse a ``safe`` module that clamps numbers which it has drawn out of bounds.

    Its log-probability is that of the draw, and a learner would find that of the bound.
    """
    for key, spec in specs_of(head).items():
        clamps = isinstance(spec, Bounded) and spec.dtype.is_floating_point
        if clamps and head.distribution_class not in (TanhNormal, TruncatedNormal):
            raise ConfigurationError(
                f"the policy has safe=True, which clamps {key!r} to its bounds, and a batch has "
                "the log-probability of what was drawn: take TanhNormal, which stays within, or "
                "leave safe=True out, as a Box clips what it is given"
            )


def misfit(spec: EnvSpec, error: Exception) -> ConfigurationError:
    """Return the refusal of a policy whose pass of an environment's inputs ended in an error."""
    observations = {str(key): array.shape for key, array in spec.inputs.items()}
    return ConfigurationError(
        f"the policy does not fit the environment (observations of shape {observations}, "
        f"actions of shape {spec.action.array.shape}): {in_one_line(error)}"
    )
