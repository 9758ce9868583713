"""Layers that do one thing where a policy learns, in train mode, and another where it acts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from hts_torchrl.config import Key
from hts_torchrl.policy import evaluate
from hts_torchrl.policy_probe import described, modules_of_two_modes


def layers_of_two_modes(policy: nn.Module, observations: dict[Key, Tensor]) -> list[nn.Module]:
    """Return the layers whose outputs in train mode are not those of eval mode, with a warning.

    Layers that are in eval mode stay there, and are not among them.

    Args:
        policy: as it learns; it does not change.
        observations: by key, ``[B, ...]``.
    """
    rows = next(iter(observations.values())).shape[0]
    names = modules_of_two_modes(policy, lambda copied: evaluate(copied, observations, rows))
    if names:
        rank_zero_warn(
            f"the policy learns in train mode and acts in eval mode, and these do different things "
            f"there: {described(policy, names)}. So the policy that learns is not the one that "
            "acted, and ratios are off from the start: remove them, put LayerNorm in place of "
            "BatchNorm, or call eval() on them before fit, which keeps them in that mode"
        )
    return [policy.get_submodule(name) for name in names]


@contextlib.contextmanager
def evaluating(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Put layers into eval mode for a while."""
    learning = [module for layer in layers for module in layer.modules() if module.training]
    for module in learning:
        module.training = False
    try:
        yield
    finally:
        for module in learning:
            module.training = True
