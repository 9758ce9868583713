"""Environments whose steps take as long as is asked: many cores, simulated on few.

Workers import this file to make one, so it imports no torch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np

SHAPES = {
    "exponential": 1.0, "gamma": 0.25, "constant": 1e6, "slow": 1.0, "phases": 1.0, "pareto": 1.5,
}  # fmt: skip
PHASE_STEPS, SLOW_SHARE, SLOWER = 256, 1 / 16, 10


def step_times(
    distribution: str, mean_s: float, *, shape: float = 2.0, seed: int = 0
) -> Iterator[float]:
    """Yield independent step times in seconds, without end.

    Args:
        distribution: ``constant``, ``exponential``, ``gamma``, or ``pareto`` with a heavy tail.
        mean_s: their mean.
        shape: of ``gamma`` (variance ``mean_s**2 / shape``) and ``pareto`` (over 1; 2 and less has
            no variance); the others have none.
        seed: the same seed gives the same times.
    """
    random = np.random.default_rng(seed)
    draws: dict[str, Callable[[], float]] = {
        "constant": lambda: mean_s,
        "exponential": lambda: random.exponential(mean_s),
        "gamma": lambda: random.gamma(shape, mean_s / shape),
        "pareto": lambda: (1 + random.pareto(shape)) * mean_s * (shape - 1) / shape,
    }
    return iter(draws[distribution], None)


def replayed_times(trace_s: Sequence[float], *, seed: int = 0) -> Iterator[float]:
    """Yield measured step times over and over, in seconds, from a place that the seed decides."""
    first = int(np.random.default_rng(seed).integers(len(trace_s)))
    return itertools.islice(itertools.cycle(trace_s), first, None)


class TimedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Sleeps until a step has taken its time; what it observes and rewards is unchanged.

    The environment's own time counts: a step takes the given time, or its own if that is longer.
    Resets take their own time. A sleeping process leaves the core to others, so that many of these
    run as on as many cores. By how much it wakes up too late (0.15 ms of 5 where this was measured)
    the next step is shorter, so that the times are right in the sum.

    Args:
        env: the environment.
        times_s: seconds of each step, such as :func:`step_times`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], times_s: Iterator[float]) -> None:
        super().__init__(env)
        self._times_s = times_s
        self._late_s = 0.0

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and sleep for the rest of the step's time."""
        ends_s = time.perf_counter() + next(self._times_s) - self._late_s
        result = self.env.step(action)
        left_s = ends_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
            self._late_s = time.perf_counter() - ends_s
        else:  # what the step could not make up for, but not the environment's own time
            self._late_s = min(self._late_s, -left_s)
        return result


class StillEnv(gymnasium.Env[np.ndarray, int]):
    """Shows zeros, and does nothing."""

    def __init__(self, shown: gymnasium.spaces.Box, actions: int) -> None:
        self.observation_space, self.action_space = shown, gymnasium.spaces.Discrete(actions)
        self.zeros = np.zeros(shown.shape, shown.dtype)

    def reset(self, **_: object) -> tuple[np.ndarray, dict[str, Any]]:
        return self.zeros, {}

    def step(self, _: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self.zeros, 0.0, False, False, {}


def times_s(
    index: int, case: str, mean_s: float, seed: int, trace: Sequence[float] = ()
) -> Iterator[float]:
    """Yield the times of an environment's steps; ``mean_s`` is that of those that are not slow.

    ``trace``: the times that ``replayed`` repeats, in units of their mean.
    """
    seed = 1000 * seed + index
    if case == "replayed":
        return (mean_s * time for time in replayed_times(trace, seed=seed))
    distribution = "exponential" if case in ("slow", "phases") else case
    times = step_times(distribution, mean_s, shape=SHAPES[case], seed=seed)
    if case == "slow" and index == 0:
        return (SLOWER * time for time in times)
    return _in_phases(times, np.random.default_rng([seed, 1])) if case == "phases" else times


def _in_phases(times: Iterator[float], random: np.random.Generator) -> Iterator[float]:
    """Make some segments of steps slower, as when another program takes the core."""
    while True:
        factor = SLOWER if random.random() < SLOW_SHARE else 1
        for _ in range(PHASE_STEPS):
            yield factor * next(times)


def timed_cartpole(
    index: int, case: str, mean_s: float, seed: int, trace: Sequence[float] = ()
) -> TimedEnv:
    return TimedEnv(gymnasium.make("CartPole-v1"), times_s(index, case, mean_s, seed, trace))
