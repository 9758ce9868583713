"""CartPole whose steps take random times; apart, so that workers who make one import no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import gymnasium
import numpy as np

from hts_torchrl.envs.timed import TimedEnv, replayed_times, step_times

SHAPES = {
    "exponential": 1.0, "gamma": 0.25, "constant": 1e6, "slow": 1.0, "phases": 1.0, "pareto": 1.5,
}  # fmt: skip
PHASE_STEPS, SLOW_SHARE, SLOWER = 256, 1 / 16, 10


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
    """Make some stretches of steps slower, as when another program takes the core."""
    while True:
        factor = SLOWER if random.random() < SLOW_SHARE else 1
        for _ in range(PHASE_STEPS):
            yield factor * next(times)


def timed_cartpole(
    index: int, case: str, mean_s: float, seed: int, trace: Sequence[float] = ()
) -> TimedEnv:
    return TimedEnv(gymnasium.make("CartPole-v1"), times_s(index, case, mean_s, seed, trace))
