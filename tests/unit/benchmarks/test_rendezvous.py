"""Rendezvous: the barrier is that of steps, not of resets; Claim 1 is the paper's."""

import itertools
import math
import multiprocessing
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest

from hts_torchrl.tools.runtime_model import expected_round_s


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


class TestClaimedRound:
    @pytest.mark.parametrize("n", [2, 16, 1000])
    def test_of_one_exponential_step_is_the_logarithm_and_eulers_constant(self, load, n):
        claimed = load("rendezvous").claimed_round_s(n, 1, 1.0, shape=1.0)
        assert claimed == pytest.approx(math.log(n) + 0.57721566)

    @pytest.mark.parametrize("steps", [1, 16, 128])
    @pytest.mark.parametrize("n", [16, 128])
    def test_is_near_the_exact_expectation(self, load, n, steps):
        claimed = load("rendezvous").claimed_round_s(n, steps, 0.5, shape=2.0)
        assert claimed == pytest.approx(expected_round_s(n, steps, 0.5, shape=2.0), rel=0.02)
