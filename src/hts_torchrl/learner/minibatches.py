"""The minibatches of a round: which of its samples each part has.

Shapes: N environments, T steps of a round; B samples of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from hts_torchrl.errors import ConfigurationError, require_counts
from hts_torchrl.learner.gradient_chunks import RUNNING
from hts_torchrl.training.round_slice import RoundSlice

if TYPE_CHECKING:
    from hts_torchrl.learner.ppo import PPO
    from hts_torchrl.learner.pqn import PQN


class Minibatches:
    """Cuts the samples of each round into minibatches, in a new order each epoch.

    A part of a round has one minibatch of each of this rank's chunks, which are one without
    ``gradient_chunks``::

        minibatch = minibatches.of(samples, part, index)    # all samples of this rank are given
        RUNNING.rows                                        # which of them it has

    Args:
        learner: with ``epochs``, the passes over a round, and ``minibatches``, the parts of each.

    Raises:
        ConfigurationError: if there are none.
    """

    def __init__(self, learner: PPO | PQN) -> None:
        require_counts(learner, "epochs", "minibatches")
        self._learner = learner
        self._orders: dict[int, tuple[tuple[int, int], tuple[Tensor, ...]]] = {}
        """Of an epoch (update, epoch), by this rank's chunk."""
        self._update = -1
        """Of which there are samples."""

    def lack_samples(self, part: RoundSlice) -> bool:
        """Return whether a round's samples are yet to be made, as they are from then on.

        A subclass may leave out the first parts of a round.
        """
        before, self._update = self._update, self._learner.updates
        return part.is_first or before != self._update

    def of(self, samples: TensorDictBase, part: RoundSlice, index: int) -> TensorDictBase:
        """Return the samples of a minibatch, ``[B]``, or the sequences ``[N, T]``."""
        rows = RUNNING.rows = self.rows_of(part, index, of=len(samples))
        # index_select copies whole rows; indexing copies pixel by pixel, 8 times slower.
        return samples.apply(
            lambda entry: entry.index_select(0, rows), batch_size=[len(rows), *samples.shape[1:]]
        )

    def rows_of(self, part: RoundSlice, index: int = 0, *, of: int | None = None) -> Tensor:
        """Return which of the round's samples a part has, int64 ``[B]``.

        Of a policy with a memory these are environments, each with its whole sequence.

        Args:
            part: of the round.
            index: of this rank's chunk.
            of: number of samples on this rank, from which a subclass may have left some out, or to
                which it may have added some; None is one for each frame.

        Raises:
            ConfigurationError: if the samples cannot be divided so.
        """
        epoch, minibatch = divmod(part.index, self._learner.minibatches)
        which, known = (self._learner.updates, epoch), self._orders.get(index)
        # A subclass may have left out the first minibatch of the epoch.
        if minibatch == 0 or known is None or known[0] != which:
            known = self._orders[index] = which, self._order(part, epoch, index, of)
        return known[1][minibatch]

    def _order(
        self, part: RoundSlice, epoch: int, index: int, samples: int | None
    ) -> tuple[Tensor, ...]:
        """Return the minibatches of an epoch, of this rank's chunk of an index."""
        learner = self._learner
        usual = len(part.round) if learner.remembers else part.round.numel()
        samples = usual if samples is None else samples
        count = samples // len(learner.chunks.own)
        if count % learner.minibatches or not count:
            several = learner.gradient_chunks > 1
            of = f"a chunk (gradient_chunks={learner.gradient_chunks})" if several else "a round"
            whole = f"environments of {of}, whose sequences stay whole"
            frames = "frames" if samples == usual else "samples"
            what = whole if learner.remembers else f"{frames} of {of}"
            raise ConfigurationError(
                f"minibatches={learner.minibatches} does not divide the {count} {what}"
            )
        chunk = learner.chunks.own[index]
        # The same on all ranks, of the same chunk.
        entropy = (learner.seed % 2**64, learner.updates, epoch, *([chunk] if chunk else []))
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(count, generator=generator).to(learner.device) + index * count
        return order.chunk(learner.minibatches)
