import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from hts_torchrl.errors import ConfigurationError, ProtocolError
from hts_torchrl.schedule import Schedule
from hts_torchrl.workers.serial_pool import SerialPool


class Recorder:
    """Stands for an executor or the actor, and writes down who is called when."""

    def __init__(self, name: str, calls: list) -> None:
        self.name, self.calls = name, calls

    def restore(self):
        """Nothing was played."""

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
def pool(calls):
    schedule = Schedule.from_frames(4, total_frames=-1, num_envs=2, delay=1)
    shared = SimpleNamespace(schedule=schedule, config=SimpleNamespace(num_envs=2))
    make_executors = [lambda _, name=name: Recorder(name, calls) for name in "ab"]
    return SerialPool(shared, make_executors, Recorder("actor", calls))


def test_in_each_step_all_observe_then_one_answers_then_all_step(pool, calls):
    pool.start_round(7)
    expected = [("a", "begin", 7), ("b", "begin", 7)]
    for step in range(2):
        expected += [("a", "put", step), ("b", "put", step), ("actor", "answer", [0, 1])]
        expected += [("a", "step", step), ("b", "step", step)]
    assert calls == expected


def test_threads_that_an_environment_sets_are_not_those_of_the_learner(pool, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(pool._executors[0], "step", lambda _: torch.set_num_threads(threads + 1))
    pool.start_round(0)
    assert torch.get_num_threads() == threads


def test_nor_where_the_environment_then_fails(pool, monkeypatch):
    threads = torch.get_num_threads()

    def fail(_):
        torch.set_num_threads(threads + 1)
        raise ArithmeticError

    monkeypatch.setattr(pool._executors[0], "step", fail)
    with pytest.raises(ArithmeticError):
        pool.start_round(0)
    assert torch.get_num_threads() == threads


def test_a_folder_to_which_an_environment_goes_is_its_own(pool, tmp_path, monkeypatch):
    folder, begun_in = Path.cwd(), []
    first, second = pool._executors
    monkeypatch.setattr(first, "begin_round", lambda _: begun_in.append(Path.cwd()))
    monkeypatch.setattr(second, "step", lambda _: os.chdir(tmp_path))
    monkeypatch.setattr(first, "close", lambda: begun_in.append(Path.cwd()))
    try:
        for call in (partial(pool.start_round, 0), partial(pool.start_round, 1), pool.shutdown):
            call()
            assert Path.cwd() == folder
    finally:
        os.chdir(folder)
    assert begun_in == [folder, tmp_path, tmp_path]


def test_a_folder_that_an_environment_removes_at_its_end_ends_nothing(pool, tmp_path, monkeypatch):
    folder, own = Path.cwd(), tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr(pool._executors[0], "begin_round", lambda _: os.chdir(own))
    monkeypatch.setattr(pool._executors[1], "close", own.rmdir)
    try:
        pool.start_round(0)
        pool.shutdown()
        pool.shutdown()
        assert Path.cwd() == folder
    finally:
        os.chdir(folder)


def test_an_environment_that_changes_how_policy_and_learner_compute_is_refused(pool, monkeypatch):
    monkeypatch.setattr(
        pool._executors[1], "step", lambda _: torch.set_default_dtype(torch.float64)
    )
    try:
        with pytest.raises(ConfigurationError, match=r"^round 3: .* dtype to torch\.float64,"):
            pool.start_round(3)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_serial_round_is_over_when_it_has_started(pool, calls):
    pool.start_round(0)
    before = list(calls)
    pool.wait_round(0)
    assert calls == before


def test_shutting_down_twice_closes_environments_once(pool, calls):
    pool.shutdown()
    pool.shutdown()
    assert calls == [("a", "close", None), ("b", "close", None)]


def test_an_exception_when_it_is_closed_keeps_no_executor_from_being_closed(pool, calls, caplog):
    def fail():
        raise ArithmeticError("as asked")

    first, _ = pool._executors
    first.index, first.close = 0, fail
    pool.shutdown()
    assert calls == [("b", "close", None)]
    assert "executor 0: raised when it was stopped" in caplog.text
    assert "ArithmeticError: as asked" in caplog.text


@pytest.mark.parametrize("at", ["begin_round", "put_state", "step"])
def test_a_round_that_ctrl_c_has_ended_is_never_taken_for_a_whole_one(pool, at):
    _, second = pool._executors
    pool.start_round(0)
    setattr(second, at, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pool.start_round(1)
    with pytest.raises(ProtocolError, match="round 1 was interrupted"):
        pool.wait_round(1)


@pytest.mark.parametrize("role", ["executor", "actor"])
def test_an_exception_tells_round_and_step(pool, role):
    """As the place of a worker process does; one line that refuses something says it already."""
    failing, at = (pool._actor, "answer") if role == "actor" else (pool._executors[1], "step")
    setattr(failing, at, Mock(side_effect=[None, ArithmeticError("as asked")]))
    with pytest.raises(ArithmeticError) as raised:
        pool.start_round(7)
    assert raised.value.__notes__ == ["in round 7, step 1"]
    setattr(failing, at, Mock(side_effect=ConfigurationError("round 8, step 0: not declared")))
    with pytest.raises(ConfigurationError) as refused:
        pool.start_round(8)
    assert not hasattr(refused.value, "__notes__")
