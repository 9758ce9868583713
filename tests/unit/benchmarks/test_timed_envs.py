"""Steps take the time they are given, and nothing else changes."""

import itertools

import gymnasium
import numpy as np
import pytest
from benchmarks import timed_envs
from benchmarks.timed_envs import TimedEnv, replayed_times, step_times


def first(times, count=200_000):
    return np.fromiter(itertools.islice(times, count), float)


class TestStepTimes:
    @pytest.mark.parametrize(
        ("distribution", "variance"),
        [("constant", 0.0), ("exponential", 0.04), ("gamma", 0.01), ("pareto", 0.04 / 8)],
    )
    def test_have_the_mean_and_the_variance(self, distribution, variance):
        times = first(step_times(distribution, 0.2, shape=4.0))
        assert times.min() > 0
        assert times.mean() == pytest.approx(0.2, rel=0.02)
        assert times.var() == pytest.approx(variance, rel=0.2, abs=1e-12)

    def test_the_same_seed_gives_the_same_times(self):
        one, same, other = (first(step_times("gamma", 1.0, seed=s), 10) for s in (1, 1, 2))
        assert (one == same).all()
        assert (one != other).all()

    def test_a_trace_is_replayed_in_order_from_a_place_of_the_seed(self):
        one, other = (first(replayed_times([1, 2, 3, 4, 5], seed=s), 10) for s in (0, 1))
        assert set(np.diff(one)) == {1, -4}
        assert one[0] != other[0]


def test_a_distribution_without_a_shape_takes_any():
    assert next(step_times("constant", 0.5, shape=0.0)) == 0.5


class Clock:
    """Stands still, but for sleeps and what the environment takes."""

    def __init__(self, late=0.0):
        self.now, self.late = 0.0, late

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds + self.late


class Slow(gymnasium.Wrapper):
    """Takes 0.3 s a step."""

    def __init__(self, env, clock):
        super().__init__(env)
        self.clock = clock

    def step(self, action):
        self.clock.now += 0.3
        return self.env.step(action)


def test_a_step_takes_its_time_or_its_own_if_that_is_longer(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timed_envs, "time", clock)
    env = TimedEnv(Slow(gymnasium.make("CartPole-v1"), clock), iter([1.0, 0.1, 0.5]))
    plain = gymnasium.make("CartPole-v1")
    assert (env.reset(seed=3)[0] == plain.reset(seed=3)[0]).all()
    for ends in (1.0, 1.3, 1.8):
        assert str(env.step(1)) == str(plain.step(1))
        assert clock.now == pytest.approx(ends)


def test_what_a_sleep_takes_too_long_is_made_up_for(monkeypatch):
    clock = Clock(late=0.25)
    monkeypatch.setattr(timed_envs, "time", clock)
    env = TimedEnv(Slow(gymnasium.make("CartPole-v1"), clock), iter([1.0, 1.0, 0.4, 0.1, 1.0, 2.0]))
    env.reset(seed=3)
    # Due at 1, 2, 2.4, 2.7, 3.7 and 5.7: nothing makes the fourth shorter than its own 0.3 s.
    for ends in (1.25, 2.25, 2.55, 2.85, 3.95, 5.95):
        env.step(0)
        assert clock.now == pytest.approx(ends)
