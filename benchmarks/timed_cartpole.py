"""CartPole whose steps take random times; apart, so that workers who make one import no torch."""

from __future__ import annotations

import gymnasium

from hts_torchrl.envs.timed import TimedEnv, step_times

SHAPES = {"exponential": 1.0, "gamma": 0.25, "constant": 1e6, "slow": 1.0, "pareto": 1.5}


def timed_cartpole(index: int, case: str, mean_s: float, seed: int) -> TimedEnv:
    distribution = "exponential" if case == "slow" else case
    mean_s *= 10 if case == "slow" and index == 0 else 1
    times_s = step_times(distribution, mean_s, shape=SHAPES[case], seed=1000 * seed + index)
    return TimedEnv(gymnasium.make("CartPole-v1"), times_s)
