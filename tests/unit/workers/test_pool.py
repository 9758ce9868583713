import multiprocessing
import os
import select
import signal
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from hts_torchrl.config import CollectorSettings
from hts_torchrl.errors import ConfigurationError, ProtocolError, WorkerError, WorkerKilled
from hts_torchrl.shared.pipes import ReadyQueue
from hts_torchrl.workers.pool import _STOP_S, ProcessPool
from hts_torchrl.workers.process import _GRACE_S

WAITS = "Stack (most recent call first):\n  File x, line 1 in sleep_until_readable\n"
HANGS = (
    "Stack (most recent call first):\n  File x, line 1 in step\n  File x, line 9 in run_worker\n"
)


def test_more_executors_than_a_fork_server_can_start_are_refused():
    config = CollectorSettings(num_envs=500, envs_per_executor=2, frames_per_batch=500)
    with pytest.raises(ConfigurationError, match="250 executors; a fork server can start 240"):
        ProcessPool(SimpleNamespace(config=config), [], [])


def test_workers_whose_end_nobody_could_tell_are_refused():
    config = CollectorSettings(num_envs=2, frames_per_batch=2, start_method="spawn")
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(ConfigurationError, match="SIGCHLD is ignored"):
            ProcessPool(SimpleNamespace(config=config), [], [])
    finally:
        signal.signal(signal.SIGCHLD, before)


class Undying(BaseProcess):
    """Outlives every patience, as a process may on an overloaded machine."""

    def __init__(self, asked: list) -> None:
        self._closed, self.asked = False, asked
        self._popen = SimpleNamespace(kill=lambda: asked.append("kill"), poll=lambda: None)

    def __del__(self) -> None:
        pass

    def __repr__(self) -> str:
        return "Undying"

    def is_alive(self):
        return True

    def join(self, timeout=None):
        assert timeout is not None

    def close(self):
        raise ValueError("Cannot close a process while it is still running")


def test_a_worker_that_does_not_die_in_time_does_not_keep_the_rest_from_being_closed(monkeypatch):
    monkeypatch.setattr("hts_torchrl.workers.pool._STOP_S", 0.0)
    asked = []
    pool = bare_pool([Undying(asked)])
    pool.shutdown()
    assert asked == ["kill"]
    assert pool._lifeline.closed


class Ended(Undying):
    """Has left in time."""

    def is_alive(self):
        return False

    def close(self):
        """Frees nothing."""


@pytest.mark.parametrize("failed", [False, True])
def test_executors_that_had_no_time_to_close_are_told(failed, monkeypatch, caplog):
    monkeypatch.setattr("hts_torchrl.workers.pool._STOP_S", 0.0)
    pool = bare_pool([Ended([]), Undying([]), Undying([])])
    pool._failed = failed  # whose error says what has happened
    pool.shutdown()
    told = "executors [1]: killed 0 s after they were stopped, in a step or in close() of "
    assert len(caplog.messages) == (not failed)
    assert failed or caplog.messages[0].startswith(told)


def test_a_worker_waits_for_the_parent_to_kill_it_and_to_tell_of_it():
    assert _GRACE_S > _STOP_S


def test_a_shutdown_that_was_interrupted_is_finished_by_the_next(monkeypatch):
    monkeypatch.setattr("hts_torchrl.workers.pool._STOP_S", 0.0)
    asked = []
    pool = bare_pool([Undying(asked)])
    with monkeypatch.context() as patch:
        patch.setattr(Undying, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.shutdown()
    assert asked == []
    pool.shutdown()
    assert asked == ["kill"]


def test_a_long_round_makes_nobody_wait_for_workers_that_live(monkeypatch):
    waited_for = []
    pool = bare_pool([Undying([])])
    pool._processes[0]._parent_pid = os.getpid()
    monkeypatch.setattr(Undying, "join", lambda worker, _: waited_for.append(worker))
    pool._raise_dead_worker(5)
    assert not waited_for


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}")],
)
def test_the_signal_that_killed_a_worker_is_told_also_if_it_has_no_name(number, name):
    workers = [SimpleNamespace(exitcode=code) for code in (None, -number, None)]
    pool = bare_pool(workers)
    pool._shared.status.refused = [False] * 3
    with pytest.raises(WorkerKilled) as raised:
        pool._raise_dead_worker(5)
    assert (raised.value.place.index, raised.value.cause) == (1, f"was killed by {name}")


def test_a_pool_that_was_shut_down_is_not_waited_for():
    """So it is where Ctrl-C comes while another one takes its place."""
    with pytest.raises(ProtocolError, match="was shut down, and no other was started"):
        bare_pool([])._raise_dead_worker(5)


