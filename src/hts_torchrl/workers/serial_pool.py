"""A worker pool without processes."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from hts_torchrl.compat.processes import Finalize
from hts_torchrl.envs.kept_process import process_kept
from hts_torchrl.errors import ConfigurationError, ProtocolError
from hts_torchrl.shared.buffers import SharedBuffers
from hts_torchrl.workers.actor import Actor
from hts_torchrl.workers.actor_settings import ActorSettings
from hts_torchrl.workers.executor import Executor
from hts_torchrl.workers.pool import WorkerPool

_log = logging.getLogger(__name__)


class SerialPool(WorkerPool):
    """The same rounds in the caller's process, one plain loop: what every pool must equal."""

    def __init__(
        self,
        shared: SharedBuffers,
        make_executors: Sequence[Callable[[SharedBuffers], Executor]],
        actor: Actor,
    ) -> None:
        self._shared, self._actor = shared, actor
        self._executors: list[Executor] = []
        self._interrupted = False
        self._folder = "."
        # Also where the process ends without a shutdown: multiprocessing waits for its children,
        # and so for those of the environments.
        self._close = Finalize(self, _close_all, [self._executors], exitpriority=0)
        try:
            with self._among_environments():
                for make in make_executors:
                    self._executors.append(make(shared))
                    self._executors[-1].restore()
        except BaseException:
            self.shutdown()
            raise

    def start_round(self, round_index: int) -> None:
        """Play the whole round.

        Raises:
            ConfigurationError: if an environment has changed a setting of torch's that decides
                bits: policy and learner share it here, and with processes they do not.
        """
        self._interrupted = True  # until its end
        before = _settings_of_torch()
        with self._among_environments():
            self._play_round(round_index)
        for name, value in _settings_of_torch().items():
            if value != before[name]:
                raise ConfigurationError(
                    f"round {round_index}: an environment has changed torch's {name} to {value}, "
                    f"from {before[name]}, also for policy and learner, which are in its process: "
                    "set it before the run, or set num_actors=1"
                )
        self._interrupted = False

    @contextlib.contextmanager
    def _among_environments(self) -> Iterator[None]:
        """Be in their working folder, which may be another than the learner's."""
        gone = contextlib.suppress(FileNotFoundError)  # as a temporary one that they remove
        with process_kept():
            with gone:
                os.chdir(self._folder)
            try:
                yield
            finally:
                with gone:
                    self._folder = str(Path.cwd())

    def _play_round(self, round_index: int) -> None:
        for executor in self._executors:
            executor.begin_round(round_index)
        for step in range(self._shared.schedule.steps_per_round):
            try:
                self._play(step)
            except ConfigurationError:  # which says where
                raise
            except Exception as error:
                with contextlib.suppress(Exception):  # of a class that takes no notes
                    error.add_note(f"in round {round_index}, step {step}")
                raise

    def _play(self, step: int) -> None:
        for executor in self._executors:
            executor.put_state(step)
        self._actor.answer(np.arange(self._shared.config.num_envs, dtype=np.int32))
        for executor in self._executors:
            executor.step(step)

    def wait_round(self, round_index: int) -> None:
        """Do nothing: the round was finished when it was started.

        Raises:
            ProtocolError: if it was interrupted, so that its storage holds a part of it.
        """
        if self._interrupted:
            raise ProtocolError(
                f"round {round_index} was interrupted, and cannot continue in this process: make "
                "a new collector"
            )

    def shutdown(self) -> None:
        """Close the environments; an exception is logged, as in processes."""
        self._executors = []
        with self._among_environments():
            self._close()


def _settings_of_torch() -> dict[str, object]:
    """Return what is global to a process, and decides the bits of a pass or an update."""
    return vars(ActorSettings(batch_size=1, device="cpu", precision="32-true"))


def _close_all(executors: Sequence[Executor]) -> None:
    for executor in executors:
        try:
            executor.close()
        except Exception:
            # As text: the exception itself would keep the shared memory alive.
            error = traceback.format_exc()
            _log.warning("executor %d: raised when it was stopped\n%s", executor.index, error)
