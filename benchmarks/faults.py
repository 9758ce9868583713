"""Faults, each many times over: what breaks, and what must come of it.

Run: python benchmarks/faults.py [--quick]

Every row is a fault at random moments, with the number of trials and of those that ended as they
must. The exit status is 1 if one did not. Processes are real, and so are the signals.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import logging
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from hts_torchrl import (
    AtariEnvs,
    ConfigurationError,
    DurableCheckpointIO,
    FootballEnvs,
    GymEnvs,
    HTSCollector,
    WorkerError,
    make_actor_critic,
)

ROUNDS = 12
TASKS: dict[str, tuple[Any, str]] = {
    "CartPole": (GymEnvs("CartPole-v1"), "mlp"),
    "Pong": (AtariEnvs("pong"), "nips"),
    "football": (FootballEnvs("3_vs_1_with_keeper"), "nips"),
}
NAMED_S = GONE_S = 5.0


@cache
def policy(task: str) -> torch.nn.Module:
    create, network = TASKS[task]
    torch.manual_seed(1)
    return make_actor_critic(network, create.group([0]).spec)


def make(task: str, **settings: Any) -> HTSCollector:
    defaults = {"num_envs": 4, "envs_per_executor": 2, "frames_per_batch": 40, "seed": 3}
    settings = {**defaults, "total_frames": 40 * ROUNDS, **settings}
    return HTSCollector(TASKS[task][0], copy.deepcopy(policy(task)), **settings)


def weights(task: str, update: int) -> dict[str, torch.Tensor]:
    """Stand for an update: noise that the update's number decides."""
    generator = torch.Generator().manual_seed(update)
    return {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in policy(task).state_dict().items()
    }


def learn(task: str, collector: HTSCollector, updates: int = 0, stop: int = ROUNDS) -> list[str]:
    """Go through the rounds and publish weights; returns a digest of each round."""
    digests = []
    for batch in collector:
        digests.append(digest(batch))
        collector.update_policy_weights_(weights(task, updates + len(digests)))
        if updates + len(digests) == stop:
            break
    return digests


def digest(batch: TensorDictBase) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(batch.flatten_keys(".").items()):
        total.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


@cache
def undisturbed(task: str) -> list[str]:
    return learn(task, make(task, num_actors=0))


def gone(pids: list[int]) -> bool:
    """Return whether all processes end within the time they are given."""
    deadline = time.monotonic() + GONE_S
    while time.monotonic() < deadline:
        if not any(map(alive, pids)):
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    """Return whether a process runs, and has not ended and waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def killed_worker(role: str, recover: str, dice: random.Random) -> bool:
    """Kill a worker while it starts, or at a random moment of a round."""
    while True:
        collector = make("CartPole", recover=recover)
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
            digests.append(digest(batch))
            collector.update_policy_weights_(weights("CartPole", len(digests)))
            if len(digests) - 1 == at:
                threading.Timer(dice.uniform(0, 0.02), kill).start()
    except WorkerError as error:
        named = error.place.role == role and "SIGKILL" in error.cause
        in_time = time.monotonic() - killed_s[0] < NAMED_S
        collector.shutdown()
        return "fail" if named and in_time and gone(pids) else "wrong"
    return "replay" if digests == undisturbed("CartPole") and gone(pids) else "wrong"


def killed_parent(dice: random.Random) -> bool:
    """Kill the process that has the collector, at a random moment."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--child", "collect"], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    pids = [int(pid) for pid in child.stdout.readline().split()]
    time.sleep(dice.uniform(0, 2))
    child.kill()
    child.wait()
    child.stdout.close()
    return len(pids) == 3 and gone(pids)


