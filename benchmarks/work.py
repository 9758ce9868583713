"""Where the CPU time of a training step goes, and what the machine's cores could do at most.

Run: python benchmarks/work.py [--quick]

Two tables, A2C on one Atari game with the Nature network, every row a fresh process:

- *at work*: CPU time of executors, actors and learner, by the operating system's account, while
  they train together; the steps a second that this work would allow if no core ever idled; and the
  share of that which is reached;
- *alone*: the parts by themselves on an otherwise idle core, with and without
  ``keep_freed_memory``: an environment's step, an actor's passes of 8 and of 16 rows, the update's
  forward pass, and its forward and backward pass.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product

import numpy as np
import torch
from lightning.pytorch import Trainer
from measurement import CORES, cpu_s, in_fresh_process, machine, spread
from stopwatch import Stopwatch, keep_freed_memory
from throughput import Run, Watch, train

from hts_torchrl import AtariEnvs
from hts_torchrl.inference import PolicyInference
from hts_torchrl.models import make_actor_critic
from hts_torchrl.policy import evaluate

ROLES = ("executor", "actor", "learner")


class Account(Watch):
    """Reads every role's CPU time when the measurement begins and when it ends."""

    def read(self) -> dict[str, float]:
        totals = dict.fromkeys(ROLES, 0.0) | {"learner": cpu_s(os.getpid())}
        for process in multiprocessing.active_children():
            totals[process.name.split("-")[1]] += cpu_s(process.pid)
        return totals

    def on_train_batch_end(self, trainer: Trainer, *arguments: object) -> None:
        super().on_train_batch_end(trainer, *arguments)
        if self.watch.rounds == 0:
            self.before = self.read()
        elif trainer.should_stop:
            steps = self.watch.rounds * self.watch.frames
            used = self.read()
            self.microseconds = {r: 1e6 * (used[r] - self.before[r]) / steps for r in ROLES}


def at_work(run: Run) -> dict[str, float]:
    account = Account(Stopwatch(run.frames, run.seconds))
    train(run, account)
    bound = 1e6 * CORES / sum(account.microseconds.values())
    figures = {"steps_per_s": account.watch.steps_per_s, **account.microseconds, "bound": bound}
    return figures | {"percent": 100 * account.watch.steps_per_s / bound}


def per_second(work: Callable[[], object], seconds: float) -> float:
    """Return how often ``work`` can be done in a second of CPU, after a tenth of the time."""
    for span_s in (0.1 * seconds, seconds):
        count, began_s = 0, time.process_time()
        while time.process_time() - began_s < span_s:
            work()
            count += 1
    return count / (time.process_time() - began_s)


def alone(run: Run) -> dict[str, float]:
    """Return microseconds of a step, of a row of a pass, of a sample of an update."""
    torch.set_num_threads(1)
    group = AtariEnvs(run.game).group(range(4))
    random = np.random.default_rng(0)
    observation = group.reset([0, 1, 2, 3])["observation"]
    policy = make_actor_critic("nature", group.spec)
    precision = "bf16-mixed" if run.bf16 else "32-true"
    pixels = torch.from_numpy(observation).repeat(run.frames // 4, 1, 1, 1)

    def actors_pass(rows: int) -> Callable[[], object]:
        actor = make_actor_critic("nature", group.spec)
        inference = PolicyInference(actor, group.spec, batch_size=rows, precision=precision)
        observations = {"observation": np.tile(observation, (rows // 4, 1, 1, 1))}
        return lambda: inference.answer(observations, random.random((rows, 1)))

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=run.bf16):
            result = evaluate(policy, {"observation": pixels}, run.frames)
        return result.distribution.entropy().mean() + result.value.float().square().mean()

    works = {
        "environment step": (4, lambda: group.step(random.integers(2, size=4))),
        "actor's row of 8": (8, actors_pass(8)),
        "of 16": (16, actors_pass(16)),
        "update's sample, forward": (run.frames, forward),
        "forward and backward": (run.frames, lambda: forward().backward()),
    }
    figures = {
        name: 1e6 / (count * per_second(work, run.seconds)) for name, (count, work) in works.items()
    }
    group.close()
    return figures


KINDS = {"at work": at_work, "alone": alone}


def table(head: str, rows: dict[str, tuple[str, Run, bool]], repeats: int) -> None:
    """Print the rows as they are measured: medians, with the smallest and the largest."""
    print(f"\n{head}\n|" + "---|" * (head.count("|") - 1))
    for name, (kind, run, keep) in rows.items():
        child = {"kind": kind, "run": asdict(run), "keep": keep}
        # What an allocator was told cannot be taken back.
        measured = [in_fresh_process(__file__, child) for _ in range(repeats)]
        columns = ([figures[key] for figures in measured] for key in measured[0])
        print(f"| {name} | " + " | ".join(map(spread, columns)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of a training step")
    parser.add_argument("--game", default="breakout")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--steps-per-round", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 4, 2], help="executors")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--quick", action="store_true", help="one repeat of 1 s: does it run?")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        if args.child["keep"]:
            keep_freed_memory()
        print(json.dumps(KINDS[args.child["kind"]](Run(**args.child["run"]))))
        return
    if args.quick:
        args.repeats, args.seconds = 1, 1.0
    print(machine())
    precisions = {"float32": False, "bfloat16": True}
    task = Run("trainer", args.game, args.num_envs, 0, args.seconds)
    rows = {
        f"{precision}, {steps} steps, {workers} executors": (
            "at work", replace(task, steps=steps, workers=workers, bf16=bf16), True,
        )
        for steps, workers, (precision, bf16) in product(
            args.steps_per_round, args.workers, precisions.items()
        )
    }  # fmt: skip
    head = "| at work, us a step | steps/s | executors | actors | learner | bound | % of it |"
    table(head, rows, args.repeats)
    rows = {
        f"{precision}, batch of {args.num_envs * steps}, {memory}": (
            "alone", replace(task, steps=steps, bf16=bf16, seconds=args.seconds / 4), keep,
        )
        for steps, (precision, bf16), (memory, keep) in product(
            args.steps_per_round,
            precisions.items(),
            {"glibc's defaults": False, "freed memory kept": True}.items(),
        )
    }  # fmt: skip
    head = "| alone, us | environment step | actor's row of 8 | of 16 | update's sample, forward |"
    table(f"{head} forward and backward |", rows, args.repeats)


if __name__ == "__main__":
    main()
