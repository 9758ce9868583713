"""Train mode: layers that do other things in it than where a policy acts, and what draws in it."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDictBase
from torch import Tensor, nn

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.policy.forward import evaluate, inputs_of
from hts_torchrl.policy.limits import copied
from hts_torchrl.policy.probe import described, differ, drawing_modules, modules_of_two_modes
from hts_torchrl.specs import Key

_FEW = 64
"""Rows on which a policy is examined."""


def layers_of_two_modes(policy: nn.Module, batch: TensorDictBase) -> list[nn.Module]:
    """Return the layers whose outputs in train mode are not those of eval mode, with a warning.

    Layers that are in eval mode stay there, and are not among them.

    Raises:
        ConfigurationError: if the policy changes what it reads.
    """
    observations, rows = _few(policy, batch)
    given = {key: value.clone() for key, value in observations.items()}
    names = modules_of_two_modes(policy, lambda copied: evaluate(copied, given, rows))
    for key, value in observations.items():
        if differ(value, given[key], tolerance=0.0):
            raise ConfigurationError(
                f"the policy changes {key!r} in place, which a round's other passes read too: let "
                "its modules change a copy, as by x / 255 and not by x.div_(255)"
            )
    if names:
        rank_zero_warn(
            f"the policy learns in train mode and acts in eval mode, and these do different things "
            f"there: {described(policy, names)}. So the policy that learns is not the one that "
            "acted, and ratios are off from the start: remove them, put LayerNorm in place of "
            "BatchNorm, or call eval() on them before fit, which keeps them in that mode"
        )
    return [policy.get_submodule(name) for name in names]


def _few(policy: nn.Module, batch: TensorDictBase) -> tuple[dict[Key, Tensor], int]:
    """Return what a policy reads at the first steps of a round, ``[B, ...]`` by key, and B."""
    few = {key: batch[key].flatten(0, 1)[:_FEW] for key in inputs_of(policy)}
    return few, next(iter(few.values())).shape[0]


def refuse_draws(policy: nn.Module, batch: TensorDictBase, generator: str) -> None:
    """Refuse a policy whose modules draw from a generator that nobody seeds."""
    # Run again, and a copy, because another thread may have sampled.
    observations, rows = _few(policy, batch)
    names = drawing_modules(
        copied(policy), lambda other: evaluate(other, observations, rows), generator
    )
    if names:
        raise ConfigurationError(
            f"the policy draws from {generator} in train mode, in {described(policy, names)}: draw "
            "from torch's, which alone is seeded for each part of an update and each chunk"
        )
