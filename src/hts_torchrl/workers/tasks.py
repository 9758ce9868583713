"""What executor and actor processes are started with: the loops of the two. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeAlias

import cloudpickle
import numpy as np

from hts_torchrl.shared.action_log import Segment
from hts_torchrl.shared.buffers import SharedBuffers
from hts_torchrl.shared.worker_status import BusyTimer
from hts_torchrl.workers.executor import Executor

if TYPE_CHECKING:
    from hts_torchrl.workers.actor import Actor


@dataclass
class ExecutorTask:
    """What an executor is made from, in a process of its own or in the serial twin."""

    shared: SharedBuffers
    index: int
    create_env_fn: bytes
    seed: int
    segments: Sequence[Segment]
    first_round: int
    _executor: Executor | None = field(default=None, init=False)

    @property
    def worker(self) -> int:
        """Row in the worker status."""
        return self.index

    def make_executor(self) -> Executor:
        """Make the executor, whose environments are then where the segments end."""
        self._executor = Executor(self.shared, self.index, self.create_env_fn, self.seed)
        self._executor.restore(self.segments)
        return self._executor

    def run(self, lifeline: Connection) -> None:
        """Run rounds: put state -> observation ready -> action ready -> step -> finished."""
        shared, status = self.shared, self.shared.status
        bell, watch = shared.doorbells[self.index], BusyTimer(status, self.worker)
        executor = self.make_executor()
        round_index = self.first_round
        watch.waits()
        while True:
            bell.wait(1, lifeline)
            watch.works()
            status.rounds[self.worker] = round_index
            executor.begin_round(round_index)
            for step in range(shared.schedule.steps_per_round):
                status.steps[self.worker] = step
                executor.put_state(step)
                shared.ready.put(executor.envs)
                watch.waits()
                bell.wait(len(executor.envs), lifeline)
                watch.works()
                executor.step(step)
            status.steps[self.worker] = shared.schedule.steps_per_round
            status.finished_s[self.worker] = watch.waits()  # booked before anyone reads it
            shared.finished.put(np.array([self.index], np.int32))
            round_index += 1

    def close(self) -> None:
        """Close the environments, if there are any."""
        if self._executor is not None:
            self._executor.close()


@dataclass
class ActorTask:
    """What an actor process is started with."""

    shared: SharedBuffers
    index: int
    make_actor: bytes
    """A pickled function of the shared buffers."""

    @property
    def worker(self) -> int:
        """Row in the worker status."""
        return self.shared.config.num_executors + self.index

    def run(self, lifeline: Connection) -> None:
        """Serve until stopped: observation ready -> newest weights -> pass -> action ready."""
        shared = self.shared
        make_actor: Callable[[SharedBuffers], Actor] = cloudpickle.loads(self.make_actor)
        actor = make_actor(shared)
        watch = BusyTimer(shared.status, self.worker)
        group = shared.config.envs_per_executor
        watch.waits()
        while True:
            if shared.config.step_barrier:
                envs = shared.ready.take_all(shared.config.num_envs, lifeline)
            else:
                envs = shared.ready.take(actor.batch_size, lifeline)
            watch.works()
            actor.answer(envs)
            watch.waits()  # before the round can end
            for executor, answers in sorted(Counter((envs // group).tolist()).items()):
                shared.doorbells[executor].ring(answers)

    def close(self) -> None:
        """Do nothing: a policy holds nothing that outlives its process."""


WorkerTask: TypeAlias = ExecutorTask | ActorTask
"""What a worker process is started with."""
