"""What processes do to the order of things, without processes and at any pace.

The worker pool below plays the rounds of a collector with several actors, in an order drawn from a
generator: which actor takes how many of the waiting environments, which executor steps first, and
how much of a round is over before the learner has published. No real pool can do anything else.
"""

from __future__ import annotations

import copy
from functools import partial

import numpy as np

from hts_torchrl import HTSCollector
from hts_torchrl.envs.registered import pickle_envs
from hts_torchrl.workers.actor import Actor
from hts_torchrl.workers.executor import Executor


class ScrambledCrew:
    """Carries out rounds in a random order."""

    def __init__(self, shared, executors, actors, seed: int) -> None:
        self._shared, self._executors, self._actors = shared, executors, actors
        self._random = np.random.default_rng(seed)

    def start_round(self, round_index: int) -> None:
        """Play a random part of the round, never all: the caller publishes while it runs."""
        self._step = [0] * len(self._executors)
        self._unanswered: list[int] = []
        for executor in self._executors:
            executor.begin_round(round_index)
        for index in range(len(self._executors)):
            self._put_state(index)
        self._play(int(self._random.integers(0, self._shared.schedule.steps_per_round)))

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
        group = self._shared.config.envs_per_executor
        while self._unanswered and passes != 0:
            passes = None if passes is None else passes - 1
            self._random.shuffle(self._unanswered)
            most = min(len(self._unanswered), self._shared.config.batch_size)
            taken = self._unanswered[: self._random.integers(1, most + 1)]
            self._unanswered = self._unanswered[len(taken) :]
            actor = self._actors[self._random.integers(len(self._actors))]
            actor.answer(np.array(taken, np.int32))
            waiting = {env // group for env in self._unanswered}
            for index in {env // group for env in taken} - waiting:
                self._executors[index].step(self._step[index])
                self._step[index] += 1
                if self._step[index] < self._shared.schedule.steps_per_round:
                    self._put_state(index)


def make_scrambled_pool(shared, action_log, *, order, create_env_fn, make_policy, settings, seed):
    """Make a worker pool of two actors, in the order that ``order`` decides."""
    pickled = pickle_envs(create_env_fn)
    executors = []
    for index in range(shared.config.num_executors):
        segments = [action_log.segment(env) for env in shared.config.envs_of(index)]
        executors.append(Executor(shared, index, pickled, seed, segments))
        executors[-1].restore()
    actors = [Actor(shared, copy.deepcopy(make_policy()), settings) for _ in range(2)]
    return ScrambledCrew(shared, executors, actors, order)


class ScrambledCollector(HTSCollector):
    """A collector of two actors whose worker pool is a :class:`ScrambledCrew`."""

    order = 0

    def _pool_maker(self):
        return partial(make_scrambled_pool, **super()._pool_maker().keywords, order=self.order)
