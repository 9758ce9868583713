"""Processes give the bits of the serial twin: actors, groups, barriers, start method.

With random delays in all workers: ``protocol/test_cells.py``.
"""

import functools
import itertools

import pytest

from hts_torchrl import ConfigurationError
from tests.determinism.tasks import TASKS
from tests.runs import digest, perturbed, play

pytestmark = pytest.mark.processes


@functools.cache
def run(name: str, seed: int = 0, **settings) -> str:
    """Digest of a whole run, with other weights in every round."""
    task = TASKS[name]
    return digest(play(task.collector(seed=seed, **settings), perturbed(task.policy())))


@pytest.mark.parametrize(
    "name",
    [
        "cartpole",
        pytest.param("pendulum", marks=pytest.mark.thorough),
        "breakout",
        "lstm",
        "masked",
        "mixed",
        "parts",
        pytest.param("parts remembered", marks=pytest.mark.thorough),
        pytest.param("combined", marks=pytest.mark.thorough),
    ],
)
def test_two_actors_give_the_bits_of_the_serial_twin(name):
    assert run(name, num_actors=2, start_method="forkserver") == run(name)


@pytest.mark.parametrize(
    "name", ["cartpole", pytest.param("breakout", marks=pytest.mark.thorough), "counting"]
)
def test_one_actor_and_groups_of_two_give_the_bits_of_the_serial_twin(name):
    assert run(name, num_actors=1, envs_per_executor=2) == run(name)


@pytest.mark.parametrize("envs_per_executor", [1, 2, 4])
def test_envpool_gives_the_same_bits_in_groups_of_any_size(envs_per_executor):
    size = {"envs_per_executor": envs_per_executor}
    assert run("envpool", num_actors=1, **size) == run("envpool")


@pytest.mark.parametrize(("actors", "envs_per_executor"), [(1, 2), (2, 4), (0, 8)])
def test_games_of_several_agents_give_the_bits_of_the_serial_twin(actors, envs_per_executor):
    serial = run("agents", envs_per_executor=2)
    assert run("agents", num_actors=actors, envs_per_executor=envs_per_executor) == serial


def test_half_a_game_in_an_executor_is_refused():
    with pytest.raises(ConfigurationError, match="envs_per_executor to multiples of 2"):
        run("agents", num_actors=1, envs_per_executor=1)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_barrier_at_every_step_gives_the_bits_of_the_serial_twin(delay):
    assert run("cartpole", delay=delay, num_actors=1, step_barrier=True) == run(
        "cartpole", delay=delay
    )


@pytest.mark.thorough
def test_spawned_workers_give_the_bits_of_the_serial_twin():
    assert run("cartpole", num_actors=1, start_method="spawn", envs_per_executor=4) == run(
        "cartpole"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", ["cartpole", "pendulum", "squashed", "choices", "breakout", "lstm", "gru", "counting"]
)
@pytest.mark.parametrize("delay", [0, 1])
def test_no_setting_of_the_workers_changes_a_bit(name, delay):
    most = min(3, TASKS[name].num_envs)
    digests = {
        run(name, delay=delay, num_actors=actors, envs_per_executor=group, start_method=method)
        for actors, group in itertools.product((1, most), (1, 2))
        for method in (["forkserver", "spawn"] if group == 1 else ["forkserver"])
    }
    assert digests == {run(name, delay=delay)}
