"""The crew: all worker processes, started, watched and stopped together; and its serial twin."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from multiprocessing.util import Finalize, register_after_fork
from typing import Protocol

import numpy as np

from hts_torchrl.buffers.arena import Array
from hts_torchrl.buffers.board import Board
from hts_torchrl.buffers.doorbell import sleep_until_readable
from hts_torchrl.errors import (
    ConfigurationError,
    ProtocolError,
    WorkerError,
    WorkerKilled,
    WorkerPlace,
)
from hts_torchrl.workers.actor import Actor
from hts_torchrl.workers.executor import Executor
from hts_torchrl.workers.process import LEFT_TO_THE_PARENT, WorkerTask, live
from hts_torchrl.workers.process_group import end_group
from hts_torchrl.workers.silence import Silence
from hts_torchrl.workers.stacks import StackPipe

_log = logging.getLogger(__name__)
_STOP_S = 3.0
# On an overloaded machine it takes seconds until a killed process is gone.
_KILLED_S = 30.0
_SILENCE_CHECK_S = 1.0
# What multiprocessing takes for the status of a process if it can no longer hear of it.
_LOST = 255
_MOST_SERVERS = 10
_SERVER_ENDS_S = 0.1
# A fork server hands at most 256 descriptors to a child, and an actor rings every executor.
_MOST_EXECUTORS = 240


class Crew(Protocol):
    """Whoever carries out rounds, for the collector.

    Example:
        >>> crew.start_round(0)     # doctest: +SKIP
        >>> crew.wait_round(0)      # doctest: +SKIP
        >>> crew.shutdown()         # doctest: +SKIP
    """

    def start_round(self, round_index: int) -> None:
        """Let the executors begin a round; the round before must have been waited for."""
        ...

    def wait_round(self, round_index: int) -> None:
        """Return when every executor has finished the round."""
        ...

    def shutdown(self) -> None:
        """Stop whatever runs; may be called twice."""
        ...


class SerialCrew:
    """The same rounds in the caller's process, one plain loop: what every crew must equal."""

    def __init__(self, board: Board, executors: Sequence[Executor], actor: Actor) -> None:
        self._board = board
        self._executors = list(executors)
        self._actor = actor
        # Also where the process ends without a shutdown: multiprocessing waits for its children,
        # and so for those of the environments.
        self._close = Finalize(self, _close_executors, [list(executors)], exitpriority=0)

    def start_round(self, round_index: int) -> None:
        """Play the whole round."""
        for executor in self._executors:
            executor.begin_round(round_index)
        for step in range(self._board.schedule.steps_per_round):
            for executor in self._executors:
                executor.put_state(step)
            self._actor.answer(np.arange(self._board.config.num_envs, dtype=np.int32))
            for executor in self._executors:
                executor.step(step)

    def wait_round(self, round_index: int) -> None:
        """Do nothing: the round was finished when it was started."""

    def shutdown(self) -> None:
        """Close the environments; an exception is logged, as in processes."""
        self._executors = []
        self._close()


def _close_executors(executors: Sequence[Executor]) -> None:
    for executor in executors:
        try:
            executor.close()
        except Exception:
            # As text: the exception itself would keep the shared memory alive.
            error = traceback.format_exc()
            _log.warning("executor %d: raised when it was stopped\n%s", executor.index, error)


