"""What gradient chunks cost on one and two ranks; determinism.py --ranks compares their bits.

Run: python benchmarks/ranks.py [--turns 5]

Prints training steps a second of one and two ranks, plain and with gradient chunks, on CartPole
(A2C, MLP) and Pong (PPO, Nature CNN), and the processor time of the first rank's learner in an
update: medians of the turns, the lowest and the highest. The settings are taken in turns. The ranks
are processes of this machine (DDP, gloo, CPU). Other work on it changes the steps a second much,
and the processor time little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from harness import markdown, spread
from lightning.pytorch import Callback

# Also where this is a script, and the folder above is not where modules are looked for.
sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.determinism import quiet
from tests.fits import quiet_trainer
from tests.ranks import run_ranks

from hts_torchrl import A2C, PPO, AtariEnvs, GymEnvs, HTSDataModule, Learner
from hts_torchrl.envs.group import EnvFactory


@dataclass(frozen=True)
class Task:
    env: EnvFactory
    learner: type[Learner]
    num_envs: int
    steps: int
    updates: int
    """Of a measurement; a fifth more go before it."""
    model: dict[str, Any] = field(default_factory=dict)


TASKS = {
    "CartPole, A2C": Task(GymEnvs("CartPole-v1"), A2C, 16, 16, 100),
    "Pong, PPO": Task(
        AtariEnvs("pong"), PPO, 16, 16, 4, {"network": "nature", "epochs": 2, "minibatches": 2}
    ),
}
SETTINGS = {1: (1, 2, 4), 2: (1, 2, 4)}
"""Chunks by number of ranks."""


class Clock(Callback):
    """Measures frames a second, and processor milliseconds an update, after the first updates."""

    def __init__(self, before: int) -> None:
        self.before = before

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch.is_last and pl_module.updates == self.before:
            self.started_s, self.started_cpu_s = time.perf_counter(), time.process_time()

    def on_train_end(self, trainer, pl_module):
        seconds = time.perf_counter() - self.started_s
        updates = pl_module.updates - self.before
        self.rate = trainer.datamodule.schedule.frames_per_round * updates / seconds
        self.cpu_ms = 1e3 * (time.process_time() - self.started_cpu_s) / updates


def fit(task: Task, ranks: int, chunks: int, clock: Clock) -> None:
    """Train on this rank, of which the clock leaves out the first updates."""
    rounds = clock.before + task.updates
    frames = task.num_envs * task.steps
    data = HTSDataModule(
        task.env,
        num_envs=task.num_envs,
        num_actors=1,
        envs_per_executor=task.num_envs // 4,
        frames_per_batch=frames,
        total_frames=frames * rounds,
        seed=1,
    )
    torch.manual_seed(1)
    learner = task.learner(gradient_chunks=chunks, **task.model)
    strategy = "ddp" if ranks > 1 else "auto"
    trainer = quiet_trainer(
        devices=ranks, strategy=strategy, callbacks=[clock], gradient_clip_val=0.5
    )
    trainer.fit(learner, data)


def measure(ranks: int, path: Path) -> None:
    """Write the rates of all tasks and chunks on so many ranks."""
    quiet()
    rates = {}
    for name, task in TASKS.items():
        for chunks in SETTINGS[ranks]:
            clock = Clock(max(1, task.updates // 5))
            fit(task, ranks, chunks, clock)
            rates[name, ranks, chunks] = clock.rate, clock.cpu_ms
    if os.environ["RANK"] == "0":
        torch.save(rates, path)


def compare_rates(turns: int) -> None:
    """Print the rates as a table."""
    measured: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    with TemporaryDirectory() as folder:
        path = Path(folder, "rates")
        for _ in range(turns):
            for ranks in SETTINGS:
                run_ranks(ranks, measure, ranks, path, limit_s=3600)
                for key, each in torch.load(path).items():
                    measured.setdefault(key, []).append(each)
    rows = []
    for (task, ranks, chunks), turns_of in measured.items():
        rates, times = zip(*turns_of, strict=True)
        plain = statistics.median(ms for _, ms in measured[task, ranks, 1])
        share = statistics.median(times) / plain
        rows.append({
            "task": task, "ranks": ranks, "chunks": "plain" if chunks == 1 else chunks,
            "steps/s": spread(rates), "learner, CPU ms an update": spread(times),
            "of the plain one": f"{share:.2f}",
        })  # fmt: skip
    print(markdown(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    compare_rates(parser.parse_args().turns)


if __name__ == "__main__":
    main()
