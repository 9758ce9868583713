"""The serial twin holds what the oracle predicts, cell by cell."""

import numpy as np
import pytest

from tests.determinism.tasks import TASKS
from tests.oracle import Oracle
from tests.policies import echo_weights
from tests.runs import perturbed, play

FLAT = ["coordinates", "cartpole", "pendulum", "squashed", "choices", "lstm", "gru", "counting"]


def weights_of(task):
    return echo_weights if task.network == "echo" else perturbed(task.policy())


def single_env(task):
    """The task's environments one by one, as the oracle takes them."""
    if hasattr(task.create_env_fn, "group"):
        return lambda index: task.create_env_fn.group([index]).envs[0]
    return task.create_env_fn


def predicted(task, collector, delay):
    oracle = Oracle(
        single_env(task), task.policy(), collector.env_spec, weights_of(task),
        task.num_envs, task.steps, seed=collector.seed, delay=delay,
        batch_size=collector.config.batch_size,
    )  # fmt: skip
    return oracle.rounds(task.rounds)


def differences(batches, rounds) -> list[str]:
    """Name every entry that is not what was predicted, or was not predicted."""
    found = []
    for number, (batch, cells) in enumerate(zip(batches, rounds, strict=True)):
        entries = {key: batch[key].numpy() for key in batch.keys(True, True)}
        found += [f"round {number}: {key} is there or not" for key in entries.keys() ^ cells.keys()]
        found += [
            f"round {number}: {key} differs"
            for key in entries.keys() & cells.keys()
            if not np.array_equal(entries[key], cells[key])
        ]
    return found


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("name", FLAT)
def test_the_serial_twin_equals_the_oracle(name, delay):
    task = TASKS[name]
    collector = task.collector(delay=delay, seed=3)
    rounds = predicted(task, collector, delay)
    assert differences(play(collector, weights_of(task)), rounds) == []


@pytest.mark.parametrize("wrong", ["delay", "seed"])
def test_the_oracle_tells_a_run_of_another_delay_or_seed(wrong):
    """A check of the check: a difference is found."""
    task = TASKS["coordinates"]
    collector = task.collector(delay=1, seed=3)
    batches = play(collector, weights_of(task))
    collector.seed += wrong == "seed"
    assert differences(batches, predicted(task, collector, delay=int(wrong != "delay")))
