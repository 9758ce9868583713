"""What the name of a network means for an environment: its trunk, its memory, and what it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

import torch
from torch import nn

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.machine import require_memory
from hts_torchrl.models.action_mask import mask_of
from hts_torchrl.models.combined import combined_trunk, is_picture
from hts_torchrl.models.recurrent import Cell
from hts_torchrl.models.trunks import is_built_in, make_trunk, parts_of
from hts_torchrl.specs import COUNTED, IS_INIT, ActionSpec, ArraySpec, EnvSpec, Key

PolicyT = TypeVar("PolicyT", bound=nn.Module)

_NOT_READ = (*COUNTED, IS_INIT)
"""Of ``RewardSum``, ``StepCounter`` and ``InitTracker``, unless nothing else is observed."""


@dataclass(frozen=True)
class NetworkParts:
    """Of which parts a network is built for an environment."""

    trunk: Callable[[], nn.Module]
    """Makes a trunk, which reads the observations in their order."""
    observations: dict[Key, ArraySpec]
    """What the trunk reads: everything but a mask, and what TorchRL's transforms count."""
    memory: Cell | None
    several_players: bool
    """Whether the trunk reads k players as k rows."""

    @classmethod
    def named(cls, network: str, spec: EnvSpec) -> Self:
        """Return the parts of a network.

        Args:
            network: as :func:`~hts_torchrl.make_actor_critic` takes it.
            spec: observations and actions of the environment.

        Raises:
            ConfigurationError: if there is nothing to observe, or players cannot have a memory.
        """
        mask = mask_of(spec)
        # By name: the order in which a space lists its entries decides no bits.
        keys = sorted((key for key in spec.observations if key != mask), key=_path)
        keys = [key for key in keys if key not in _NOT_READ] or keys
        observations = {key: spec.observations[key] for key in keys}
        if not observations:
            raise ConfigurationError(f"the environment has no observation but {mask!r}")
        name, memory = parts_of(network)
        make: Callable[[], nn.Module]
        several_players = False
        if len(keys) == 1:
            (array,) = observations.values()
            several_players = _has_players(array, spec.action)
            if memory is not None and not name:
                name = "nature" if is_picture(array) else "mlp"
            make = partial(make_trunk, name, array, several_players=several_players)
            if name == "mlp" and array.choices:
                make = partial(combined_trunk, name, observations)
        else:
            make = partial(combined_trunk, name if memory is None else name or "mlp", observations)
        if several_players and memory is not None:
            raise ConfigurationError(
                f"the network {network!r} remembers what one player observes, but "
                f"{len(spec.action.sizes)} players act here: leave the memory out"
            )
        return cls(make, observations, memory, several_players)


def built(network: str, spec: EnvSpec, make: Callable[[], PolicyT]) -> PolicyT:
    """Return what ``make`` returns, if there is memory to train it.

    Args:
        network: its name; one that is not built in is made at once.
        spec: of the environment.
        make: makes the network.

    Raises:
        ConfigurationError: if the machine has not the memory, or nobody could.
    """
    if is_built_in(network):
        try:
            with torch.device("meta"):  # where nothing is allocated, nor drawn
                policy = make()
        except (RuntimeError, TypeError) as error:  # torch's, of sizes that it cannot count
            told = str(error).partition("\n")[0]
            raise ConfigurationError(
                f"the network {network!r} of this environment ({_briefly(spec)}) cannot be made: "
                f"{told}"
            ) from error
        size = sum(each.numel() * each.element_size() for each in policy.parameters())
        require_memory(
            4 * size,  # the gradient, and what Adam keeps
            f"the network {network!r} of this environment ({_briefly(spec)}) takes to train",
            "a smaller space is needed",
        )
    return make()


def _briefly(spec: EnvSpec) -> str:
    shapes = [list(array.shape) for array in spec.observations.values()]
    return f"observations {shapes}, actions {list(spec.action.sizes or spec.action.array.shape)}"


def _path(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _has_players(observation: ArraySpec, action: ActionSpec) -> bool:
    """Whether k players each see pictures of their own, and have a choice of the same size."""
    pictures = len(observation.shape) == 4 and observation.shape[0] == len(action.sizes)
    return pictures and action.kind == "multi_discrete" and len(set(action.sizes)) == 1
