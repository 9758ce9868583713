"""What the guards cost: training with all that are on by default, beside training without them.

Run: python benchmarks/guards.py [--quick]

The guards: observations are held against what was declared, gradients must be finite, the journal,
workers watch the lifeline and the collector watches them, and checkpoints are synced, with their
digests. There is no option to be without them, so this program patches them away, in the workers
too. A checkpoint is written every half of a measurement, which is far oftener than the command line
does it (after evaluations), by our ``DurableCheckpointIO`` and by Lightning's own.

A2C, 16 environments in 2 executors, 1 actor. Each measurement is a fresh process; both rows of a
task take turns, each first every other time, and the ratio is taken within a turn.
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
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from measurement import crew_cpu_s, in_fresh_process, machine, spread
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
    seconds: float
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


class CPUWatch(Watch):
    """Counts the CPU of all processes, too, which other programs on the machine disturb less."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        if self.watch.rounds == 0:
            self.used_s = crew_cpu_s()

    def on_train_end(self, *_: object) -> None:
        steps = self.watch.rounds * self.watch.frames
        self.cpu_us = 1e6 * (crew_cpu_s() - self.used_s) / steps


def measure(run: Run) -> tuple[float, float]:
    """Return steps a second, and microseconds of CPU a step."""
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
    watch = CPUWatch(Stopwatch(frames, run.seconds))
    with tempfile.TemporaryDirectory() as folder:
        often = timedelta(seconds=run.seconds / 2)
        checkpoint = ModelCheckpoint(
            folder, "last", train_time_interval=often, enable_version_counter=False
        )
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=1, limit_val_batches=0, gradient_clip_val=0.5,
            plugins=[DurableCheckpointIO() if run.guarded else TorchCheckpointIO()], logger=False,
            callbacks=[watch, checkpoint], enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(A2C(network=network), data)
    return watch.watch.steps_per_s, watch.cpu_us


def compare(guarded: Run, repeats: int) -> None:
    pair = (guarded, replace(guarded, guarded=False))
    turns: dict[Run, list[tuple[float, float]]] = {run: [] for run in pair}
    for turn in range(repeats):
        for run in pair if turn % 2 else pair[::-1]:
            # Patches stay: each in a process of its own.
            turns[run].append(in_fresh_process(__file__, asdict(run)))
    with_guards, without = (np.array(turns[run]).T for run in pair)
    cells = []
    for one, other in zip(with_guards, without, strict=True):
        cells += [spread(one), spread(other), spread(one / other, ".3f")]
    print(f"| {guarded.task}, {guarded.steps} steps | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps-per-round", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--quick", action="store_true", help="2 repeats of 2 s: does it run?")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(Run(**args.child))))
        return
    if args.quick:
        args.repeats, args.seconds = 2, 2.0
    print(machine())
    print("| task | steps/s with guards | without | ratio | us of CPU a step | without | ratio |")
    print("|---|" + "---|" * 6)
    for task in args.tasks:
        for steps in args.steps_per_round:
            compare(Run(task, steps, args.seconds), args.repeats)


if __name__ == "__main__":
    main()
