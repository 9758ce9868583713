"""The times of an environment's steps, measured while the machine's other cores are busy."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np

from hts_torchrl.envs.group import EnvFactory, EnvGroup
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.envs.registered import pickle_envs, unpickle_envs
from hts_torchrl.specs import ActionSpec, Array
from hts_torchrl.workers.process import end_group
from hts_torchrl.workers.starting import start_process

_MOST_START_S = 60.0


def measured_step_times(group: EnvGroup, seconds: float) -> Iterator[float]:
    """Yield the seconds of each step of one environment, after a tenth of the time.

    Actions are drawn at random. The group has one environment, or the agents of one game.
    """
    random = np.random.default_rng(0)
    rows, spec, mask = range(group.num_envs), group.spec.action, group.spec.action_mask
    observation = group.reset([0 for _ in rows])
    began_s = time.perf_counter()
    while True:
        allowed = [None if mask is None else observation[mask][row] for row in rows]
        action = np.concatenate([_random_action(spec, random, each) for each in allowed])
        before_s = time.perf_counter()
        observation = group.step(action).next_observation
        now_s = time.perf_counter()
        if now_s - began_s > seconds:
            return
        if now_s - began_s > seconds / 10:
            yield (now_s - before_s) / len(rows)


def _random_action(
    spec: ActionSpec, random: np.random.Generator, allowed: Array | None = None
) -> Array:
    """Return one environment's action ``[1, ...]``, of the choices that are allowed."""
    chances = random.random(sum(spec.sizes))
    if allowed is not None and allowed.shape == chances.shape:
        chances[allowed == 0] = -1.0
    parts = np.split(chances, np.cumsum(spec.sizes)[:-1]) if spec.sizes else []
    choices = np.array([part.argmax() for part in parts])
    numbers = random.standard_normal(spec.num_draws - len(spec.sizes))
    if spec.low is not None and spec.high is not None:  # which an EnvBase may check by itself
        numbers = numbers.clip(spec.low.ravel(), spec.high.ravel())
    action: Array
    if spec.kind == "continuous":
        action = numbers.reshape(1, *spec.array.shape)
    elif spec.kind == "one_hot":
        action = np.eye(spec.sizes[0])[choices]
    elif spec.kind == "mixed":
        action = np.concatenate([choices, numbers])[None]
    else:
        action = choices.reshape(1, *spec.array.shape)
    return action.astype(spec.array.dtype)


@contextlib.contextmanager
def busy_cores(env: EnvFactory, count: int) -> Iterator[None]:
    """Let so many other processes step environments meanwhile: a busy machine is slower."""
    context = multiprocessing.get_context("spawn")
    make, (started, tell_started) = pickle_envs(env), context.Pipe(duplex=False)
    others: list[BaseProcess] = []
    try:
        for _ in range(count):
            process = context.Process(target=_step_on, args=(make, tell_started), daemon=True)
            start_process(process)
            others.append(process)
        for _ in others:  # they import this module first, which takes seconds
            if started.poll(_MOST_START_S):
                started.recv_bytes()
        yield
    finally:
        started.close()
        tell_started.close()
        for other in others:
            end_group(other.pid or 0)  # what its environment has started, too
            other.kill()
            other.join()
            other.close()


def _step_on(make: bytes, started: Connection) -> None:
    os.setpgid(0, 0)
    multiprocessing.current_process().daemon = False  # else environments may start no processes
    threading.Thread(target=_end_with_parent, daemon=True).start()
    group = make_group(unpickle_envs(make), [0])
    started.send_bytes(b"\0")
    for _ in measured_step_times(group, float("inf")):
        pass


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    end_group(os.getpid())
