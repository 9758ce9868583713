"""Environments whose steps take as long as is asked: many cores, simulated on few."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import gymnasium
import numpy as np

from hts_torchrl.errors import ConfigurationError

Distribution = Literal["constant", "exponential", "gamma", "pareto"]


def step_times(
    distribution: Distribution, mean_s: float, *, shape: float = 2.0, seed: int = 0
) -> Iterator[float]:
    """Yield independent step times in seconds, without end.

    Args:
        distribution: ``pareto`` has a heavy tail.
        mean_s: their mean.
        shape: of ``gamma`` (variance ``mean_s**2 / shape``) and ``pareto`` (over 1; 2 and less has
            no variance); the others have none.
        seed: the same seed gives the same times.

    Raises:
        ConfigurationError: for another distribution, or a shape it does not have.
    """
    random = np.random.default_rng(seed)
    least = {"gamma": 0.0, "pareto": 1.0}.get(distribution, float("-inf"))
    if shape <= least:
        raise ConfigurationError(f"shape={shape}; more than {least:g} is needed")
    draws: dict[str, Callable[[], float]] = {
        "constant": lambda: mean_s,
        "exponential": lambda: random.exponential(mean_s),
        "gamma": lambda: random.gamma(shape, mean_s / shape),
        "pareto": lambda: (1 + random.pareto(shape)) * mean_s * (shape - 1) / shape,
    }
    if distribution not in draws:
        known = ", ".join(get_args(Distribution))
        raise ConfigurationError(f"distribution={distribution!r}; one of {known} is needed")
    return _endless(draws[distribution])


def replayed_times(trace_s: Sequence[float], *, seed: int = 0) -> Iterator[float]:
    """Yield measured step times over and over, in seconds, from a place that the seed decides."""
    if len(trace_s) == 0:
        raise ConfigurationError("a trace of step times is empty; one time or more is needed")
    places = iter(range(int(np.random.default_rng(seed).integers(len(trace_s))), 2**62))
    return _endless(lambda: trace_s[next(places) % len(trace_s)])


def _endless(draw: Callable[[], float]) -> Iterator[float]:
    while True:
        yield draw()


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

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
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
