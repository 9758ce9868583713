"""Rendezvous: the barrier is that of steps, not of resets."""

import itertools
import multiprocessing
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest


class Short(gymnasium.Env):
    """Ends with each step, and counts its steps."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, steps):
        self.steps = steps

    def reset(self, **_):
        return np.zeros(1, np.float32), {}

    def step(self, _):
        with self.steps:
            self.steps.value += 1
        return np.zeros(1, np.float32), 0.0, True, False, {}


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_barrier_counts_the_steps_that_environments_make(load, monkeypatch):
    rendezvous = load("rendezvous")
    seconds = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(seconds)))
    monkeypatch.setattr(rendezvous, "time", clock)
    steps = multiprocessing.get_context("fork").Value("i")
    speed = rendezvous.measure_barrier(lambda _: Short(steps), 2, 10.0)
    assert steps.value == 2 * 9
    assert speed == pytest.approx(steps.value / 11)  # the clock was read twelve times
