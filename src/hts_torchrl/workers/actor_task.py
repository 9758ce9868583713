"""What an actor process is started with. Imports no torch: that takes seconds, see ``follow``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import cloudpickle

from hts_torchrl.buffers.board import Board
from hts_torchrl.buffers.logbook import Stopwatch

if TYPE_CHECKING:
    from hts_torchrl.workers.actor import Actor


@dataclass
class ActorTask:
    """What an actor process is started with."""

    board: Board
    index: int
    make_actor: bytes
    """A pickled function of the board."""

    @property
    def worker(self) -> int:
        """Row in the logbook."""
        return self.board.config.num_executors + self.index

    def run(self, lifeline: Connection) -> None:
        """Serve until stopped: observation ready -> newest weights -> pass -> action ready."""
        board = self.board
        make_actor: Callable[[Board], Actor] = cloudpickle.loads(self.make_actor)
        actor = make_actor(board)
        watch = Stopwatch(board.logbook, self.worker)
        group = board.config.envs_per_executor
        watch.waits()
        while True:
            if board.config.step_barrier:
                envs = board.ready.take_all(board.config.num_envs, lifeline)
            else:
                envs = board.ready.take(actor.batch_size, lifeline)
            watch.works()
            actor.answer(envs)
            watch.waits()  # before the round can end
            for executor, answers in sorted(Counter((envs // group).tolist()).items()):
                board.doorbells[executor].ring(answers)

    def close(self) -> None:
        """Do nothing: a policy holds nothing that outlives its process."""
