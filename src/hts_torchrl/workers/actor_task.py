"""What an actor process is started with. Imports no torch: see ``exit_with_parent``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import cloudpickle

from hts_torchrl.shared.buffers import SharedBuffers
from hts_torchrl.shared.worker_status import BusyTimer

if TYPE_CHECKING:
    from hts_torchrl.workers.actor import Actor


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
