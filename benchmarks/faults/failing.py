"""Environments and policies that raise or hang."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import re
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import torch
from processes import GONE_S, NAMED_S, gone
from short_runs import ROUNDS

from hts_torchrl import HTSCollector, WorkerError

ENVS, STEPS, TIMEOUT_S = 4, 10, 2.0


def fail(kind: str) -> None:
    """Raise, or never return; called by whoever is to be named with this line."""
    if kind == "raise":
        raise ArithmeticError("on purpose")
    time.sleep(3600)


class Failing(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole that fails in call ``at`` (from 0) of its ``reset``, ``step`` or ``close``."""

    def __init__(self, where: str, kind: str, at: int) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.where, self.kind, self.left = where, kind, at

    def _fail(self, where: str) -> None:
        if where == self.where:
            self.left -= 1
            if self.left < 0:
                fail(self.kind)

    def reset(self, **kwargs: Any) -> Any:
        self._fail("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._fail("step")
        return super().step(action)

    def close(self) -> None:
        self._fail("close")
        super().close()


@dataclass(frozen=True)
class FailingEnvs:
    """CartPole, of which one fails; not in the process that asks for its spaces."""

    index: int
    where: str
    kind: str
    at: int
    asker: int

    def __call__(self, index: int) -> gymnasium.Env[Any, Any]:
        if index != self.index or os.getpid() == self.asker:
            return gymnasium.make("CartPole-v1")
        if self.where == "constructor":
            fail(self.kind)
        return Failing(self.where, self.kind, self.at)


class Policy(torch.nn.Linear):
    """Both actions are equally likely; it may hang, in pass ``at`` (from 0) of another process."""

    def __init__(self, at: int = -1) -> None:
        super().__init__(4, 2)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)
        self.at, self.passes, self.asker = at, 0, os.getpid()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.asker:
            if self.passes == self.at:
                fail("hang")
            self.passes += 1
        return super().forward(observation)


def make(envs: FailingEnvs, policy: Policy, rounds: int, group: int = 1) -> HTSCollector:
    frames = ENVS * STEPS
    return HTSCollector(
        envs, policy, num_envs=ENVS, envs_per_executor=group, frames_per_batch=frames,
        total_frames=frames * rounds if rounds else -1,
    )  # fmt: skip


def raising(where: str, dice: random.Random) -> bool:
    """Raise in one environment: it must be named, with the traceback; no batch may be lost."""
    env, at = dice.randrange(ENVS), dice.randrange(3 if where == "reset" else STEPS * (ROUNDS - 1))
    at = 0 if where == "close" else at
    envs = FailingEnvs(env, where, "raise", at, os.getpid())
    collector = make(envs, Policy(), ROUNDS, group=dice.choice([1, 2]))
    collector.start()
    pids = [worker.pid for worker in multiprocessing.active_children()]
    said, batches = Said(), 0
    logging.getLogger("hts_torchrl").addHandler(said)
    try:
        for _ in collector:
            batches += 1
    except WorkerError as error:
        said.text += str(error)
    finally:
        collector.shutdown()
        logging.getLogger("hts_torchrl").removeHandler(said)
    whole = batches == ROUNDS if where == "close" else batches < ROUNDS
    call = "create_env_fn" if where == "constructor" else where
    told = f"ArithmeticError: on purpose\nraised by {call}() of environment {env}"
    return whole and said.text.strip().endswith(told) and gone(pids)


class Said(logging.Handler):
    """What is logged meanwhile."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += self.format(record)


def hanging(where: str, dice: random.Random) -> bool:
    """Hang after the first round: whoever does must be named in time, with the stack."""
    env, asker = dice.randrange(ENVS), os.getpid()
    if where == "pass":
        # A step of the first round takes up to ENVS passes.
        at = ENVS * STEPS + dice.randrange(100)
        collector = make(FailingEnvs(-1, "", "", 0, asker), Policy(at), 0)
    else:
        # A game of CartPole lasts at least 8 steps: of the resets two may be in the first round.
        at = dice.randrange(2, 5) if where == "reset" else STEPS + dice.randrange(100)
        envs = FailingEnvs(env, where, "hang", at, asker)
        collector = make(envs, Policy(), 0, group=dice.choice([1, 2]))
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
        stack = re.search(r'failing\.py", line \d+ in fail\n', error.cause) is not None
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
