"""A worker that raises, dies or goes silent: the caller learns which one, where and why."""

import multiprocessing

import numpy as np
import pytest

from hts_torchrl import HTSCollector, WorkerError
from hts_torchrl.errors import WorkerPlace
from tests.fakes import CoordinateEnvs, FailingEnv, HangingEnv, KillSelfEnv, UndeclaredEnv
from tests.policies import KillSelfNet, RaisingNet, echo_policy
from tests.runs import play

pytestmark = pytest.mark.processes

ENVS, STEPS = 2, 4


def collect(create=CoordinateEnvs(), policy=None, **settings) -> HTSCollector:  # noqa: B008
    frames = ENVS * STEPS
    return HTSCollector(
        create, policy or echo_policy(), num_envs=ENVS, frames_per_batch=frames,
        total_frames=4 * frames, **settings,
    )  # fmt: skip


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
    error = failure(collect(UndeclaredEnv(np.zeros(5), at=STEPS + 2)))
    assert error.place == WorkerPlace("executor", 1, (1,), 1, 2)
    assert (
        "step() of environment 1 returned what is not declared: 'observation' is float64 [5]"
        in (error.cause)
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


def test_a_silent_executor_is_named_after_the_timeout_and_ended():
    """The first round may take long, the workers are starting; the second may not."""
    collector = collect(HangingEnv(at=STEPS + 2))
    iterator = iter(collector)
    next(iterator)
    object.__setattr__(collector.config, "timeout_s", 2.0)
    with pytest.raises(WorkerError, match=r"for 2 s; not finished: executor 1 ") as raised:
        next(iterator)
    assert raised.value.place == WorkerPlace("executor", 1, (1,), 1, 2)
    assert not multiprocessing.active_children()
