"""What a policy cannot have, because a pass asks its modules one by one, or actors get copies."""

from __future__ import annotations

from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor, nn

from hts_torchrl.compat.tensordict import drawing_options
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.actor_critic import ActorCritic
from hts_torchrl.policy.forward import is_fused, is_of_a_library, is_sequence, users_call

_NOT_ASKED = ("get_dist_params", "heads")
"""Methods of sequences, and of :class:`ActorCritic`, in whose place the modules are asked."""


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
