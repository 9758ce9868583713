"""The trunk of a network by its name, held against what it has to read."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.impala import ImpalaResNet, SeedResNet
from hts_torchrl.models.mlp import MLP
from hts_torchrl.models.nature import NatureCNN, NipsCNN, PixelTrunk
from hts_torchrl.models.recurrent import CELLS, Cell
from hts_torchrl.specs import ArraySpec

BUILT_IN_TRUNKS: dict[str, Callable[[tuple[int, ...]], nn.Module]] = {
    "nature": NatureCNN,
    "nips": NipsCNN,
    "impala": ImpalaResNet,
    "seed": SeedResNet,
    "mlp": MLP,
}


def is_built_in(network: str) -> bool:
    """Return whether a network is one of this package, by its name: nothing is imported for it."""
    trunk, cell = parts_of(network)
    return trunk in BUILT_IN_TRUNKS or (trunk == "" and cell is not None)


def parts_of(network: str) -> tuple[str, Cell | None]:
    """Return the name of the trunk, "" for the usual one, and the memory behind it, if any."""
    trunk, _, last = network.rpartition("+")
    for cell in CELLS:
        if last == cell:
            return trunk, cell
    return network, None


def make_trunk(
    network: str,
    observation: ArraySpec,
    *,
    several_players: bool = False,
    what: str = "observations",
) -> nn.Module:
    """Build the trunk of one observation.

    Args:
        network: name of a built-in trunk, or ``module.Class`` of one of yours.
        observation: what it reads.
        several_players: whether the first dimension is that of players, and none of the trunk's.
        what: the observation's name in messages.

    Raises:
        ConfigurationError: if there is no such trunk, or it cannot read the observation.
    """
    make = _trunk(network)
    try:
        trunk = make(observation.shape[1:] if several_players else observation.shape)
        with torch.no_grad():
            trunk(torch.zeros(1, *observation.shape))
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
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
        trunk: Callable[[tuple[int, ...]], nn.Module] = getattr(
            importlib.import_module(module), name
        )
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"no network {network!r}; {', '.join(BUILT_IN_TRUNKS)} or module.Class of a trunk is "
            "needed, with +lstm or +gru for a memory"
        ) from error
    return trunk
