"""Stable-Baselines3's ``SubprocVecEnv`` on timed environments, for ``rendezvous.py``.

That program calls it in the environment of the peer, with what to measure on its standard input.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import SubprocVecEnv
from timed_cartpole import timed_cartpole


def main(num_envs: int, seconds: float, arguments: dict[str, Any]) -> None:
    """Print the steps a second of random actions."""
    makers = [partial(timed_cartpole, index, **arguments) for index in range(num_envs)]
    envs = SubprocVecEnv(makers, start_method="fork")
    envs.reset()
    random, steps, began_s = np.random.default_rng(0), 0, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        envs.step(random.integers(2, size=num_envs))
        steps += num_envs
    print(steps / (time.perf_counter() - began_s))
    envs.close()


if __name__ == "__main__":
    main(**json.load(sys.stdin))
