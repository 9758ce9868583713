"""One step of the trainer: a part of a finished round."""

from __future__ import annotations

from dataclasses import dataclass

from tensordict import TensorDictBase


@dataclass(frozen=True)
class RoundSlice:
    """Which of a round's parts the learner is to work on.

    A round is split because Lightning takes one gradient step, or accumulates one gradient, for
    each batch of its loader: A2C's parts are chunks, PPO's are epochs times minibatches.
    """

    round: TensorDictBase
    """The whole round ``[N, T]``, the same in all of its parts; valid until the next round's."""
    index: int
    """0 to ``count - 1``."""
    count: int
    """Parts of a round."""

    @property
    def is_first(self) -> bool:
        """Return whether the round begins."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Return whether the round ends."""
        return self.index == self.count - 1