def resumed(task: str, dice: random.Random) -> bool:
    """Stop at a random rendezvous, and go on with another crew from what was saved."""
    stop, delay = dice.randrange(1, ROUNDS), 1
    crews = [{"num_actors": 0}, {}, {"num_actors": 2, "envs_per_executor": 1}]
    first = make(task, delay=delay, **dice.choice(crews))
    learn(task, first, stop=stop)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(dict(first.state_dict()), Path(folder, "state"))
        first.shutdown()
        state = torch.load(Path(folder, "state"), weights_only=True)
    second = make(task, delay=delay, **dice.choice(crews))
    second.policy.load_state_dict(weights(task, stop))
    second.load_state_dict(state)
    rest = learn(task, second, updates=stop)
    second.shutdown()
    return rest == undisturbed(task)[stop:]


def killed_while_saving(dice: random.Random) -> bool:
    """Kill a process that writes one checkpoint after the other; a whole one must be there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "last.ckpt")
        child = subprocess.Popen(
            [sys.executable, __file__, "--child", str(path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        child.stdout.readline()  # the first one is there
        time.sleep(dice.uniform(0, 0.3))
        child.kill()
        written = [0, *map(int, child.stdout.read().split())][-1]
        child.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved = DurableCheckpointIO().load_checkpoint(path)
        return saved["number"] >= written and bool((saved["data"] == saved["number"]).all())


def damaged(kind: str, dice: random.Random) -> bool:
    """Damage the newest checkpoint; the one before must be read, and no code be run."""
    with tempfile.TemporaryDirectory() as folder:
        path, trap = Path(folder, "last.ckpt"), Path(folder, "trap")
        for number in range(2):
            DurableCheckpointIO().save_checkpoint(
                {"number": number, "data": torch.zeros(5000)}, path
            )
        content = bytearray(path.read_bytes())
        if kind == "bit flip":
            content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        elif kind == "truncation":
            content = content[: dice.randrange(len(content))]
        else:
            content = bytearray(pickle.dumps(Trap(str(trap))))
        path.write_bytes(content)
        if kind == "code, digest removed":
            path.with_name("last.ckpt.sha256").unlink()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                number = DurableCheckpointIO().load_checkpoint(path)["number"]
        except (ConfigurationError, pickle.UnpicklingError):
            number = 0 if kind == "code, digest removed" else -1
        return number == 0 and not trap.exists()


class Trap:
    """A pickle that makes a file when it is loaded as Python would."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def child(what: str) -> None:
    if what == "collect":
        collector = make("CartPole", total_frames=-1)
        collector.start()
        print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
        for _ in collector:
            pass
    for number in range(10**6):
        data = torch.full((500_000,), number)
        DurableCheckpointIO().save_checkpoint({"number": number, "data": data}, what)
        print(number, flush=True)


KINDS = ("bit flip", "truncation", "code", "code, digest removed")
ROWS: dict[str, tuple[int, Callable[[random.Random], bool]]] = {
    "SIGKILL of an executor: named, nothing left": (25, partial(killed_worker, "executor", "fail")),
    "SIGKILL of an actor: named, nothing left": (25, partial(killed_worker, "actor", "fail")),
    "the same, recover: the same bits, executor": (
        25,
        partial(killed_worker, "executor", "replay"),
    ),
    "the same, recover: the same bits, actor": (25, partial(killed_worker, "actor", "replay")),
    "SIGKILL of the parent: no process left": (40, killed_parent),
    **{f"stop and resume, {task}: the same bits": (20, partial(resumed, task)) for task in TASKS},
    "SIGKILL while saving: a whole file": (100, killed_while_saving),
    **{f"checkpoint damaged by {kind}: refused": (20, partial(damaged, kind)) for kind in KINDS},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the trials")
    parser.add_argument("--only", default="", help="rows that have this in their names")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.child:
        child(arguments.child)
    print("| fault and outcome | trials | passed | seconds |\n|---|---|---|---|")
    failures = 0
    for name, (trials, trial) in ROWS.items():
        if arguments.only not in name:
            continue
        trials = max(1, trials // 10) if arguments.quick else trials
        began_s = time.monotonic()
        passed = sum(trial(random.Random(number)) for number in range(trials))
        failures += trials - passed
        print(f"| {name} | {trials} | {passed} | {time.monotonic() - began_s:.0f} |", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
