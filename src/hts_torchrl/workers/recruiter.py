"""The recruiter: makes crews for one collector, the first and any that must take its place."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import cloudpickle
from torch import nn

from hts_torchrl.buffers.board import Board
from hts_torchrl.buffers.journal import Journal, Stretch
from hts_torchrl.envs.group import CreateEnv, EnvFactory
from hts_torchrl.workers.actor import Actor, ActorSettings, make_actor
from hts_torchrl.workers.actor_task import ActorTask
from hts_torchrl.workers.crew import Crew, ProcessCrew, SerialCrew
from hts_torchrl.workers.executor import Executor, ExecutorTask
from hts_torchrl.workers.process import WorkerTask


@dataclass(frozen=True)
class Recruiter:
    """What workers are made from; every crew of one recruiter gives the same bits."""

    board: Board
    create_env_fn: CreateEnv | EnvFactory
    make_policy: Callable[[], nn.Module]
    """Called in each actor."""
    settings: ActorSettings
    seed: int

    def crew(self, journal: Journal) -> Crew:
        """Make a crew whose environments are where the journal says, for its round."""
        if self.board.config.num_actors == 0:
            return self._serial_crew(journal)
        make = cloudpickle.dumps(partial(make_actor, self.make_policy, self.settings))
        tasks: list[WorkerTask] = [
            ExecutorTask(
                self.board.for_executor(index),
                index,
                self._create_env_fn,
                self.seed,
                self._stretches(journal, index),
                journal.round_index,
            )
            for index in range(self.board.config.num_executors)
        ]
        tasks += [
            ActorTask(self.board.for_actor(), index, make)
            for index in range(self.board.config.num_actors)
        ]
        return ProcessCrew(self.board, tasks, self._preload)

    def _serial_crew(self, journal: Journal) -> SerialCrew:
        actor = Actor(self.board, copy.deepcopy(self.make_policy()), self.settings)
        executors = []
        with contextlib.ExitStack() as stack:  # of executors, until all of them are there
            for index in range(self.board.config.num_executors):
                executor = Executor(self.board, index, self._create_env_fn, self.seed)
                stack.callback(executor.close)
                executor.restore(self._stretches(journal, index))
                executors.append(executor)
            stack.pop_all()
        return SerialCrew(self.board, executors, actor)

    @property
    def _create_env_fn(self) -> bytes:
        pickled: bytes = cloudpickle.dumps(self.create_env_fn)
        return pickled

    def _stretches(self, journal: Journal, executor: int) -> list[Stretch]:
        return [journal.stretch(env) for env in self.board.config.envs_of(executor)]

    @property
    def _preload(self) -> list[str]:
        """Modules that the fork server imports once for all executors."""
        module = type(self.create_env_fn).__module__
        modules = [module] if module.startswith("hts_torchrl.envs.") else []
        if isinstance(self.create_env_fn, EnvFactory):
            modules += self.create_env_fn.preload
        return modules
