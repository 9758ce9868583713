"""A run whose workers are killed has the bits of one whose workers live."""

from __future__ import annotations

import logging
import os
import signal
from multiprocessing import forkserver
from multiprocessing.connection import wait

import pytest
import torch
from torch import nn

from hts_torchrl import GymEnvs, HTSCollector, WorkerError
from hts_torchrl.models import make_actor_critic
from tests.fakes import CoordinateEnvs, DeadlyEnvs, FailingEnv, NestedActionEnv
from tests.policies import composite_policy, echo_policy, echo_weights
from tests.protocol.test_parent import alive
from tests.runs import digest, perturbed, play

pytestmark = pytest.mark.processes

ENVS, STEPS, ROUNDS = 4, 8, 5


def policy(network: str = "mlp") -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make_actor_critic(network, GymEnvs("CartPole-v1").group([0]).spec)


def collect(create, network: str = "mlp", **settings) -> HTSCollector:
    frames = ENVS * STEPS
    defaults = {"num_envs": ENVS, "frames_per_batch": frames, "total_frames": ROUNDS * frames}
    return HTSCollector(create, policy(network), **(defaults | {"recover": "replay"} | settings))


def run(create, network: str = "mlp", **settings) -> str:
    return digest(play(collect(create, network, **settings), perturbed(policy(network))))


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return run(DeadlyEnvs(""), num_actors=0)


@pytest.mark.parametrize(
    "deaths",
    [
        [("reset", 0)],
        [("step", STEPS)],
        [("step", 2 * STEPS + 3)],
        [("step", 3), ("step", 3 * STEPS + 1)],
        [("step", ROUNDS * STEPS - 1)],
    ],
    ids=["reset", "start of a round", "middle", "twice", "end"],
)
def test_an_executor_that_is_killed_changes_no_bit(undisturbed, deaths, tmp_path):
    settings = {"envs_per_executor": 2} if len(deaths) > 1 else {}
    assert run(DeadlyEnvs(str(tmp_path), tuple(deaths)), **settings) == undisturbed
    assert len(list(tmp_path.iterdir())) == len(deaths)


