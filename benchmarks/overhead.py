"""What this project's machinery costs beside the environments and the network.

Run: python benchmarks/overhead.py [--quick] [--only executor signals memory start meter]

Five tables; every measurement is a fresh process, rows take turns, and ratios are taken within a
turn:

- *executor*: CPU time of the executor processes, by the operating system's account, for each step
  of an environment that does nothing, the wrapping of that environment included;
- *signals*: the same for processes that announce themselves, sleep until they are answered, and do
  nothing else: what is left of an executor when all else costs nothing;
- *memory*: what one executor process more takes, beside what one bare process more takes that
  makes and resets the same environment. Both are measured as the difference between 12 and 4
  processes, divided by 8: the proportional set size (a page that n processes share counts 1/n for
  each), and the private memory;
- *start*: seconds from ``start()`` to the first batch of 16 executors. The first collector of a
  process (cold) starts the fork server too, a second one (warm) finds it;
- *meter*: training with ``TrainingStatistics`` and its logging, and without, in alternating blocks
  of rounds of the same run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from measurement import cpu_s, in_fresh_process, machine, spread
from stopwatch import keep_freed_memory

from hts_torchrl import (
    A2C,
    AtariEnvs,
    GymEnvs,
    HTSCollector,
    HTSDataModule,
    TrainingStatistics,
    make_actor_critic,
)
from hts_torchrl.buffers.doorbell import Doorbell
from hts_torchrl.buffers.ready_queue import ReadyQueue

ENVS = {"CartPole": (GymEnvs("CartPole-v1"), "mlp"), "Breakout": (AtariEnvs("breakout"), "nature")}
BARE = {
    "CartPole": "import gymnasium; env = gymnasium.make('CartPole-v1'); env.reset()",
    "Breakout": "from ale_py.vector_env import AtariVectorEnv; "
    "env = AtariVectorEnv('breakout', 1, num_threads=1); env.reset()",
}
FEW, MANY = 4, 12


class NullEnv(gymnasium.Env[np.ndarray, int]):
    """Does nothing."""

    observation_space = Box(-1.0, 1.0, (4,))
    action_space = Discrete(2)
    observation = np.zeros(4, np.float32)

    def __init__(self, _: int) -> None:
        super().__init__()

    def reset(self, **_: object) -> tuple[np.ndarray, dict[str, Any]]:
        return self.observation, {}

    def step(self, _: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self.observation, 0.0, False, False, {}


def collect(envs: Any, network: str, num_envs: int, steps: int, per_executor: int = 1):
    spec = (envs.group([0]) if network == "nature" else GymEnvs("CartPole-v1").group([0])).spec
    return HTSCollector(
        envs, make_actor_critic(network, spec), num_envs=num_envs,
        envs_per_executor=per_executor, frames_per_batch=num_envs * steps, clone=False,
    )  # fmt: skip


def executors() -> list[int]:
    children = multiprocessing.active_children()
    return [child.pid for child in children if child.pid and "executor" in child.name]


def executor(executors_: int, per_executor: int, seconds: float) -> dict[str, float]:
    """Return the microseconds of CPU that an executor takes for an environment's step."""
    num_envs, steps = executors_ * per_executor, 64
    collector = collect(NullEnv, "mlp", num_envs, steps, per_executor)
    batches, rounds = iter(collector), 0
    for _ in range(5):
        next(batches)
    used_s, began_s = sum(map(cpu_s, executors())), time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        next(batches)
        rounds += 1
    used_s = sum(map(cpu_s, executors())) - used_s
    speed = rounds * num_envs * steps / (time.perf_counter() - began_s)
    collector.shutdown()
    return {"us a step": 1e6 * used_s / (rounds * num_envs * steps), "steps/s": speed}


def announce(ready: ReadyQueue, bell: Doorbell, index: int, lifeline: Connection) -> None:
    number = np.array([index], np.int32)
    while True:
        ready.put(number)
        bell.wait(1, lifeline)


def signals(processes: int, seconds: float) -> dict[str, float]:
    """Return the microseconds of CPU that a process takes to announce itself and to be woken."""
    ready, bells = ReadyQueue(), [Doorbell() for _ in range(processes)]
    lifeline, _never_closed = Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    started = [
        context.Process(target=announce, args=(ready, bell, index, lifeline))
        for index, bell in enumerate(bells)
    ]
    for process in started:
        process.start()
    answered, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        for index in ready.take(8, lifeline):
            bells[index].ring()
            answered += 1
    used_s = sum(cpu_s(process.pid) for process in started)
    for process in started:
        process.kill()
        process.join()
    return {"us a signal": 1e6 * used_s / answered, "signals/s": answered / seconds}


def memory_mb(pid: int) -> dict[str, float]:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kb = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
    return {"PSS": kb["Pss"] / 1024, "private": (kb["Private_Clean"] + kb["Private_Dirty"]) / 1024}


def total_mb(pids: Iterable[int]) -> dict[str, float]:
    parts = [memory_mb(pid) for pid in pids]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def bare_mb(name: str, processes: int) -> dict[str, float]:
    code = f"{BARE[name]}; print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(processes)]
    for process in started:
        process.stdout.readline()
    total = total_mb(process.pid for process in started)
    for process in started:
        process.communicate(b"\n")
    return total


