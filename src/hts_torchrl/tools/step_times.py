"""The times of an environment's steps, measured while the machine's other cores are busy."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Semaphore

import numpy as np

from hts_torchrl.envs.group import EnvFactory, EnvGroup
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.envs.registered import pickle_envs, unpickle_envs
from hts_torchrl.specs import ActionSpec, Array

_MOST_START_S = 60.0


def measured_step_times(group: EnvGroup, seconds: float) -> Iterator[float]:
    """Yield the seconds of each step, by random actions, after a tenth of the time.

    Args:
        group: of one environment.
        seconds: how long it is stepped.
    """
    random = np.random.default_rng(0)
    group.reset([0])
    began_s = time.perf_counter()
    while True:
        action = _random_action(group.spec.action, random)
        before_s = time.perf_counter()
        group.step(action)
        now_s = time.perf_counter()
        if now_s - began_s > seconds:
            return
        if now_s - began_s > seconds / 10:
            yield now_s - before_s


def _random_action(spec: ActionSpec, random: np.random.Generator) -> Array:
    """Return one environment's action ``[1, ...]``."""
    action: Array
    if spec.kind == "continuous":
        action = random.standard_normal((1, *spec.array.shape))
    elif spec.kind == "one_hot":
        action = np.eye(spec.sizes[0])[random.integers(spec.sizes[0], size=1)]
    elif spec.kind == "mixed":
        numbers = random.standard_normal(spec.num_draws - len(spec.sizes))
        action = np.concatenate([random.integers(0, spec.sizes), numbers])[None]
    else:
        action = random.integers(0, spec.sizes).reshape(1, *spec.array.shape)
    return action.astype(spec.array.dtype)


@contextlib.contextmanager
def busy_cores(env: EnvFactory, count: int) -> Iterator[None]:
    """Let other processes step environments meanwhile: a busy machine's cores are slower.

    Args:
        env: whose environments are stepped.
        count: of processes.
    """
    context = multiprocessing.get_context("spawn")
    make, stepping = pickle_envs(env), context.Semaphore(0)
    others = [
        context.Process(target=_step_on, args=(make, stepping), daemon=True) for _ in range(count)
    ]
    for other in others:
        other.start()
    try:
        for _ in others:  # they import this module first, which takes seconds
            stepping.acquire(timeout=_MOST_START_S)
        yield
    finally:
        for other in others:
            other.kill()
            other.join()
            other.close()


def _step_on(make: bytes, stepping: Semaphore) -> None:
    group = make_group(unpickle_envs(make), [0])
    stepping.release()
    for _ in measured_step_times(group, float("inf")):
        pass
