"""Several passes over a round, in minibatches of its samples.

Shapes: N environments, T steps of a round; B samples of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from hts_torchrl.errors import ConfigurationError, require
from hts_torchrl.learner.base import Learner
from hts_torchrl.training.round_slice import RoundSlice


class MinibatchLearner(Learner):
    """Learns from each round in ``epochs`` passes, and from each pass in ``minibatches`` parts.

    A round is ``epochs * minibatches`` steps of the Trainer. A subclass says what is learned from,
    once a round, and the loss of a minibatch::

        samples = self.samples_to_learn(round)   # with the first part
        loss = self.loss(minibatch)              # with each

    Args:
        epochs: passes over a round.
        minibatches: parts of each pass.
    """

    def __init__(
        self,
        policy: nn.Module | None = None,
        *,
        epochs: int = 4,
        minibatches: int = 4,
        **settings: Any,  # noqa: ANN401 - those of Learner
    ) -> None:
        super().__init__(policy, **settings)
        require(epochs > 0, f"epochs={epochs}", "1 or more")
        require(minibatches > 0, f"minibatches={minibatches}", "1 or more")
        self.epochs, self.minibatches = epochs, minibatches
        self.parts_per_pass = minibatches
        self._minibatches: dict[int, tuple[Tensor, ...]] = {}
        """Of the running epoch, by this rank's chunk."""
        self._rows = torch.empty(0, dtype=torch.int64)
        """Which of the round's samples the running minibatch has."""

    @property
    def parts_per_round(self) -> int:
        """Minibatches of all epochs: gradient computations on each round."""
        return self.epochs * self.minibatches

    def training_step(self, part: RoundSlice, _: int) -> Tensor:
        """Return the loss of one minibatch."""
        with self.learning_from(part):
            if part.is_first:
                self.samples = self.samples_by_chunks(part.round, self.samples_to_learn)
                self.on_samples_ready(self.samples)
            return self.loss_by_chunks(lambda index: self.loss(self._minibatch(part, index)))

    def _minibatch(self, part: RoundSlice, index: int) -> TensorDictBase:
        rows = self._rows = self.minibatch_of(part, index)
        # index_select copies whole rows; indexing copies pixel by pixel, 8 times slower.
        return self.samples.apply(
            lambda entry: entry.index_select(0, rows),
            batch_size=[len(rows), *self.samples.shape[1:]],
        )

    @property
    def in_first_epoch(self) -> bool:
        """Whether the round's samples are learned from for the first time."""
        return self.part.index < self.minibatches

    def keep_in_round(self, samples: TensorDictBase, **entries: Tensor) -> None:
        """Put entries into a minibatch, and into the round's samples for the epochs to come.

        Args:
            samples: what :meth:`loss` was given; they have these entries already.
            entries: of its B samples.
        """
        for key, entry in entries.items():
            samples[key] = entry
            self.samples[key].index_copy_(0, self._rows, samples[key])

    def samples_to_learn(self, batch: TensorDictBase) -> TensorDictBase:
        """Return what is learned from a round: :meth:`samples_of` it, with targets.

        Args:
            batch: the round ``[N, T]``; with ``gradient_chunks``, each chunk of it.
        """
        raise NotImplementedError

    def on_samples_ready(self, samples: TensorDictBase) -> None:
        """Called once a round, with all samples of this rank; does nothing by itself.

        Args:
            samples: of all chunks, one after another; may be changed in place.
        """

    def loss(self, samples: TensorDictBase) -> Tensor:
        """Return the loss of B samples, which have what :meth:`samples_to_learn` adds."""
        raise NotImplementedError

    def minibatch_of(self, part: RoundSlice, index: int = 0) -> Tensor:
        """Return which of the round's samples a part has, int64 ``[B]``: a new order each epoch.

        Of a policy with a memory these are environments, each with its whole sequence.

        Args:
            part: of the round.
            index: of this rank's chunk; a minibatch has as many samples of each.

        Raises:
            ConfigurationError: if the samples cannot be divided so.
        """
        samples = len(part.round) if self.remembers else part.round.numel()
        count = samples // len(self.chunks.own)
        if count % self.minibatches:
            several = self.gradient_chunks > 1
            of = f"a chunk (gradient_chunks={self.gradient_chunks})" if several else "a round"
            whole = f"environments of {of}, whose sequences stay whole"
            what = whole if self.remembers else f"frames of {of}"
            raise ConfigurationError(
                f"minibatches={self.minibatches} does not divide the {count} {what}"
            )
        epoch, minibatch = divmod(part.index, self.minibatches)
        if minibatch == 0:
            chunk = self.chunks.own[index]
            # The same on all ranks, of the same chunk.
            entropy = (self.seed % 2**64, self.updates, epoch, *([chunk] if chunk else []))
            seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(count, generator=generator).to(self.device) + index * count
            self._minibatches[index] = order.chunk(self.minibatches)
        return self._minibatches[index][minibatch]