def kill(collector: HTSCollector, worker: int) -> None:
    process = collector._runner.pool._processes[worker]
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.parametrize("delay", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_workers_that_are_killed_between_batches_change_no_bit(delay):
    """Among them the only actor, and all executors at once."""
    weights_of, batches = perturbed(policy()), []
    collector = collect(DeadlyEnvs(""), delay=delay)
    for batch in collector:
        batches.append(batch.clone())
        victims = {1: [ENVS], 3: range(ENVS)}.get(len(batches), [])
        for worker in victims:
            kill(collector, worker)
        assert digest([batch]) == digest(batches[-1:]), "the batch at hand must stay what it is"
        collector.update_policy_weights_(weights_of(len(batches)))
    alone = collect(DeadlyEnvs(""), delay=delay, num_actors=0)
    assert digest(batches) == digest(play(alone, weights_of))


def test_a_killed_executor_and_the_only_actor_change_no_bit_of_compiled_passes():
    weights_of, batches = perturbed(policy()), []
    collector = collect(DeadlyEnvs(""), compile_policy=True)
    for batch in collector:
        batches.append(batch.clone())
        for worker in {1: [ENVS], 3: [0]}.get(len(batches), []):  # the actor, then an executor
            kill(collector, worker)
        collector.update_policy_weights_(weights_of(len(batches)))
    collector.shutdown()
    assert digest(batches) == run(DeadlyEnvs(""), num_actors=0, compile_policy=True)


def test_the_parts_of_an_action_are_played_again():
    """The environment's observation repeats the action, which a new executor must take again."""
    weights_of, batches = perturbed(composite_policy()), []

    def make(**settings):
        frames = ENVS * STEPS
        return HTSCollector(
            NestedActionEnv, composite_policy(), num_envs=ENVS, frames_per_batch=frames,
            total_frames=ROUNDS * frames, recover="replay", **settings,
        )  # fmt: skip

    collector = make()
    for batch in collector:
        batches.append(batch.clone())
        for worker in {1: [ENVS], 2: [0]}.get(len(batches), []):
            kill(collector, worker)
        collector.update_policy_weights_(weights_of(len(batches)))
    assert digest(batches) == digest(play(make(num_actors=0), weights_of))


def test_what_is_remembered_is_as_it_was_when_the_round_began(tmp_path):
    deaths = [("step", 2 * STEPS + 3), ("step", 3 * STEPS + 1)]
    killed = run(DeadlyEnvs(str(tmp_path), tuple(deaths)), "lstm", envs_per_executor=2)
    assert len(list(tmp_path.iterdir())) == 2
    assert killed == run(DeadlyEnvs(""), "lstm", num_actors=0)


def test_rounds_of_random_actions_are_repeated_as_such(tmp_path):
    """One is killed in the last of them, and one in the round after it."""
    deaths = [("step", STEPS + 3), ("step", 2 * STEPS + 1)]
    random = {"init_random_frames": 2 * ENVS * STEPS}
    killed = run(DeadlyEnvs(str(tmp_path), tuple(deaths)), envs_per_executor=2, **random)
    assert len(list(tmp_path.iterdir())) == 2
    assert killed == run(DeadlyEnvs(""), num_actors=0, **random)


@pytest.mark.thorough
def test_a_fork_server_that_is_killed_changes_no_bit(undisturbed, caplog):
    """Alone, then together with an executor; the workers that it has started live on."""
    collector, weights_of, batches = collect(DeadlyEnvs("")), perturbed(policy()), []
    with caplog.at_level(logging.WARNING, "hts_torchrl"):
        for batch in collector:
            batches.append(batch.clone())
            if len(batches) in (1, 3):
                processes = collector._runner.pool._processes
                pids = [process.pid for process in processes]
                os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
                # Else the round may end before the kernel has ended the server.
                assert wait([process.sentinel for process in processes], 30.0)
            if len(batches) == 3:
                os.kill(pids[0], signal.SIGKILL)
            if len(batches) in (2, 4):  # the next round needed another worker pool
                assert not any(map(alive, pids))
            collector.update_policy_weights_(weights_of(len(batches)))
    assert digest(batches) == undisturbed
    assert len(caplog.records) == 2
    assert "their fork server was killed" in caplog.text


def test_each_recovery_is_logged_with_worker_signal_and_round(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hts_torchrl"):
        run(DeadlyEnvs(str(tmp_path), (("step", STEPS + 2),)))
    (record,) = caplog.records
    assert record.message == (
        "executor 1 (environments [1]), round 1, step 2: was killed by SIGKILL: round 1 is "
        "repeated by a new worker pool (recovery 1 of at most 3)"
    )


def test_a_worker_that_dies_again_and_again_ends_the_run(tmp_path, caplog):
    deaths = tuple(("reset", number) for number in range(9))
    with pytest.raises(WorkerError, match="was killed by SIGKILL"):
        run(DeadlyEnvs(str(tmp_path), deaths))
    assert len(caplog.records) == 3
    assert len(list(tmp_path.iterdir())) == 4


def test_by_default_a_killed_worker_ends_the_run(tmp_path):
    with pytest.raises(WorkerError, match="was killed by SIGKILL"):
        run(DeadlyEnvs(str(tmp_path), (("step", 3),)), recover="fail")
    assert len(list(tmp_path.iterdir())) == 1


def test_an_exception_is_no_death_and_ends_the_run(caplog):
    collector = HTSCollector(
        FailingEnv("step", at=3),
        echo_policy(),
        num_envs=2,
        frames_per_batch=8,
        total_frames=32,
        recover="replay",
    )
    with pytest.raises(WorkerError, match="Broken: as asked"):
        play(collector)
    assert not caplog.records


def test_an_environment_that_does_not_replay_is_an_error():
    """A CoordinateEnv's game depends on the games before it.

    The worker is killed in round 4 or, where that has ended already, in round 5. With these lengths
    both begin in the middle of a game.
    """
    collector = HTSCollector(
        CoordinateEnvs((6, 9, 8)),
        echo_policy(),
        num_envs=2,
        frames_per_batch=8,
        total_frames=80,
        recover="replay",
    )
    iterator = iter(collector)
    for version in range(1, 5):
        next(iterator)
        collector.update_policy_weights_(echo_weights(version))
    kill(collector, 0)
    with pytest.raises(WorkerError, match=r"ReplayError: environment [01] does not replay: "):
        list(iterator)