class ProcessCrew:
    """Executor and actor processes.

    Each holds the reading end of one pipe, the lifeline: when the parent closes it, or dies, all of
    them leave by themselves.
    """

    def __init__(self, board: Board, tasks: Sequence[WorkerTask], preload: Sequence[str]) -> None:
        self._board = board
        self._tasks = list(tasks)
        self._processes: list[BaseProcess] = []
        self._started = self._waited = -1
        config = board.config
        if config.start_method == "forkserver" and config.num_executors > _MOST_EXECUTORS:
            raise ConfigurationError(
                f"{config.num_executors} executors; a fork server can start {_MOST_EXECUTORS}: "
                "raise envs_per_executor, or set start_method='spawn'"
            )
        self._failed = False
        self._lifeline, parent_end = multiprocessing.Pipe(duplex=False)
        self._stacks = StackPipe()
        # Where a process ends without a shutdown, multiprocessing waits for its children.
        self._close_lifeline = Finalize(None, parent_end.close, exitpriority=0)
        # A process that the parent forks would hold it open for longer than the parent lives.
        register_after_fork(parent_end, Connection.close)
        try:
            self._start(preload)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, preload: Sequence[str]) -> None:
        context = multiprocessing.get_context(self._board.config.start_method)
        if self._board.config.start_method == "forkserver":
            context.set_forkserver_preload(["hts_torchrl.workers.fork_server", *preload])
        with _single_threaded_children(), _without_main_module(), _deaf_children():
            for task in self._tasks:
                name = f"hts-{type(task).__name__.removesuffix('Task').lower()}-{task.index}"
                process = context.Process(  # type: ignore[attr-defined]
                    target=live, args=(task, self._lifeline, self._stacks), name=name, daemon=True
                )
                _start(process)
                self._processes.append(process)
        self._poll = select.poll()
        self._poll.register(self._board.finished.fileno(), select.POLLIN)
        for process in self._processes:
            self._poll.register(process.sentinel, select.POLLIN)

    def start_round(self, round_index: int) -> None:
        """Ring every executor."""
        if self._started != self._waited:
            raise ProtocolError(f"round {round_index} starts before {self._started} was waited for")
        self._started = round_index
        for bell in self._board.doorbells.values():
            bell.ring()

    def wait_round(self, round_index: int) -> None:
        """Sleep until all executors have reported; released by the executors' reports.

        Raises:
            ConfigurationError: if a worker refused what the user gave, such as a reward of several
                numbers.
            WorkerKilled: if a worker was ended by a signal.
            WorkerError: if a worker has ended otherwise or raised, or an executor has shown no
                sign of life for ``timeout_s``.
        """
        if self._started != round_index:
            raise ProtocolError(f"waiting for round {round_index}, but {self._started} runs")
        num_executors = self._board.config.num_executors
        missing = set(range(num_executors))
        silence = None
        while missing:
            ready = self._poll.poll(_SILENCE_CHECK_S * 1000)
            missing -= set(self._board.finished.take_waiting(num_executors).tolist())
            if any(fd != self._board.finished.fileno() for fd, _ in ready):
                self._raise_dead_worker(round_index)
            if not ready:  # most rounds are shorter, and need none of this
                # What a worker forks keeps its sentinel from telling of its end.
                self._raise_dead_worker(round_index)
                silence = silence or Silence(self._board.logbook)
                self._require_signs_of_life(round_index, missing, silence.lasts_s())
        self._waited = round_index

    def _require_signs_of_life(self, round_index: int, missing: set[int], silence_s: Array) -> None:
        if self._waited < 0:  # they start one after another: a sign of any of them will do
            silence_s[:] = silence_s.min()
        if any(silence_s[worker] > self._board.config.timeout_s for worker in missing):
            self._raise_silent_worker(round_index, self._silent(missing, silence_s))

    def _place(self, worker: int, round_index: int) -> WorkerPlace:
        config, logbook = self._board.config, self._board.logbook
        if worker < config.num_executors:
            envs = tuple(config.first_env + env for env in config.envs_of(worker))
            started = int(logbook.rounds[worker]) == round_index
            step = int(logbook.steps[worker]) if started else 0
            return WorkerPlace("executor", worker, envs, round_index, step)
        return WorkerPlace("actor", worker - config.num_executors, (), round_index, 0)

    def _raise_dead_worker(self, round_index: int) -> None:
        """Raise for the worker that failed first: one with a traceback, else any that died."""
        dead = [n for n, process in enumerate(self._processes) if process.exitcode is not None]
        for process in self._processes:
            process.join(0.05)
        with_error = [worker for worker in dead if self._board.logbook.read_error(worker)]
        if not dead:
            return
        self._failed = True
        worker = (with_error or dead)[0]
        code = self._processes[worker].exitcode or 0
        killed = not with_error and (code < 0 or self._server_is_gone())
        if not self._server_is_gone():  # else they may live, and close their environments
            for each in dead:
                end_group(int(self._board.logbook.groups[each]))
        place = self._place(worker, round_index)
        if self._board.logbook.refused[worker]:
            refusal = self._board.logbook.read_error(worker)
            raise ConfigurationError(f"{refusal} (in {place.role} {place.index})")
        raise (WorkerKilled if killed else WorkerError)(place, self._cause(worker))

    def _cause(self, worker: int) -> str:
        error = self._board.logbook.read_error(worker)
        if error:
            return f"raised\n{error}"
        code = self._processes[worker].exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        if self._server_is_gone():
            return "is lost, as all workers are: their fork server was killed"
        return f"ended with status {code}"

    def _server_is_gone(self) -> bool:
        """Return whether multiprocessing has lost all workers at once, which may well live."""
        codes = {process.exitcode for process in self._processes}
        return self._board.config.start_method == "forkserver" and (
            _LOST in codes and None not in codes
        )

    def _silent(self, missing: set[int], silence_s: Array) -> list[int]:
        """Return who may hold up the round, or wait for who does."""
        actors = range(self._board.config.num_executors, len(self._processes))
        # Whoever made an executor wait was heard of after it, within a pass of the policy.
        enough_s = self._board.config.timeout_s / 2
        return [worker for worker in (*sorted(missing), *actors) if silence_s[worker] > enough_s]

    def _raise_silent_worker(self, round_index: int, silent: list[int]) -> None:
        """Raise for those of the workers that do not wait for others: each is asked where it is."""
        self._failed = True
        stacks = {worker: self._stacks.ask(self._processes[worker]) for worker in silent}
        waiting = f" in {sleep_until_readable.__name__}\n"
        hanging = [worker for worker in silent if waiting not in stacks[worker]]
        first, *others = hanging or silent
        more = "".join(f"\nand {self._place(worker, round_index)}" for worker in others)
        where = stacks[first] or "It gives no stack: it is stopped, or blocked in the kernel."
        what = "hangs" if hanging else "waits, as others do"
        silence = f"no sign of life for {self._board.config.timeout_s:g} s"
        cause = f"{what}: {silence}\n{where.rstrip()}{more}"
        raise WorkerError(self._place(first, round_index), cause)

    def shutdown(self) -> None:
        """Ask by closing the lifeline, wait, and kill who is left; 5 s where nothing else runs."""
        self._close_lifeline()
        deadline = time.monotonic() + _STOP_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        alive = [process for process in self._processes if process.is_alive()]
        for process in alive:
            process.kill()
        deadline = time.monotonic() + _KILLED_S
        for process in alive:
            process.join(max(0.0, deadline - time.monotonic()))
        self._end_what_is_left()
        if not self._failed:
            self._report_late_errors()
        while self._processes:
            process = self._processes.pop()
            if not process.is_alive():
                process.close()
        self._lifeline.close()
        self._stacks.close()

    def _end_what_is_left(self) -> None:
        """End what killed workers have started, and workers that are lost: they may still write."""
        lost = any(process.exitcode == _LOST for process in self._processes)
        if lost:
            self._stacks.wait_for_writers(_STOP_S)
        groups = self._board.logbook.groups
        for group in groups.tolist():
            end_group(group)
        groups[:] = 0  # numbers that others may get
        if lost:
            self._stacks.wait_for_writers(_KILLED_S)

    def _report_late_errors(self) -> None:
        """Log what workers raised when they were stopped: all rounds had been handed out."""
        for worker in range(len(self._processes)):
            if error := self._board.logbook.read_error(worker):
                place = self._place(worker, self._started)
                _log.warning("%s: raised when it was stopped\n%s", place, error)


def _start(process: BaseProcess) -> None:
    """Start a process, with another fork server if the last one was killed at this moment."""
    for attempt in range(1, _MOST_SERVERS + 1):
        try:
            process.start()
        except (ConnectionError, EOFError):
            if attempt == _MOST_SERVERS:
                raise
            time.sleep(_SERVER_ENDS_S)
        except OSError as error:
            if "AF_UNIX path too long" not in str(error):
                raise
            raise ConfigurationError(
                f"TMPDIR={tempfile.gettempdir()}: it is too long for the socket of a fork server; "
                "a shorter one is needed, or start_method='spawn'"
            ) from error
        else:
            return


@contextlib.contextmanager
def _single_threaded_children() -> Iterator[None]:
    """Keep numerical libraries of the children at one thread, unless the user chose a number."""
    names = [
        name
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        if name not in os.environ
    ]
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


@contextlib.contextmanager
def _deaf_children() -> Iterator[None]:
    """Hold back signals, also from children, which reach their own answer to them seconds later."""
    ensure_running()  # of its own accord multiprocessing does so later, and lets signals through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Keep children from importing the user's script, which often imports torch.

    They need nothing from it: functions of the script travel by value (cloudpickle).
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