def executors_mb(name: str, processes: int) -> dict[str, float]:
    collector = collect(*ENVS[name], processes, steps=5)
    batches = iter(collector)
    for _ in range(4):
        next(batches)
    total = total_mb(executors())
    collector.shutdown()
    return total


def memory(name: str) -> dict[str, float]:
    """Return the megabytes of one executor more, of one bare process more, and how they differ."""
    figures = {}
    for kind, measured in (("executor", executors_mb), ("bare", bare_mb)):
        few, many = measured(name, FEW), measured(name, MANY)
        for unit, total in many.items():
            figures[f"{kind}, {unit}"] = (total - few[unit]) / (MANY - FEW)
    for unit in ("PSS", "private"):
        figures[f"over it, {unit}"] = figures[f"executor, {unit}"] - figures[f"bare, {unit}"]
    return figures


def start(name: str) -> dict[str, float]:
    """Return the seconds to the first batch, of a process's first collector and of its second."""
    figures = {}
    for kind in ("cold", "warm"):
        collector = collect(*ENVS[name], 16, steps=5)
        began_s = time.perf_counter()
        collector.start()
        next(iter(collector))
        figures[f"{kind}, s"] = time.perf_counter() - began_s
        collector.shutdown()
    return figures


class EveryOtherBlock(Callback):
    """Lets the meter work in every other block of rounds, and times the blocks."""

    def __init__(self, blocks: int, rounds: int) -> None:
        self.meter = TrainingStatistics()
        self.seconds: list[float] = []
        self.blocks, self.rounds, self.count = blocks, rounds, 0

    def on_train_start(self, *arguments: Any) -> None:
        self.meter.on_train_start(*arguments)

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        block, first = divmod(self.count, self.rounds)
        if first == 0:
            now_s = time.perf_counter()
            if block:
                self.seconds.append(now_s - self.began_s)
            self.began_s = now_s
        if block % 2:
            self.meter.on_train_batch_end(trainer, *arguments)
        self.count += 1
        trainer.should_stop = block > self.blocks


def meter(name: str, seconds: float) -> dict[str, float]:
    """Return steps a second with the meter and without, and what it costs, in pairs of blocks."""
    envs, network = ENVS[name]
    num_envs, steps, rounds = 16, 5, 100
    round_s = 0.1 if network == "nature" else 0.02
    every_other = EveryOtherBlock(max(4, round(seconds / (rounds * round_s))), rounds)
    data = HTSDataModule(
        envs, frames_per_batch=num_envs * steps, total_frames=10**12, num_envs=num_envs,
        envs_per_executor=8,
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        Trainer(
            accelerator="cpu", devices=1, max_epochs=1, limit_val_batches=0,
            callbacks=[every_other], logger=CSVLogger(folder), enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False,
        ).fit(A2C(network=network), data)  # fmt: skip
    without, metered = every_other.seconds[2::2], every_other.seconds[1::2]
    pairs = list(zip(metered, without, strict=False))
    frames = num_envs * steps * rounds
    return {
        "steps/s with": frames / float(np.median(metered)),
        "without": frames / float(np.median(without)),
        "cost, %": float(np.median([100 * (a / b - 1) for a, b in pairs])),
    }


KINDS: dict[str, Callable[..., dict[str, float]]] = {
    "executor": executor, "signals": signals, "memory": memory, "start": start, "meter": meter,
}  # fmt: skip


def rows_of(kind: str, seconds: float) -> dict[str, list[Any]]:
    """Return the arguments of a table's rows; ratios are to the first."""
    if kind == "executor":
        shapes = [(8, 1), (16, 1), (32, 1), (64, 1), (8, 2), (8, 4)]
        return {f"{n} executors, {per} environments each": [n, per, seconds] for n, per in shapes}
    if kind == "signals":
        return {f"{n} processes": [n, seconds] for n in (8, 64)}
    return {name: [name, seconds] if kind == "meter" else [name] for name in ENVS}


def table(kind: str, seconds: float, repeats: int) -> None:
    """Measure in turns and print medians, with the smallest and the largest."""
    rows = rows_of(kind, seconds)
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
    for _ in range(repeats):
        first = None
        for name, arguments in rows.items():
            figures = in_fresh_process(__file__, [kind, arguments])
            if kind == "executor":
                first = first or figures["us a step"]
                figures["of the first row"] = figures["us a step"] / first
            measured[name].append(figures)
    columns = list(measured[next(iter(rows))][0])
    print(f"\n| {kind} | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for name, turns in measured.items():
        values = [[turn[column] for turn in turns] for column in columns]
        print(f"| {name} | " + " | ".join(spread(v, ".4g") for v in values) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the machinery costs")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a measurement")
    parser.add_argument("--quick", action="store_true", help="one repeat of 1 s: does it run?")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        keep_freed_memory()
        kind, arguments = args.child
        print(json.dumps(KINDS[kind](*arguments)))
        return
    if args.quick:
        args.repeats, args.seconds = 1, 1.0
    print(machine())
    for kind in args.only:
        table(kind, args.seconds, args.repeats)


if __name__ == "__main__":
    main()
