import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.process import BaseProcess
from types import SimpleNamespace

import numpy as np
import pytest

from hts_torchrl.config import CrewConfig
from hts_torchrl.errors import ConfigurationError, WorkerError
from hts_torchrl.schedule import Schedule
from hts_torchrl.workers.crew import (
    ProcessCrew,
    SerialCrew,
    _deaf_children,
    _single_threaded_children,
    _start,
    _without_main_module,
)

WAITS = "Stack (most recent call first):\n  File x, line 1 in sleep_until_readable\n"
HANGS = "Stack (most recent call first):\n  File x, line 1 in step\n  File x, line 9 in live\n"


class Recorder:
    """Stands for an executor or the actor, and writes down who is called when."""

    def __init__(self, name: str, calls: list) -> None:
        self.name, self.calls = name, calls

    def begin_round(self, number):
        self.calls.append((self.name, "begin", number))

    def put_state(self, step):
        self.calls.append((self.name, "put", step))

    def step(self, step):
        self.calls.append((self.name, "step", step))

    def answer(self, envs):
        self.calls.append((self.name, "answer", np.asarray(envs).tolist()))

    def close(self):
        self.calls.append((self.name, "close", None))


@pytest.fixture
def calls():
    return []


@pytest.fixture
def crew(calls):
    schedule = Schedule.from_frames(4, total_frames=-1, num_envs=2, delay=1)
    board = SimpleNamespace(schedule=schedule, config=SimpleNamespace(num_envs=2))
    executors = [Recorder("a", calls), Recorder("b", calls)]
    return SerialCrew(board, executors, Recorder("actor", calls))


def test_in_each_step_all_observe_then_one_answers_then_all_step(crew, calls):
    crew.start_round(7)
    expected = [("a", "begin", 7), ("b", "begin", 7)]
    for step in range(2):
        expected += [("a", "put", step), ("b", "put", step), ("actor", "answer", [0, 1])]
        expected += [("a", "step", step), ("b", "step", step)]
    assert calls == expected


def test_a_serial_round_is_over_when_it_has_started(crew, calls):
    crew.start_round(0)
    before = list(calls)
    crew.wait_round(0)
    assert calls == before


def test_shutting_down_twice_closes_environments_once(crew, calls):
    crew.shutdown()
    crew.shutdown()
    assert calls == [("a", "close", None), ("b", "close", None)]


def test_an_exception_when_it_is_closed_keeps_no_executor_from_being_closed(crew, calls, caplog):
    def fail():
        raise ArithmeticError("as asked")

    first, _ = crew._executors
    first.index, first.close = 0, fail
    crew.shutdown()
    assert calls == [("b", "close", None)]
    assert "executor 0: raised when it was stopped" in caplog.text
    assert "ArithmeticError: as asked" in caplog.text


def test_children_start_with_one_thread(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with _single_threaded_children():
        inside = os.environ["OMP_NUM_THREADS"]
    assert (inside, os.environ.get("OMP_NUM_THREADS")) == ("1", None)


def test_a_number_of_threads_that_the_user_chose_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with _single_threaded_children():
        assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_children_do_not_die_of_a_signal_to_the_whole_group_while_they_start(name):
    """Theirs is to wait for what the parent makes of it."""
    with _deaf_children():
        child = subprocess.run(["sh", "-c", f"kill -{name} $$; echo alive"], stdout=subprocess.PIPE)
    assert child.stdout == b"alive\n"


def test_ctrl_c_comes_through_when_the_children_have_started():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = False
    try:
        with pytest.raises(KeyboardInterrupt), _deaf_children():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            started = True
    finally:
        signal.signal(signal.SIGINT, before)
    assert started


def test_the_main_module_is_back_even_after_an_exception():
    main = sys.modules["__main__"]
    with pytest.raises(ValueError, match="oh"), _without_main_module():  # noqa: PT012
        assert sys.modules["__main__"] is not main
        raise ValueError("oh")
    assert sys.modules["__main__"] is main


def test_more_executors_than_a_fork_server_can_start_are_refused():
    config = CrewConfig(num_envs=500, envs_per_executor=2)
    with pytest.raises(ConfigurationError, match="250 executors; a fork server can start 240"):
        ProcessCrew(SimpleNamespace(config=config), [], [])


def test_a_socket_whose_path_is_too_long_is_told_as_the_setting_that_it_is(monkeypatch):
    def start(_):
        raise OSError("AF_UNIX path too long")

    process = SimpleNamespace(start=lambda: start(None))
    monkeypatch.setattr("tempfile.tempdir", "/long")
    with pytest.raises(ConfigurationError, match="TMPDIR=/long: it is too long for the socket"):
        _start(process)


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
    monkeypatch.setattr("hts_torchrl.workers.crew._STOP_S", 0.0)
    asked = []
    crew = bare_crew([Undying(asked)])
    crew.shutdown()
    assert asked == ["kill"]
    assert crew._lifeline.closed


def test_a_shutdown_that_was_interrupted_is_finished_by_the_next(monkeypatch):
    monkeypatch.setattr("hts_torchrl.workers.crew._STOP_S", 0.0)
    asked = []
    crew = bare_crew([Undying(asked)])
    with monkeypatch.context() as patch:
        patch.setattr(Undying, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            crew.shutdown()
    assert asked == []
    crew.shutdown()
    assert asked == ["kill"]


def interrupt(*_):
    raise KeyboardInterrupt


def bare_crew(processes, stacks=()) -> ProcessCrew:
    """A crew of such processes, the last of which is the actor, that answer with such stacks."""
    crew = ProcessCrew.__new__(ProcessCrew)
    crew._processes, crew._started, crew._failed = list(processes), 5, False
    crew._lifeline, parent_end = multiprocessing.Pipe(duplex=False)
    crew._close_lifeline = parent_end.close
    answers = dict(zip(crew._processes, stacks, strict=False))
    crew._stacks = SimpleNamespace(ask=answers.get, close=lambda: None)
    logbook = SimpleNamespace(
        rounds=[5, 5], steps=[3, 4], groups=np.zeros(3, np.int64), read_error=lambda _: ""
    )
    config = CrewConfig(num_envs=2, timeout_s=7.0)
    crew._board = SimpleNamespace(logbook=logbook, config=config)
    return crew


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
def test_of_a_silent_crew_those_are_named_that_do_not_wait(stacks, told):
    crew = bare_crew(["executor 0", "executor 1", "actor"], stacks)
    with pytest.raises(WorkerError) as raised:
        crew._raise_silent_worker(5, silent=[0, 1, 2])
    assert str(raised.value) == told


def test_whoever_works_or_has_finished_the_round_does_not_hold_it_up():
    crew = bare_crew(["executor 0", "executor 1", "actor"])
    assert crew._silent({1}, np.array([9.0, 9.0, 9.0])) == [1, 2]
    assert crew._silent({0, 1}, np.array([1.0, 9.0, 1.0])) == [1]


def test_an_actor_that_fell_silent_after_the_executor_it_made_wait_is_suspected():
    crew = bare_crew(["executor 0", "executor 1", "actor"])
    assert crew._silent({0}, np.array([7.1, 0.0, 6.9])) == [0, 2]
