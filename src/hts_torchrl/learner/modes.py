"""Train mode: layers that do other things in it than where a policy acts, and what is sampled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDictBase
from torch import Tensor, nn

from hts_torchrl.envs.own_generators import NUMPY, PYTHON
from hts_torchrl.errors import ConfigurationError, ProtocolError
from hts_torchrl.policy.forward import evaluate, inputs_of
from hts_torchrl.policy.limits import copied
from hts_torchrl.policy.probe import (
    OTHERS,
    described,
    differ,
    drawing_modules,
    modules_of_two_modes,
    noting_draws,
)
from hts_torchrl.policy.sampling import borrowed_generators
from hts_torchrl.specs import Key

_FEW = 64
"""Rows on which a policy is examined."""


def layers_of_two_modes(policy: nn.Module, observations: dict[Key, Tensor]) -> list[nn.Module]:
    """Return the layers whose outputs in train mode are not those of eval mode, with a warning.

    Layers that are in eval mode stay there, and are not among them.

    Raises:
        ConfigurationError: if the policy changes what it reads.
    """
    rows = next(iter(observations.values())).shape[0]
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


class SeededDraws:
    """What a policy samples while it learns: decided by a seed, or refused.

    The first part of a run also looks for layers that do another thing in eval mode. What hooks,
    callbacks and optimisers draw besides is decided by the seed of the round::

        begin_round(seed, device)
        with seeded(seed, ...): ...         # for each part
        end_round()

    Args:
        inspects: look for such layers and such draws in the first part.
        watches: look for draws in every part.
    """

    def __init__(self, *, inspects: bool = False, watches: bool = False) -> None:
        self.layers_of_two_modes: list[nn.Module] = []
        self._inspects, self._watches = inspects, watches
        self.reseed: Callable[[int], None] = _refuse_seed
        """Seeds the generators again, within :meth:`seeded`."""
        self._at_round_end = contextlib.ExitStack()
        """Puts the generators back."""

    def begin_round(self, seed: int, device: torch.device) -> None:
        """Seed the global generators, numpy's and Python's too, until the end of the round.

        All ranks give the same seed, so that what a callback draws for weights is the same on all.
        """
        self.end_round()
        seed_generators = self._at_round_end.enter_context(borrowed_generators(device))
        for generator in (NUMPY, PYTHON):
            self._at_round_end.callback(generator.put, generator.state())
        NUMPY.put(NUMPY.new())  # the user's may be one that cannot be seeded again
        for seed_one in (seed_generators, NUMPY.seed, PYTHON.seed):
            seed_one(seed)

    def end_round(self) -> None:
        """Let the generators be as they were before it."""
        self._at_round_end.close()

    @contextlib.contextmanager
    def seeded(
        self, seed: int, policy: nn.Module, batch: TensorDictBase, device: torch.device
    ) -> Iterator[None]:
        """Seed torch's global generators for a while; they are as before afterwards.

        They are the CPU's, and that of a device that is a GPU.

        Raises:
            ConfigurationError: if the policy drew from a generator that nobody seeds.
        """
        watches = self._inspects or self._watches
        with borrowed_generators(device) as seed_generators:
            if self._inspects:
                self.layers_of_two_modes = layers_of_two_modes(policy, _few(policy, batch))
                self._inspects = False
            self.reseed = seed_generators
            seed_generators(seed)
            try:
                with noting_draws(OTHERS) if watches else contextlib.nullcontext(()) as drawn:
                    yield
            finally:
                self.reseed = _refuse_seed
            for generator in drawn:
                _refuse_draws(policy, _few(policy, batch), generator)


def _few(policy: nn.Module, batch: TensorDictBase) -> dict[Key, Tensor]:
    """Return what a policy reads at the first steps of a round, by key, ``[B, ...]``."""
    return {key: batch[key].flatten(0, 1)[:_FEW] for key in inputs_of(policy)}


def _refuse_seed(_: int) -> None:
    raise ProtocolError("generators are seeded within learning_from()")


def _refuse_draws(policy: nn.Module, observations: dict[Key, Tensor], generator: str) -> None:
    # Run again, and a copy, because another thread may have sampled.
    rows = next(iter(observations.values())).shape[0]
    names = drawing_modules(
        copied(policy), lambda other: evaluate(other, observations, rows), generator
    )
    if names:
        raise ConfigurationError(
            f"the policy draws from {generator} in train mode, in {described(policy, names)}: "
            "torch's generator alone is seeded for each part of an update, and for each chunk"
        )
