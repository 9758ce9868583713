"""The pool: all worker processes, started, watched and stopped together."""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Protocol
from weakref import WeakSet

from hts_torchrl.compat.processes import (
    IMPORT_FRAME,
    LOST,
    MOST_DESCRIPTORS,
    Finalize,
    without_main_module,
)
from hts_torchrl.errors import (
    ConfigurationError,
    ProtocolError,
    WorkerError,
    WorkerKilled,
    WorkerPlace,
)
from hts_torchrl.shared.action_log import ActionLog
from hts_torchrl.shared.buffers import SharedBuffers
from hts_torchrl.shared.pipes import sleep_until_readable
from hts_torchrl.specs import Array
from hts_torchrl.workers.diagnostics import Silence, StackPipe
from hts_torchrl.workers.process import WorkerTask, end_group, reap, run_worker
from hts_torchrl.workers.starting import children_environment, deaf_children, start_process

_log = logging.getLogger(__name__)
_STOP_S = 3.0
# On an overloaded machine it takes seconds until a killed process has ended.
_KILLED_S = 30.0
# Workers that die of the same cause end within that time of each other.
_TOGETHER_S = 0.1
_SILENCE_CHECK_S = 1.0
_MOST_EXECUTORS = MOST_DESCRIPTORS - 16  # an actor rings every executor


_parent_ends: WeakSet[Connection] = WeakSet()
"""Of lifelines: a process that the parent forks would hold them open for longer than it lives."""
os.register_at_fork(after_in_child=lambda: [*map(Connection.close, _parent_ends)])


class WorkerPool(Protocol):
    """Whoever carries out rounds, for the collector.

    Its caller's loop::

        for round_index in range(rounds):
            pool.start_round(round_index)
            pool.wait_round(round_index)
        pool.shutdown()
    """

    def start_round(self, round_index: int) -> None:
        """Let the executors begin a round; the round before must have been waited for."""

    def wait_round(self, round_index: int) -> None:
        """Return when every executor has finished the round."""

    def replace_dead_nodes(self, action_log: ActionLog) -> bool:  # noqa: ARG002 - without nodes
        """Replace the rollout nodes that died in the running round, whose action log this is.

        Returns:
            Whether the round goes on so. False asks for another pool: without nodes, a worker may
            have died while it wrote to a pipe that all share.
        """
        return False

    def shutdown(self) -> None:
        """Stop whatever runs; may be called twice."""


