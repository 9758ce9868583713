"""Environments and policies that raise or hang."""

from __future__ import annotations

import io
import logging
import multiprocessing
import random
import re
import time
from functools import partial
from typing import Any

from processes import GONE_S, NAMED_S, gone
from short_runs import ROUNDS
from tests.fakes import CoordinateEnvs, FailingEnv, HangingEnv
from tests.policies import HangingNet, echo_policy
from torch import nn

from hts_torchrl import HTSCollector, WorkerError

ENVS, STEPS, TIMEOUT_S = 4, 10, 2.0


def make(
    envs: Any, policy: nn.Module, rounds: int = 0, *, group: int = 1, steps: int = STEPS
) -> HTSCollector:
    frames = ENVS * steps
    return HTSCollector(
        envs, policy, num_envs=ENVS, envs_per_executor=group, frames_per_batch=frames,
        total_frames=frames * rounds if rounds else -1,
    )  # fmt: skip


def raising(where: str, dice: random.Random) -> bool:
    """Raise in one environment: it must be named, with the traceback; no batch may be lost."""
    group = dice.choice([1, 2])
    env = dice.randrange(group, ENVS)  # this process makes those of the first executor, too
    envs = FailingEnv(where, env, dice.randrange(STEPS * (ROUNDS - 1)))
    collector = make(envs, echo_policy(), ROUNDS, group=group)
    collector.start()
    pids = [worker.pid for worker in multiprocessing.active_children()]
    said, batches = io.StringIO(), 0
    handler = logging.StreamHandler(said)
    logging.getLogger("hts_torchrl").addHandler(handler)
    try:
        for _ in collector:
            batches += 1
    except WorkerError as error:
        said.write(str(error))
    finally:
        collector.shutdown()
        logging.getLogger("hts_torchrl").removeHandler(handler)
    whole = batches == ROUNDS if where == "close" else batches < ROUNDS
    call = "create_env_fn" if where == "constructor" else where
    told = f"Broken: as asked\nraised by {call}() of environment {env}"
    return whole and said.getvalue().strip().endswith(told) and gone(pids)


def hanging(where: str, dice: random.Random) -> bool:
    """Hang after the first round: whoever does must be named in time, with the stack."""
    env, at = dice.randrange(ENVS), STEPS + dice.randrange(100)
    if where == "pass":  # a step of the first round takes up to ENVS of them
        collector = make(CoordinateEnvs(), echo_policy(HangingNet(ENVS * at)))
    else:  # the second reset comes after two steps or more
        group, steps = dice.choice([1, 2]), 1 if where == "reset" else STEPS
        collector = make(HangingEnv(where, env, at), echo_policy(), group=group, steps=steps)
    batches = iter(collector)
    next(batches)
    pids = [worker.pid for worker in multiprocessing.active_children()]
    object.__setattr__(collector.config, "timeout_s", TIMEOUT_S)
    try:
        while True:
            asked_s = time.monotonic()
            next(batches)
    except WorkerError as error:
        took_s = time.monotonic() - asked_s  # and the worker pool is gone
        in_time = took_s < TIMEOUT_S + NAMED_S + GONE_S
        role = "actor" if where == "pass" else "executor"
        named = error.place.role == role and (role == "actor" or env in error.place.envs)
        hangs = r'policies\.py", line \d+ in forward\n' if where == "pass" else r"in _hang\n"
        stack = re.search(hangs, error.cause) is not None
        return in_time and named and stack
    finally:
        collector.shutdown()
        assert gone(pids)


ROWS = {
    **{
        f"exception in {where}: environment and traceback": (4, partial(raising, where))
        for where in ("constructor", "reset", "step", "close")
    },
    **{
        f"hang in {where}: named in time, with the stack": (5, partial(hanging, where))
        for where in ("reset", "step", "pass")
    },
}
