"""What the name of a network means for an environment: its trunk, its memory, and what it reads."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

import numpy as np
import torch
from torch import nn

from hts_torchrl.errors import ConfigurationError, require_type
from hts_torchrl.machine import require_memory
from hts_torchrl.models.combined import CombinedTrunk, is_image
from hts_torchrl.models.layers import evaluating
from hts_torchrl.models.mlp import MLP
from hts_torchrl.models.pixel_trunks import (
    ImpalaResNet,
    NatureCNN,
    NipsCNN,
    PixelTrunk,
    SeedResNet,
)
from hts_torchrl.models.recurrent import CELLS, Cell
from hts_torchrl.specs import COUNTED, IS_INIT, ArraySpec, EnvSpec, Key, path_of

PolicyT = TypeVar("PolicyT", bound=nn.Module)

BUILT_IN_TRUNKS: dict[str, Callable[[tuple[int, ...]], nn.Module]] = {
    "nature": NatureCNN,
    "nips": NipsCNN,
    "impala": ImpalaResNet,
    "seed": SeedResNet,
    "mlp": MLP,
}
_NOT_READ = (*COUNTED, IS_INIT)
"""Of ``RewardSum``, ``StepCounter`` and ``InitTracker``, unless nothing else is observed."""


def is_built_in(network: str) -> bool:
    """Return whether a network is one of this package, by its name: nothing is imported for it."""
    trunk, cell = parts_of(network)
    return trunk in BUILT_IN_TRUNKS or (trunk == "" and cell is not None)


def parts_of(network: str) -> tuple[str, Cell | None]:
    """Return the name of the trunk, "" for the usual one, and the memory behind it, if any."""
    trunk, _, last = network.rpartition("+")
    return (trunk, last) if last in CELLS else (network, None)


def mask_of(spec: EnvSpec) -> Key | None:
    """Return the key of the observation that masks actions, if there is one.

    Raises:
        ConfigurationError: if it does not fit the actions.
    """
    key, action = spec.action_mask, spec.action
    if key is None:
        return None
    shape, wanted = spec.observations[key].shape, (sum(action.sizes),)
    if not action.sizes:
        raise ConfigurationError(
            f"the environment has an observation {key!r}, but its actions are {action.kind}: only "
            "choices can be masked; give the observation another name"
        )
    if shape != wanted:
        raise ConfigurationError(
            f"the observation {key!r} has shape {shape}, but {wanted} is needed: one element for "
            f"each choice of the action ({action.kind} {list(action.sizes)})"
        )
    return key


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

        Raises:
            ConfigurationError: if there is nothing to observe, or players cannot have a memory.
        """
        mask = mask_of(spec)
        # By name: the order in which a space lists its entries decides no bits.
        keys = sorted((key for key in spec.observations if key != mask), key=path_of)
        keys = [key for key in keys if key not in _NOT_READ] or keys
        observations = {key: spec.observations[key] for key in keys}
        if not observations:
            raise ConfigurationError(f"the environment has no observation but {mask!r}")
        array, *others = observations.values()
        name, memory = parts_of(network)
        if memory is not None and not name:
            name = "nature" if is_image(array) and not others else "mlp"
        # Each of k players sees images of its own, and has a choice of the same size.
        sizes, kind = spec.action.sizes, spec.action.kind
        sees_images = len(array.shape) == 4 and array.shape[0] == len(sizes) and not others
        several_players = sees_images and kind == "multi_discrete" and len(set(sizes)) == 1
        make: Callable[[], nn.Module]
        if others or (name == "mlp" and array.choices):
            make = partial(combined_trunk, name, observations)
        else:
            make = partial(make_trunk, name, array, several_players=several_players)
        if several_players and memory is not None:
            raise ConfigurationError(
                f"the network {network!r} remembers what one player observes, but "
                f"{len(sizes)} players act here: leave the memory out"
            )
        return cls(make, observations, memory, several_players)


