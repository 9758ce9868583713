"""What the guards cost: training with all that are on by default, beside training without them.

Run: python benchmarks/guards.py [--quick]

The guards: observations are held against what was declared, gradients must be finite, the journal,
workers watch the lifeline and the collector watches them, and checkpoints are synced, with their
digests. There is no option to be without them, so this program patches them away, in the workers
too. A checkpoint is written every 10 seconds of the clock, half of which a program runs, by our
``DurableCheckpointIO`` and by Lightning's own.

A2C, 16 environments in 2 executors, 1 actor. Both rows of a task take turns (``contest.py``), and
ratios are taken within a turn: the table has their median, with its 95 % interval. As two processes
of one program may differ for as long as they live, both are started anew several times, each first
every other time.
"""

from __future__ import annotations

import argparse
import json
import select
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
from contest import take_turns
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from measurement import child_of, confidence, machine
from stopwatch import Stopwatch, keep_freed_memory
from throughput import Watch

import hts_torchrl.learner.base
import hts_torchrl.workers.recruiter
from hts_torchrl import (
    A2C,
    AtariEnvs,
    DurableCheckpointIO,
    EnvFactory,
    GymEnvs,
    HTSCollector,
    HTSDataModule,
)
from hts_torchrl.buffers import doorbell, ready_queue
from hts_torchrl.envs.group import EnvGroup
from hts_torchrl.envs.observed import DeclaredSpace
from hts_torchrl.workers.actor import make_actor
from hts_torchrl.workers.crew import ProcessCrew
from hts_torchrl.workers.executor import Executor

TASKS: dict[str, tuple[EnvFactory, str]] = {
    "CartPole": (GymEnvs("CartPole-v1"), "mlp"),
    "Breakout": (AtariEnvs("breakout"), "nature"),
}
NUM_ENVS, EXECUTORS = 16, 2


@dataclass(frozen=True)
class Run:
    task: str
    steps: int
    guarded: bool = True


def sleep_unwatched(fd: int, _: object) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()


def entries_unchecked(_: DeclaredSpace, observation: Any) -> dict[str, Any]:
    return observation if isinstance(observation, dict) else {"observation": observation}


def unguard_worker() -> None:
    doorbell.sleep_until_readable = ready_queue.sleep_until_readable = sleep_unwatched
    DeclaredSpace.entries = entries_unchecked
    Executor._require_declared = lambda *_: None


@dataclass(frozen=True)
class Unguarded(EnvFactory):
    """Takes the guards out of the process in which it makes environments."""

    envs: EnvFactory

    def group(self, indices: Sequence[int], *, render: bool = False) -> EnvGroup:
        unguard_worker()
        return self.envs.group(indices, render=render)


def make_unguarded_actor(*arguments: Any) -> Any:
    unguard_worker()
    return make_actor(*arguments)


def wait_unwatched(crew: ProcessCrew, round_index: int) -> None:
    finished, missing = crew._board.finished, set(range(EXECUTORS))
    while missing:
        sleep_unwatched(finished.fileno(), None)
        missing -= set(finished.take_waiting(EXECUTORS).tolist())
    crew._waited = round_index


def note_nothing(collector: HTSCollector, round_index: int) -> None:
    journal = collector._journals[round_index]
    collector._journals = {round_index: journal, round_index + 1: journal}


def unguard_learner() -> None:
    hts_torchrl.learner.base.require_finite_gradients = lambda *_, **__: None
    hts_torchrl.workers.recruiter.make_actor = make_unguarded_actor
    ProcessCrew.wait_round = wait_unwatched
    HTSCollector._note = note_nothing


def train(run: Run) -> None:
    """Train until this process is ended."""
    keep_freed_memory()
    envs, network = TASKS[run.task]
    if not run.guarded:
        unguard_learner()
        envs = Unguarded(envs)
    frames = NUM_ENVS * run.steps
    data = HTSDataModule(
        envs, frames_per_batch=frames, total_frames=frames * 10**9, num_envs=NUM_ENVS,
        envs_per_executor=NUM_ENVS // EXECUTORS,
    )  # fmt: skip
    checkpoint = ModelCheckpoint(
        tempfile.gettempdir(), "last", train_time_interval=timedelta(seconds=10),
        enable_version_counter=False,
    )  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, limit_val_batches=0, gradient_clip_val=0.5,
        plugins=[DurableCheckpointIO() if run.guarded else TorchCheckpointIO()], logger=False,
        callbacks=[Watch(Stopwatch(frames, 0)), checkpoint], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(A2C(network=network), data)


def compare(guarded: Run, starts: int, turns: int, seconds: float) -> None:
    pair = [guarded, replace(guarded, guarded=False)]
    frames = NUM_ENVS * guarded.steps
    figures: dict[Run, list[tuple[float, float]]] = {run: [] for run in pair}
    for start in range(starts):
        commands = {run: child_of(__file__, asdict(run)) for run in pair[:: (-1) ** start]}
        for run, taken in take_turns(commands, turns, seconds).items():
            for turn in taken:
                steps = turn.rounds * frames
                figures[run].append((steps / turn.seconds, 1e6 * turn.cpu_s / steps))
    cells = []
    for one, other in zip(*(np.array(figures[run]).T for run in pair), strict=True):
        cells += [f"{np.median(one):.0f}", f"{np.median(other):.0f}", confidence(one / other)]
    print(f"| {guarded.task}, {guarded.steps} steps | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps-per-round", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--turns", type=int, default=25, help="of each start")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn")
    parser.add_argument("--quick", action="store_true", help="2 starts of 2 turns: does it run?")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        train(Run(**args.child))
        return
    if args.quick:
        args.starts = args.turns = 2
    print(machine())
    print("| task | steps/s with guards | without | ratio | us of CPU a step | without | ratio |")
    print("|---|" + "---|" * 6)
    for task in args.tasks:
        for steps in args.steps_per_round:
            compare(Run(task, steps), args.starts, args.turns, args.seconds)


if __name__ == "__main__":
    main()
