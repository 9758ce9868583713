"""Training gives the same bits whatever its workers: batches, weights and optimiser.

A part of ``benchmarks/determinism.py``, which is the whole matrix.
"""

import functools
from importlib.util import find_spec

import pytest
from benchmarks import determinism
from benchmarks.determinism import Task, WorkerPool

from hts_torchrl import AtariEnvs, FootballEnvs, GymEnvs

pytestmark = pytest.mark.processes

SERIAL = WorkerPool(0)
# Games so short that they end, and start again, within these few rounds.
TASKS = {
    "CartPole": Task(GymEnvs("CartPole-v1", {"max_episode_steps": 40}), "mlp"),
    "no delay": Task(GymEnvs("CartPole-v1", {"max_episode_steps": 40}), "mlp", data={"delay": 0}),
    "Dropout": Task(GymEnvs("CartPole-v1", {"max_episode_steps": 40}), "mlp", dropout=True),
    "Pendulum": Task(GymEnvs("Pendulum-v1", {"max_episode_steps": 50}), "mlp"),
    "Breakout": Task(AtariEnvs("breakout", max_frames=48), "nature"),
    "Football": Task(FootballEnvs("3_vs_1_with_keeper"), "nature"),
    "gfootball": Task(FootballEnvs("3_vs_1_with_keeper", engine="gfootball"), "nature"),
    "gfootball team": Task(
        FootballEnvs("3_vs_1_with_keeper", engine="gfootball", num_players=3), "nature"
    ),
}
UPDATES = {
    ("CartPole", "A2C"): 20,
    ("CartPole", "A2C gradient"): 20,
    ("CartPole", "PPO ratio"): 20,
    ("Pendulum", "PPO displacement"): 20,
    ("CartPole", "PPO decoupled"): 20,
    ("CartPole", "PQN"): 20,
    ("no delay", "PQN"): 20,
    ("Breakout", "A2C"): 4,
    ("Football", "PPO ratio"): 4,
    ("gfootball", "PPO ratio"): 4,
    ("gfootball team", "PPO ratio"): 4,
}
needs_gfootball = pytest.mark.skipif(
    find_spec("gfootball_engine") is None, reason="scripts/install_gfootball.sh"
)
MARKS = {
    "Football": pytest.mark.thorough,
    "gfootball": needs_gfootball,
    "gfootball team": needs_gfootball,
}
RUNS = [pytest.param(*run, id=" ".join(run), marks=MARKS.get(run[0], ())) for run in UPDATES]


@pytest.fixture(autouse=True)
def _short_games(monkeypatch):
    monkeypatch.setattr(determinism, "TASKS", TASKS)


@functools.cache
def digest(env: str, algorithm: str, pool: WorkerPool = SERIAL, seed: int = 1) -> str:
    return determinism.train(env, algorithm, pool, updates=UPDATES[env, algorithm], seed=seed)


@pytest.mark.timeout(300)  # on an overloaded machine; seconds elsewhere
@pytest.mark.parametrize(("env", "algorithm"), RUNS)
@pytest.mark.parametrize(
    "pool", [pytest.param(WorkerPool(1, 2), marks=pytest.mark.thorough), WorkerPool(2, 2)], ids=str
)
def test_processes_train_to_the_bits_of_the_serial_twin(env, algorithm, pool):
    assert digest(env, algorithm, pool) == digest(env, algorithm)


@needs_gfootball
@pytest.mark.timeout(300)
def test_both_engines_of_football_train_to_the_same_bits():
    assert digest("gfootball", "PPO ratio") == digest("Football", "PPO ratio")
    assert digest("gfootball team", "PPO ratio") != digest("Football", "PPO ratio")


@pytest.mark.timeout(300)
def test_random_delays_change_no_bit():
    assert digest("CartPole", "A2C", WorkerPool(2, 4, jitter=True)) == digest("CartPole", "A2C")


def test_the_same_training_again_gives_the_same_bits():
    again = digest.__wrapped__("Pendulum", "PPO displacement")
    assert again == digest("Pendulum", "PPO displacement")


@pytest.mark.filterwarnings("ignore:the policy learns in train mode and acts in eval mode")
@pytest.mark.parametrize(
    ("env", "algorithm"), [("Dropout", "A2C"), ("Pendulum", "PPO ratio"), ("CartPole", "PQN")]
)
def test_a_run_that_is_stopped_and_resumed_has_the_same_digest(env, algorithm):
    whole = determinism.train(env, algorithm, SERIAL, updates=4)
    assert determinism.train_and_resume(env, algorithm, updates=4) == whole


SEEDED = [("CartPole", "PQN"), ("Pendulum", "PPO displacement"), ("Breakout", "A2C")]


@pytest.mark.parametrize(("env", "algorithm"), SEEDED)
def test_another_seed_trains_to_other_bits(env, algorithm):
    assert digest(env, algorithm, seed=2) != digest(env, algorithm)


def test_every_algorithm_trains_to_bits_of_its_own():
    digests = [
        determinism.train("CartPole", algorithm, SERIAL, updates=3)
        for algorithm in determinism.ALGORITHMS
    ]
    assert len(set(digests)) == len(determinism.ALGORITHMS) == 6
