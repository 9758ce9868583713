"""What a policy cannot have where its modules are asked one by one, by actors that get copies."""

from __future__ import annotations

from collections.abc import Mapping

from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor, nn

from hts_torchrl.compat.tensordict import drawing_options
from hts_torchrl.compat.torch import compiles_calls, uncompiled
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.actor_critic import ActorCritic
from hts_torchrl.policy.forward import is_fused, is_of_a_library, is_sequence, users_call
from hts_torchrl.policy.projection import specs_of
from hts_torchrl.specs import ActionSpec, EnvSpec, Key

_NOT_ASKED = ("get_dist_params", "heads")
"""Methods of sequences, and of :class:`ActorCritic`, in whose place the modules are asked."""


def require_called(policy: nn.Module, *, learns: bool = False) -> None:
    """Refuse what only a call of the policy would do, or a method that no pass asks.

    A pass calls neither the probabilistic module, which is asked for its distribution, nor the
    sequences that hold it, whose other modules run one by one.

    Args:
        policy: as a user gave it.
        learns: whether a learner has it, which does not ask its ``get_dist``, as losses do, and
            calls no compiled policy.

    Raises:
        ConfigurationError: naming the module, and what would have no effect.
    """
    if learns and (uncompiled(policy) is not policy or compiles_calls(policy)):
        raise ConfigurationError(
            "a learner calls the modules of its policy one by one, so torch.compile(policy) would "
            "do nothing, nor would policy.compile(); compile modules within it, or set "
            "compile_policy for its actors"
        )
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
                    "place of prune, with num_actors=0"
                )


def _users_method(sequence: nn.Module, *, learns: bool) -> str | None:
    """Return which method a user's class has in place of a library's that no pass asks."""
    names = [*_NOT_ASKED, *(["get_dist"] if learns else [])]
    if isinstance(sequence, ActorCritic) and not is_fused(sequence):
        names += ["fused", "distribution"]
    for name in names:
        owners = [kind.__module__ for kind in type(sequence).__mro__ if name in vars(kind)]
        replaced = name in vars(sequence) or (owners and not is_of_a_library(owners[0]))
        if replaced and any(map(is_of_a_library, owners)):
            return f"a {name}"
    return None


def _has_head(module: nn.Module) -> bool:
    return any(isinstance(each, ProbabilisticTensorDictModule) for each in module.modules())


def named(module: nn.Module, name: str) -> str:
    """Return a module as a user knows it: its class, and its name within the policy."""
    return f"{type(module).__name__} ({name})" if name else type(module).__name__


def require_fitting_specs(
    head: ProbabilisticTensorDictModule, parts: Mapping[Key, ActionSpec]
) -> None:
    """Refuse a ``safe`` module whose specs are not those of the environment's actions.

    Raises:
        ConfigurationError: naming the key.
    """
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


def misfit(spec: EnvSpec, error: Exception) -> ConfigurationError:
    """Return the refusal of a policy whose pass of an environment's inputs ended in an error."""
    observations = {str(key): array.shape for key, array in spec.inputs.items()}
    return ConfigurationError(
        f"the policy does not fit the environment (observations of shape {observations}, "
        f"actions of shape {spec.action.array.shape}): {' '.join(str(error).split())}"
    )
