"""What processes do to the order of things, without processes and at any pace.

The crew below plays the rounds of a collector with several actors, in an order drawn from a
generator: which actor takes how many of the waiting environments, which executor steps first, and
how much of a round is over before the learner has published. No real crew can do anything else.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import cloudpickle
import numpy as np

from hts_torchrl import HTSCollector
from hts_torchrl.workers.actor import Actor
from hts_torchrl.workers.executor import Executor
from hts_torchrl.workers.recruiter import Recruiter


class ScrambledCrew:
    """Carries out rounds in a random order."""

    def __init__(self, board, executors, actors, seed: int) -> None:
        self._board, self._executors, self._actors = board, executors, actors
        self._random = np.random.default_rng(seed)

    def start_round(self, round_index: int) -> None:
        """Play a random part of the round, never all: the caller publishes while it runs."""
        self._step = [0] * len(self._executors)
        self._unanswered: list[int] = []
        for executor in self._executors:
            executor.begin_round(round_index)
        for index in range(len(self._executors)):
            self._put_state(index)
        self._play(int(self._random.integers(0, self._board.schedule.steps_per_round)))

    def wait_round(self, round_index: int) -> None:  # noqa: ARG002
        """Play the rest."""
        self._play(None)

    def shutdown(self) -> None:
        """Close the environments."""
        for executor in self._executors:
            executor.close()
        self._executors = []

    def _put_state(self, index: int) -> None:
        self._executors[index].put_state(self._step[index])
        self._unanswered += self._executors[index].envs.tolist()

    def _play(self, passes: int | None) -> None:
        """Let random actors answer random environments; whoever has all its answers steps."""
        group = self._board.config.envs_per_executor
        while self._unanswered and passes != 0:
            passes = None if passes is None else passes - 1
            self._random.shuffle(self._unanswered)
            most = min(len(self._unanswered), self._board.config.batch_size)
            taken = self._unanswered[: self._random.integers(1, most + 1)]
            self._unanswered = self._unanswered[len(taken) :]
            actor = self._actors[self._random.integers(len(self._actors))]
            actor.answer(np.array(taken, np.int32))
            waiting = {env // group for env in self._unanswered}
            for index in {env // group for env in taken} - waiting:
                self._executors[index].step(self._step[index])
                self._step[index] += 1
                if self._step[index] < self._board.schedule.steps_per_round:
                    self._put_state(index)


@dataclass(frozen=True)
class ScrambledRecruiter(Recruiter):
    """Makes crews of two actors, in the order that ``order`` decides."""

    order: int = 0

    def crew(self, journal):
        create_env_fn = cloudpickle.dumps(self.create_env_fn)
        executors = [
            Executor(self.board, index, create_env_fn, self.seed)
            for index in range(self.board.config.num_executors)
        ]
        for executor in executors:
            executor.restore(self._stretches(journal, executor.index))
        actors = [
            Actor(self.board, copy.deepcopy(self.make_policy()), self.settings) for _ in range(2)
        ]
        return ScrambledCrew(self.board, executors, actors, self.order)


class ScrambledCollector(HTSCollector):
    """A collector of two actors whose crew is a :class:`ScrambledCrew`."""

    order = 0

    def _recruit(self, board):
        return ScrambledRecruiter(**vars(super()._recruit(board)), order=self.order)