class ProcessPool(WorkerPool):
    """Executor and actor processes.

    Each holds the reading end of one pipe, the lifeline: when the parent closes it, or dies, all of
    them leave by themselves.

    Args:
        shared: what the workers write to and read from.
        tasks: what they do, executors first.
        preload: modules that the fork server imports once for all of them.
        starts_s: seconds beyond ``timeout_s`` for which nobody may be heard of in the first round.
    """

    def __init__(
        self,
        shared: SharedBuffers,
        tasks: Sequence[WorkerTask],
        preload: Sequence[str],
        *,
        starts_s: float = 0.0,
    ) -> None:
        self._shared, self._starts_s = shared, starts_s
        self._tasks = list(tasks)
        self._processes: list[BaseProcess] = []
        self._started = self._waited = -1
        self._missing: set[int] = set()
        """Executors that have not yet reported the running round."""
        config = shared.config
        if config.start_method == "forkserver" and config.num_executors > _MOST_EXECUTORS:
            raise ConfigurationError(
                f"{config.num_executors} executors; a fork server can start {_MOST_EXECUTORS}: "
                "raise envs_per_executor, or set start_method='spawn'"
            )
        if multiprocessing.current_process().daemon:
            raise ConfigurationError(
                "this process is a daemon of multiprocessing, as those of a Pool are, and may "
                "start no others: set num_actors=0, or use concurrent.futures.ProcessPoolExecutor"
            )
        if config.start_method == "spawn" and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            raise ConfigurationError(
                "SIGCHLD is ignored, so that nobody can tell how a worker has ended: set "
                "signal.signal(signal.SIGCHLD, signal.SIG_DFL), or start_method='forkserver'"
            )
        self._failed = False
        self._lifeline, parent_end = multiprocessing.Pipe(duplex=False)
        self._stacks = StackPipe()
        # Where a process ends without a shutdown, multiprocessing waits for its children.
        self._close_lifeline = Finalize(None, parent_end.close, exitpriority=0)
        _parent_ends.add(parent_end)
        try:
            self._start(preload)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, preload: Sequence[str]) -> None:
        context = multiprocessing.get_context(self._shared.config.start_method)
        if self._shared.config.start_method == "forkserver":
            context.set_forkserver_preload(["hts_torchrl.workers.fork_server", *preload])
        with children_environment() as variables, without_main_module(), deaf_children():
            for task in self._tasks:
                process = context.Process(  # type: ignore[attr-defined]
                    target=run_worker,
                    args=(task, self._lifeline, self._stacks, variables),
                    name=f"hts-{task.role}-{task.index}",
                    daemon=True,
                )
                start_process(process)
                self._processes.append(process)
        self._poll = select.poll()
        self._poll.register(self._shared.finished.fileno(), select.POLLIN)
        for process in self._processes:
            self._poll.register(process.sentinel, select.POLLIN)

    def start_round(self, round_index: int) -> None:
        """Ring every executor."""
        if self._started != self._waited:
            raise ProtocolError(f"round {round_index} starts before {self._started} was waited for")
        self._started = round_index
        self._missing = set(range(self._shared.config.num_executors))
        for bell in self._shared.doorbells.values():
            bell.ring()

    def wait_round(self, round_index: int) -> None:
        """Sleep until all executors have reported; released by the executors' reports.

        A wait that Ctrl-C has ended may be begun again.

        Raises:
            ConfigurationError: if a worker refused what the user gave, such as a reward of several
                numbers.
            WorkerKilled: if a worker was ended by a signal.
            WorkerError: if a worker has ended otherwise or raised, or an executor has shown no
                sign of life for ``timeout_s``.
        """
        if self._started != round_index:
            raise ProtocolError(f"waiting for round {round_index}, but {self._started} runs")
        missing, silence = self._missing, None
        while missing:
            ready = self._poll.poll(_SILENCE_CHECK_S * 1000)
            missing -= set(self._shared.finished.take_waiting(len(missing)).tolist())
            if any(fd != self._shared.finished.fileno() for fd, _ in ready):
                _join(self._processes, _TOGETHER_S)
                self._raise_dead_worker(round_index)
            if not ready:  # most rounds are shorter, and need none of this
                # What a worker forks keeps its sentinel from telling of its end.
                self._raise_dead_worker(round_index)
                silence = silence or Silence(self._shared.status)
                self._require_signs_of_life(round_index, missing, silence.lasts_s())
        self._waited = round_index

    def _require_signs_of_life(self, round_index: int, missing: set[int], silence_s: Array) -> None:
        if self._waited < 0:  # they start one after another: a sign of any of them will do
            silence_s[:] = silence_s.min() - self._starts_s
        if any(silence_s[worker] > self._shared.config.timeout_s for worker in missing):
            self._raise_silent_worker(round_index, self._silent(missing, silence_s))

    def _place(self, worker: int, round_index: int) -> WorkerPlace:
        config, status = self._shared.config, self._shared.status
        if worker < config.num_executors:
            envs = tuple(config.global_envs_of(worker))
            started = int(status.rounds[worker]) == round_index
            step = int(status.steps[worker]) if started else 0
            return WorkerPlace("executor", worker, envs, round_index, step)
        return WorkerPlace("actor", worker - config.num_executors, (), round_index, 0)

    def _raise_dead_worker(self, round_index: int) -> None:
        """Raise for the worker that failed first: one with a traceback, else any that died."""
        status = self._shared.status
        if not self._processes:
            raise ProtocolError("the worker pool was shut down, and no other was started")
        dead = [n for n, process in enumerate(self._processes) if process.exitcode is not None]
        if not dead:
            return
        self._failed = True
        lost = self._server_is_gone()
        if not lost:  # else they may live, and close their environments
            for each in dead:
                end_group(int(status.groups[each]))
        worker = next(filter(status.read_error, dead), dead[0])
        place, error = self._place(worker, round_index), status.read_error(worker)
        code = self._processes[worker].exitcode or 0
        if status.refused[worker]:
            raise ConfigurationError(f"{error} (in {place.role} {place.index})")
        if error:
            raise WorkerError(place, f"raised\n{error}")
        if code < 0:
            raise WorkerKilled(place, f"was killed by {_name_of(-code)}")
        if lost:
            raise WorkerKilled(place, "is lost, as all workers are: their fork server was killed")
        raise WorkerError(place, f"ended with status {code}")

    def _server_is_gone(self) -> bool:
        """Return whether multiprocessing has lost all workers at once, which may well live."""
        codes = {process.exitcode for process in self._processes}
        return self._shared.config.start_method == "forkserver" and (
            LOST in codes and None not in codes
        )

    def _silent(self, missing: set[int], silence_s: Array) -> list[int]:
        """Return who may hold up the round, or wait for who does."""
        actors = range(self._shared.config.num_executors, len(self._processes))
        # Whoever made an executor wait was heard of after it, within a pass of the policy.
        enough_s = self._shared.config.timeout_s / 2
        return [worker for worker in (*sorted(missing), *actors) if silence_s[worker] > enough_s]

    def _raise_silent_worker(self, round_index: int, silent: list[int]) -> None:
        """Raise for those of the workers that do not wait for others: each is asked where it is."""
        self._failed = True
        stacks = {worker: self._stacks.ask(self._processes[worker]) for worker in silent}
        # A stack shows where a worker is now. Its status would show where it was when it last ran,
        # and call a worker that was stopped while it slept one that waits for others.
        waiting = f" in {sleep_until_readable.__name__}\n"
        hanging = [worker for worker in silent if waiting not in stacks[worker]]
        first, *others = hanging or silent
        more = "".join(f"\nand {self._place(worker, round_index)}" for worker in others)
        where = stacks[first] or "It gives no stack: it is stopped, or blocked in the kernel."
        what = "hangs" if hanging else "waits, as others do"
        silence = f"no sign of life for {self._shared.config.timeout_s:g} s"
        if IMPORT_FRAME in where:
            silence += "; it is still importing, and a larger timeout_s gives it the time"
            lines = where.splitlines(keepends=True)
            where = "".join(line for line in lines if IMPORT_FRAME not in line)
        cause = f"{what}: {silence}\n{where.rstrip()}{more}"
        raise WorkerError(self._place(first, round_index), cause)

    def shutdown(self) -> None:
        """Ask by closing the lifeline, wait, and kill who is left; 5 s where nothing else runs."""
        self._close_lifeline()
        _join(self._processes, _STOP_S)
        alive = [process for process in self._processes if process.is_alive()]
        if not self._failed:
            self._report_unclosed(alive)
        for process in alive:
            process.kill()
        _join(alive, _KILLED_S)
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
        lost = any(process.exitcode == LOST for process in self._processes)
        if lost:
            self._stacks.wait_for_writers(_STOP_S)
        groups = self._shared.status.groups.tolist()
        for group in groups:
            end_group(group)
        self._shared.status.groups[:] = 0  # numbers that others may get
        if lost:
            self._stacks.wait_for_writers(_KILLED_S)
        reap(groups)

    def _report_unclosed(self, alive: Sequence[BaseProcess]) -> None:
        """Log whose environments had no time to close, and with them perhaps to write files."""
        executors = self._processes[: self._shared.config.num_executors]
        if unclosed := [n for n, process in enumerate(executors) if process in alive]:
            _log.warning(
                "executors %s: killed %g s after they were stopped, in a step or in close() of "
                "their environments, which may have left something unwritten",
                *(unclosed, _STOP_S),
            )

    def _report_late_errors(self) -> None:
        """Log what workers raised when they were stopped: all rounds had been handed out."""
        for worker in range(len(self._processes)):
            if error := self._shared.status.read_error(worker):
                place = self._place(worker, self._started)
                _log.warning("%s: raised when it was stopped\n%s", place, error)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"


def _join(processes: Sequence[BaseProcess], seconds: float) -> None:
    """Wait until all of them have ended, for no longer than that in total."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