def built(network: str, spec: EnvSpec, make: Callable[[NetworkParts], PolicyT]) -> PolicyT:
    """Return what ``make`` makes of a network's parts, if there is memory to train it.

    Raises:
        ConfigurationError: if the machine has not the memory, or nobody could.
    """
    require_type("network", network, str, "a name, such as mlp or module.Class,")
    require_type("spec", spec, EnvSpec, "env_spec_of(env)")
    parts = NetworkParts.named(network, spec)
    if is_built_in(network):
        shapes = [list(array.shape) for array in spec.observations.values()]
        seen = (
            f"observations {shapes}, actions {list(spec.action.sizes or spec.action.array.shape)}"
        )
        what = f"the network {network!r} of this environment ({seen})"
        try:
            with torch.device("meta"):  # where nothing is allocated, nor drawn
                policy = make(parts)
        except (RuntimeError, TypeError) as error:  # torch's, of sizes that it cannot count
            told = str(error).partition("\n")[0]
            raise ConfigurationError(f"{what} cannot be made: {told}") from error
        size = sum(each.nbytes for each in policy.parameters())
        require_memory(
            4 * size,  # the gradient, and what Adam keeps
            f"{what} takes to train",
            "a smaller space is needed",
        )
    return make(parts)


def make_trunk(
    network: str,
    observation: ArraySpec,
    *,
    several_players: bool = False,
    what: str = "observations",
) -> nn.Module:
    """Build the trunk of one observation, which messages call ``what``.

    Of ``several_players`` its first dimension is that of players, and none of the trunk's.

    Raises:
        ConfigurationError: if there is no such trunk, or it cannot read the observation.
    """
    make = _trunk(network)
    try:
        trunk = make(observation.shape[1:] if several_players else observation.shape)
        # As they come; floats may be normalised to float32 before.
        dtype = None if observation.dtype.kind == "f" else getattr(torch, observation.dtype.name)
        with evaluating(trunk), torch.no_grad():
            trunk(torch.zeros(1, *observation.shape, dtype=dtype))
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
        too_small = isinstance(error, RuntimeError) and network in ("nature", "nips")
        hint = "; network='impala' reads small images" if too_small else ""
        raise ConfigurationError(
            f"the network {network!r} cannot read {what} of shape {observation.shape}: "
            f"{error}{hint}"
        ) from error
    if not hasattr(trunk, "out_features"):
        raise ConfigurationError(f"the network {network!r} has no out_features, its trunk's width")
    if isinstance(trunk, PixelTrunk) and observation.dtype != np.uint8:
        raise ConfigurationError(
            f"the network {network!r} reads images of uint8 and scales them itself, but these "
            f"are {observation.dtype}: leave out torchrl's ToTensorImage, or give uint8 from 0 to "
            "255 by gymnasium.wrappers.TransformObservation"
        )
    return trunk


def _trunk(network: str) -> Callable[[tuple[int, ...]], nn.Module]:
    if network in BUILT_IN_TRUNKS:
        return BUILT_IN_TRUNKS[network]
    module, _, name = network.rpartition(".")
    try:
        trunk: Callable[[tuple[int, ...]], nn.Module] = pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"no network {network!r}; {', '.join(BUILT_IN_TRUNKS)} or module.Class of a trunk is "
            "needed, with +lstm or +gru for a memory"
        ) from error
    return trunk


def combined_trunk(network: str, observations: Mapping[Key, ArraySpec]) -> CombinedTrunk:
    """Build the trunk of several observations, which is called with them in this order.

    The network reads each image; ``mlp``, which is for vectors, leaves them to ``nature``. Where no
    observation is an image it reads the vector that all are joined to.

    Raises:
        ConfigurationError: if there is no such network, or it cannot read one of them.
    """
    reader = "nature" if network == "mlp" else network
    images = [
        make_trunk(reader, array, what=f"the observation {key!r}")
        for key, array in observations.items()
        if is_image(array)
    ]
    if not images and network in BUILT_IN_TRUNKS and network != "mlp":
        seen = ", ".join(f"{key!r} {array}" for key, array in observations.items())
        raise ConfigurationError(
            f"the network {network!r} reads images (uint8, three dimensions), and none of the "
            f"observations is one: {seen}; 'mlp' reads vectors"
        )
    others = [array for array in observations.values() if not is_image(array)]
    vector = None
    if others:
        size = sum(sum(map(len, array.choices)) or math.prod(array.shape) for array in others)
        joined = ArraySpec((size,), np.dtype(np.float32))
        vector = make_trunk("mlp" if images else network, joined, what="joined observations")
    return CombinedTrunk(list(observations.values()), images, vector)
