"""A worker that raises, dies or goes silent: the caller learns which one, where and why."""

import logging
import multiprocessing
import os
import signal

import numpy as np
import pytest

from hts_torchrl import ConfigurationError, WorkerError
from hts_torchrl.errors import WorkerPlace
from tests.fakes import FailingEnv, HangingEnv, KillSelfEnv, UndeclaredEnv
from tests.policies import HangingNet, KillSelfNet, RaisingNet, echo_policy
from tests.protocol.small import ENVS, STEPS, collect
from tests.runs import digest, play

pytestmark = pytest.mark.processes


def failure(collector) -> WorkerError:
    with pytest.raises(WorkerError) as raised:
        play(collector)
    return raised.value


@pytest.mark.parametrize(
    ("create", "place"),
    [
        (FailingEnv("constructor"), WorkerPlace("executor", 1, (1,), 0, 0)),
        (FailingEnv("reset"), WorkerPlace("executor", 1, (1,), 0, 0)),
        (FailingEnv("step", at=STEPS + 2), WorkerPlace("executor", 1, (1,), 1, 2)),
    ],
    ids=["constructor", "reset", "step"],
)
def test_an_exception_in_an_environment_names_it_and_brings_its_traceback(create, place):
    error = failure(collect(create))
    assert error.place == place
    assert "tests.fakes.Broken: as asked" in error.cause


def test_an_environment_in_a_group_is_named_by_the_note_on_its_exception():
    error = failure(collect(FailingEnv("step", index=11), envs_per_executor=2, first_env=10))
    assert error.place.envs == (10, 11)
    assert "raised by step() of environment 11" in error.cause


def test_an_observation_that_is_not_declared_names_environment_round_and_step():
    with pytest.raises(ConfigurationError) as raised:
        play(collect(UndeclaredEnv(np.zeros(5), at=STEPS + 2)))
    assert str(raised.value) == (
        "round 1, step 2: step() of environment 1 returned what is not declared: 'observation' is "
        "float64 [5], but float32 [5] is declared (in executor 1)"
    )


def test_a_killed_executor_is_named_with_its_signal_round_and_step():
    error = failure(collect(KillSelfEnv(at=STEPS + 2)))
    assert error.place == WorkerPlace("executor", 1, (1,), 1, 2)
    assert error.cause == "was killed by SIGKILL"


def test_a_killed_actor_is_named_with_its_signal():
    error = failure(collect(policy=echo_policy(KillSelfNet()), inference_batch_size=1))
    assert (error.place.role, error.place.index) == ("actor", 0)
    assert error.cause == "was killed by SIGKILL"


def test_an_exception_in_the_policy_names_the_actor_and_brings_its_traceback():
    error = failure(collect(policy=echo_policy(RaisingNet())))
    assert (error.place.role, error.place.index) == ("actor", 0)
    assert "ArithmeticError: as asked" in error.cause


def silence(collector, stop: str = "") -> WorkerError:
    """What comes of a hang after the first round; that one may take long, workers are starting.

    ``stop`` names a role whose first process is stopped then.
    """
    iterator = iter(collector)
    next(iterator)
    if stop:
        (stopped,) = (p for p in multiprocessing.active_children() if p.name == f"hts-{stop}-0")
        os.kill(stopped.pid, signal.SIGSTOP)
    object.__setattr__(collector.config, "timeout_s", 2.0)
    with pytest.raises(WorkerError, match="hangs: no sign of life for 2 s") as raised:
        list(iterator)
    assert not multiprocessing.active_children()
    return raised.value


@pytest.mark.parametrize(
    ("create", "step", "innermost"),
    [
        pytest.param(HangingEnv("step", at=STEPS + 2), 2, "_hang", marks=pytest.mark.thorough),
        (HangingEnv("C code", at=STEPS + 2), 2, "_hang_in_c"),
        pytest.param(HangingEnv("reset"), 0, "_hang", marks=pytest.mark.thorough),
    ],
    ids=["step", "C code", "reset"],
)
def test_a_hanging_executor_is_named_with_its_stack_and_ended(create, step, innermost):
    error = silence(collect(create))
    assert error.place == WorkerPlace("executor", 1, (1,), 1, step)
    _, header, call, *_, outermost = error.cause.splitlines()
    assert header == "Stack (most recent call first):"
    assert call.endswith(f" in {innermost}")
    assert outermost.endswith(" in <module>")


def test_a_hanging_actor_is_named_and_not_those_who_wait_for_it():
    passes_of_a_round = ENVS * STEPS
    policy = echo_policy(HangingNet(at=passes_of_a_round + 3))
    error = silence(collect(policy=policy, inference_batch_size=1))
    assert error.place == WorkerPlace("actor", 0, (), 1, 0)
    assert "policies.py" in error.cause.splitlines()[2]
    assert "executor" not in error.cause.replace("executor.py", "")


@pytest.mark.thorough
def test_a_stopped_worker_is_named_without_a_stack():
    error = silence(collect(), stop="actor")
    assert (error.place.role, error.place.index) == ("actor", 0)
    assert "It gives no stack" in error.cause


@pytest.mark.parametrize("num_actors", [0, 1])
def test_an_exception_when_environments_are_closed_is_logged_and_costs_no_batch(num_actors, caplog):
    settings = {"envs_per_executor": 1, "num_actors": num_actors}
    with caplog.at_level(logging.WARNING):
        batches = play(collect(FailingEnv("close"), **settings))
    assert digest(batches) == digest(play(collect(num_actors=0)))
    (record,) = caplog.records
    text = caplog.text
    assert record.getMessage().startswith("executor 1")
    assert "raised when it was stopped" in text
    assert "tests.fakes.Broken: as asked\nraised by close() of environment 1" in text


def test_an_exception_when_the_environment_that_was_tried_is_closed_ends_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        batches = play(collect(FailingEnv("close", index=0), num_actors=0))
    assert digest(batches) == digest(play(collect(num_actors=0)))
    tried, stopped = caplog.records
    assert tried.getMessage().startswith("an environment raised when it was closed")
    assert "Broken: as asked\nraised by close() of environment 0" in tried.getMessage()
    assert stopped.getMessage().startswith("executor 0: raised when it was stopped")
