"""What a policy samples while it learns: decided by a seed, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from hts_torchrl.envs.own_generators import NUMPY, PYTHON
from hts_torchrl.learner.modes import layers_of_two_modes, refuse_draws
from hts_torchrl.policy.probe import OTHERS, noting_draws
from hts_torchrl.policy.sampling import borrowed_generators, seed_generators


class SeededDraws:
    """Seeds generators for a round and torch's for each part, and refuses a policy's other draws.

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
        self._numpy = NUMPY.new()  # the user's may be one that cannot be seeded again
        self._at_round_end = contextlib.ExitStack()
        """Puts the generators back."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave a copy nothing to put back."""
        return {**vars(self), "_at_round_end": contextlib.ExitStack()}

    def begin_round(self, seed: int, device: torch.device) -> None:
        """Seed the global generators, numpy's and Python's too, until the end of the round.

        All ranks give the same seed, so that what a callback draws for weights is the same on all.
        """
        self.end_round()
        self._at_round_end.enter_context(borrowed_generators(device))
        seed_generators(device, seed)
        for generator in (NUMPY, PYTHON):
            self._at_round_end.callback(generator.put, generator.state())
        NUMPY.put(self._numpy)
        NUMPY.seed(seed)
        PYTHON.seed(seed)

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
        with borrowed_generators(device):
            if self._inspects:
                self.layers_of_two_modes = layers_of_two_modes(policy, batch)
                self._inspects = False
            seed_generators(device, seed)
            with noting_draws(OTHERS) if watches else contextlib.nullcontext(()) as drawn:
                yield
            for generator in drawn:
                refuse_draws(policy, batch, generator)