def test_a_wait_that_ctrl_c_has_ended_goes_on_with_those_who_have_not_yet_reported():
    """In a notebook: who has reported does not do it a second time."""
    pool, finished = bare_pool(["executor 0", "executor 1", "actor"]), ReadyQueue()
    pool._shared.finished, pool._shared.doorbells, pool._waited = finished, {}, 5
    pool.start_round(6)
    reported = [(finished.fileno(), select.POLLIN)]
    pool._poll = Mock(poll=Mock(side_effect=[reported, KeyboardInterrupt, reported]))
    finished.put(np.array([1], np.int32))
    with pytest.raises(KeyboardInterrupt):
        pool.wait_round(6)
    finished.put(np.array([0], np.int32))
    pool.wait_round(6)
    finished.close()


def interrupt(*_):
    raise KeyboardInterrupt


def bare_pool(processes, stacks=()) -> ProcessPool:
    """A pool of such processes, the last of which is the actor, that answer with such stacks."""
    pool = ProcessPool.__new__(ProcessPool)
    pool._processes, pool._started, pool._failed = list(processes), 5, False
    pool._lifeline, parent_end = multiprocessing.Pipe(duplex=False)
    pool._close_lifeline = parent_end.close
    answers = dict(zip(pool._processes, stacks, strict=False))
    pool._stacks = SimpleNamespace(ask=answers.get, close=lambda: None)
    status = SimpleNamespace(
        rounds=[5, 5], steps=[3, 4], groups=np.zeros(3, np.int64), read_error=lambda _: ""
    )
    config = CollectorSettings(num_envs=2, timeout_s=7.0, frames_per_batch=2)
    pool._shared = SimpleNamespace(status=status, config=config)
    return pool


@pytest.mark.parametrize(
    ("stacks", "told"),
    [
        (
            [WAITS, HANGS, WAITS],
            "executor 1 (environments [1]), round 5, step 4: hangs: no sign of life "
            "for 7 s\n" + HANGS.rstrip(),
        ),
        (
            [WAITS, WAITS, ""],
            "actor 0, round 5: hangs: no sign of life for 7 s\n"
            "It gives no stack: it is stopped, or blocked in the kernel.",
        ),
        (
            [HANGS, WAITS, HANGS],
            "executor 0 (environments [0]), round 5, step 3: hangs: no sign of life "
            f"for 7 s\n{HANGS}and actor 0, round 5",
        ),
        (
            [WAITS, WAITS, WAITS],
            "executor 0 (environments [0]), round 5, step 3: waits, as others do: no "
            "sign of life for 7 s\n"
            + WAITS
            + "and executor 1 (environments [1]), round 5, step 4\nand actor 0, round 5",
        ),
    ],
    ids=["one", "no stack", "two", "all wait"],
)
def test_of_a_silent_pool_those_are_named_that_do_not_wait(stacks, told):
    pool = bare_pool(["executor 0", "executor 1", "actor"], stacks)
    with pytest.raises(WorkerError) as raised:
        pool._raise_silent_worker(5, silent=[0, 1, 2])
    assert str(raised.value) == told


def test_a_worker_that_still_imports_is_told_with_what_helps():
    own = '  File "/mine/slow.py", line 3 in <module>\n'
    python = '  File "<frozen importlib._bootstrap>", line 1176 in _find_and_load\n'
    pool = bare_pool(["executor 0", "executor 1", "actor"], [WAITS, WAITS, python + own + python])
    with pytest.raises(WorkerError) as raised:
        pool._raise_silent_worker(5, silent=[0, 1, 2])
    assert str(raised.value) == (
        "actor 0, round 5: hangs: no sign of life for 7 s; it is still importing, and a larger "
        "timeout_s gives it the time\n" + own.rstrip()
    )


def test_whoever_works_or_has_finished_the_round_does_not_hold_it_up():
    pool = bare_pool(["executor 0", "executor 1", "actor"])
    assert pool._silent({1}, np.array([9.0, 9.0, 9.0])) == [1, 2]
    assert pool._silent({0, 1}, np.array([1.0, 9.0, 1.0])) == [1]


def test_an_actor_that_fell_silent_after_the_executor_it_made_wait_is_suspected():
    pool = bare_pool(["executor 0", "executor 1", "actor"])
    assert pool._silent({0}, np.array([7.1, 0.0, 6.9])) == [0, 2]


def test_a_daemon_of_multiprocessing_is_told_that_it_may_start_no_workers(monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    shared = SimpleNamespace(config=CollectorSettings(num_envs=2, frames_per_batch=2))
    with pytest.raises(ConfigurationError, match=r"Pool are.* set num_actors=0, or use"):
        ProcessPool(shared, [], [])
