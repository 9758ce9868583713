"""Workers and parents that are killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing import forkserver

from processes import NAMED_S, gone
from short_runs import ROUNDS, make, undisturbed, weights
from tests.runs import digest

from hts_torchrl import HTSCollector, WorkerError


def killed_worker(role: str, recover: str, dice: random.Random) -> bool:
    """Kill a worker while it starts, or at a random moment of a round."""
    while True:
        collector = make(recover=recover)
        killed_s: list[float] = []
        try:
            outcome = _run_with_a_kill(collector, role, dice, killed_s)
        finally:
            collector.shutdown()
        if killed_s:  # else the run was over before
            return outcome == recover


def _run_with_a_kill(
    collector: HTSCollector, role: str, dice: random.Random, killed_s: list[float]
) -> str:
    """Return ``fail`` or ``replay`` if that is what happened, and as it must."""
    collector.start()
    workers = multiprocessing.active_children()
    pids = [worker.pid for worker in workers]
    if role == "fork server":
        victim = forkserver._forkserver._forkserver_pid
    else:
        victim = dice.choice([worker for worker in workers if role in worker.name]).pid
    at, digests = dice.randrange(-1, ROUNDS - 2), []

    def kill() -> None:
        if not collector._closed:
            killed_s.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)

    if at < 0:
        threading.Timer(dice.uniform(0, 2), kill).start()
    try:
        for batch in collector:
            digests.append(digest([batch]))
            collector.update_policy_weights_(weights(len(digests)))
            if len(digests) - 1 == at:
                threading.Timer(dice.uniform(0, 0.02), kill).start()
    except WorkerError as error:
        named = error.place.role == role and "SIGKILL" in error.cause
        in_time = time.monotonic() - killed_s[0] < NAMED_S
        collector.shutdown()
        return "fail" if named and in_time and gone(pids) else "wrong"
    return "replay" if digests == undisturbed() and gone(pids) else "wrong"


def killed_parent(dice: random.Random) -> bool:
    """Kill the process that has the collector, at a random moment."""
    modules = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.Popen(
        [sys.executable, __file__], env=os.environ | modules, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    pids = [int(pid) for pid in child.stdout.readline().split()]
    time.sleep(dice.uniform(0, 2))
    child.kill()
    child.wait()
    child.stdout.close()
    return len(pids) == 3 and gone(pids)


def collect_until_killed() -> None:
    collector = make(total_frames=-1)
    collector.start()
    print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
    for _ in collector:
        pass


ROWS = {
    "SIGKILL of an executor: named, nothing left": (25, partial(killed_worker, "executor", "fail")),
    "SIGKILL of an actor: named, nothing left": (25, partial(killed_worker, "actor", "fail")),
    "the same, recover: the same bits, executor": (
        25,
        partial(killed_worker, "executor", "replay"),
    ),
    "the same, recover: the same bits, actor": (25, partial(killed_worker, "actor", "replay")),
    "SIGKILL of the fork server, recover: the same bits": (
        10,
        partial(killed_worker, "fork server", "replay"),
    ),
    "SIGKILL of the parent: no process left": (40, killed_parent),
}

if __name__ == "__main__":
    collect_until_killed()
