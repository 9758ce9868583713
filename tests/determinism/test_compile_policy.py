"""A run with ``compile_policy`` has bits of its own, and the same by whomever it is collected."""

import copy
import functools
import logging
import multiprocessing
import time

import gymnasium
import pytest

from hts_torchrl import HTSCollector, env_spec_of, make_actor_critic
from tests.determinism.scrambled import ScrambledCollector
from tests.determinism.tasks import TASKS
from tests.runs import digest, perturbed, play


@functools.cache
def run(name: str, order: int | None = None, **settings) -> str:
    """Digest of a whole run, with other weights in every round."""
    task, kind = TASKS[name], HTSCollector
    if order is not None:
        kind = type("Ordered", (ScrambledCollector,), {"order": order})
    collector = task.collector(kind, compile_policy=True, **settings)
    return digest(play(collector, perturbed(task.policy())))


@pytest.mark.parametrize(
    "name", ["cartpole", *(pytest.param(n, marks=pytest.mark.slow) for n in ("squashed", "lstm"))]
)
def test_neither_groups_nor_the_order_of_requests_change_the_bits(name):
    others = {run(name, order, envs_per_executor=size) for order, size in ((1, 1), (2, 2), (3, 4))}
    assert others == {run(name)}


@pytest.mark.processes
@pytest.mark.parametrize(
    "workers",
    [
        {"num_actors": 2, "envs_per_executor": 4},
        pytest.param({"num_actors": 1}, marks=pytest.mark.slow),
        pytest.param({"num_actors": 2, "start_method": "spawn"}, marks=pytest.mark.slow),
    ],
)
def test_actors_give_the_bits_of_the_serial_twin(workers):
    assert run("cartpole", **workers) == run("cartpole")


def test_a_stopped_run_goes_on_with_the_same_bits():
    task = TASKS["cartpole"]
    weights_of = perturbed(task.policy())
    stopped = task.collector(compile_policy=True)
    batches = []
    for batch in stopped:
        batches.append(batch.clone())
        stopped.update_policy_weights_(weights_of(len(batches)))
        if len(batches) == 2:
            state = copy.deepcopy(stopped.state_dict())
            break
    stopped.shutdown()
    resumed = task.collector(compile_policy=True)
    resumed.load_state_dict(state)
    resumed.policy.load_state_dict(state["policy_state_dict"])
    batches += play(resumed, lambda version: weights_of(2 + version))
    assert digest(batches) == run("cartpole")


def slow_in_actors(graph, _):
    """A backend that takes longer than ``timeout_s`` of the test below, in workers only."""
    if multiprocessing.parent_process() is not None:
        time.sleep(4.0)
    return graph.forward


def cartpole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


@pytest.mark.processes
def test_environments_that_wait_for_a_compile_do_not_end_the_run(caplog):
    policy = make_actor_critic("mlp", env_spec_of(cartpole))
    with caplog.at_level(logging.INFO, "hts_torchrl"):
        collector = HTSCollector(
            cartpole, policy, num_envs=2, num_actors=1, frames_per_batch=8, total_frames=16,
            timeout_s=1.5, compile_policy={"backend": slow_in_actors},
        )  # fmt: skip
    assert "a pass of 2 rows was compiled" in caplog.text
    assert len(play(collector)) == 2
