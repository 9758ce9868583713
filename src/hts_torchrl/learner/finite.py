"""Gradients that are not finite end a run before they reach the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.optim import Optimizer

from hts_torchrl.compat.torch import norms
from hts_torchrl.errors import ConfigurationError, NotFiniteError
from hts_torchrl.policy.forward import inputs_of, probabilistic_module
from hts_torchrl.specs import Key, array_name, path_of

DENSE = "gradients are dense here: leave sparse=True of nn.Embedding out"


def require_finite_gradients(
    module: nn.Module,
    optimizer: Optimizer,
    round_: TensorDictBase,
    keys: Iterable[Key],
    *,
    first_env: int,
) -> None:
    """Raise if a gradient has an element that is not finite, and name where that began.

    Only gradients are looked at while all is well: what is not finite in a round reaches them, and
    under a distributed strategy every rank has the same ones, so that all ranks stop together.

    Args:
        module: that names the parameters.
        optimizer: of the parameters whose gradients are looked at.
        round_: the round ``[N, T]`` that they were computed from.
        keys: entries of the round that may have caused it, the most probable first.
        first_env: index of the round's first environment over all ranks.

    Raises:
        ConfigurationError: if a gradient is sparse, naming the parameter.
        NotFiniteError: naming the entry, environment and step, or else the parameter.
    """
    # Going through all modules would take longer than all else here.
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    gradients = [gradient for p in parameters if (gradient := p.grad) is not None]
    if any(gradient.is_sparse for gradient in gradients):
        raise ConfigurationError(
            f"the gradient of {_name_of(module, lambda gradient: gradient.is_sparse)} is sparse, "
            f"and {DENSE}"
        )
    if not gradients or math.isfinite(torch.stack(norms(gradients)).max().item()):
        return
    for key in keys:
        entry = round_.get(key, None)  # a policy without a critic gives no values
        if entry is None or (finite := entry.isfinite()).all():
            continue
        env, step = (~finite).reshape(*round_.shape, -1).any(-1).nonzero()[0].tolist()
        raise NotFiniteError(
            f"{array_name(key)} of environment {first_env + env}, step {step} of its round, "
            "is not finite"
        )
    name = _name_of(module, lambda gradient: not gradient.norm().isfinite())
    raise NotFiniteError(
        f"the gradient of {name} is not finite, though all that was collected is: a lower "
        "learning_rate, or gradient_clip_val, may help"
    )


def _name_of(module: nn.Module, is_sought: Callable[[Tensor], bool]) -> str:
    """Return the first parameter with such a gradient; an optimiser may have other tensors too."""
    named = ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)
    found = (name.removeprefix("policy.") for name, gradient in named if is_sought(gradient))
    return next(found, "a tensor that is no parameter of the module")


def likely_causes(policy: nn.Module) -> Iterator[Key]:
    """Yield what in a round, if it has it, may have made a gradient of a policy infinite or NaN."""
    read = inputs_of(policy)
    yield ("next", "reward")
    yield from (("next", *path_of(key)) for key in read)
    yield from (*read, "state_value", *probabilistic_module(policy).log_prob_keys)
