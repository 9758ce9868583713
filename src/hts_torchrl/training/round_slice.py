"""One step of the Trainer: a part of a finished round; and the loader of all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from hts_torchrl.collectors.round_source import RoundSource
from hts_torchrl.errors import ConfigurationError

ONE_EPOCH = "an epoch is the whole run, set Trainer(max_epochs=1)"


@dataclass(frozen=True)
class RoundSlice:
    """The part of a round that the learner processes in one training step.

    A round is split because Lightning takes one gradient step, or accumulates one gradient, for
    each batch of its loader. A2C's parts are some of the environments, PPO's are minibatches.
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


class RoundLoader:
    """The parts of all rounds, in order: the Trainer's loader.

    It has a length: from a loader without one Lightning fetches a batch ahead, which would be a
    hidden second round of delay. Iterating again goes on where the last iteration stopped.

    Args:
        collector: of the rounds.
        parts_per_round: into how many parts each is divided.
        before_round: called before each round is asked for, when all of the last one is done.
        waiting: within it the loader waits for each round.
    """

    def __init__(
        self,
        collector: RoundSource,
        parts_per_round: int,
        before_round: Callable[[], None] = lambda: None,
        waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._collector = collector
        self._parts_per_round = parts_per_round
        self._before_round, self._waiting = before_round, waiting
        self._parts = self._run()

    def __len__(self) -> int:
        """Return the parts in the whole run."""
        return len(self._collector) * self._parts_per_round

    def __iter__(self) -> Iterator[RoundSlice]:
        """Return the one iterator there is."""
        return self._parts

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the data module keeps the collector's state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing; that it can be called tells the Trainer that the rounds go on."""

    def _run(self) -> Iterator[RoundSlice]:
        rounds = iter(self._collector)
        while True:
            self._before_round()
            with self._waiting():
                batch = next(rounds, None)
            if batch is None:
                break
            for index in range(self._parts_per_round):
                yield RoundSlice(batch, index, self._parts_per_round)
        raise ConfigurationError(f"the run's frames are used up: {ONE_EPOCH}")
