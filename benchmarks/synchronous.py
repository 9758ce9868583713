"""Training steps a second of HTS-RL beside PPO with a barrier at every step, on one football task.

Run: python benchmarks/synchronous.py [--quick]

All rows are the same program with the settings of ``configs/football/ppo.yaml``, the same network
and cores, and as many executors as cores. From the last row to the first one thing is added:

- ``barrier``: at every step all environments wait for all, one pass answers them, and the update
  is made between two rounds, as in a synchronous vector environment (PAAC);
- ``lock step``: within a round nobody waits for a slower environment; the update is made between
  two rounds;
- ``HTS-RL``: a round is collected during the update.

Each is measured with one torch thread for the learner and with as many as there are cores, which
the synchronous rows have for themselves during an update; HTS-RL's second thread sleeps while it
waits (``OMP_WAIT_POLICY=passive``). The rows take turns (``contest.py``), and ratios to HTS-RL are
taken within a turn, from the faster of the two threads.
"""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from contest import take_turns
from lightning.pytorch import Trainer
from measurement import CORES, PASSIVE, child_of, confidence, machine, spread
from stopwatch import Stopwatch, keep_freed_memory
from throughput import Watch

from hts_torchrl import PPO, FootballEnvs, HTSDataModule

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "football" / "ppo.yaml"
MODES: dict[str, dict[str, Any]] = {
    "HTS-RL": {},
    "lock step": {"delay": 0},
    "barrier": {"delay": 0, "step_barrier": True},
}


@dataclass(frozen=True)
class Run:
    mode: str
    threads: int
    scenario: str
    num_envs: int
    steps_per_round: int
    precision: str


def train(run: Run) -> None:
    """Train until this process is ended."""
    config, frames = yaml.safe_load(CONFIG.read_text()), run.num_envs * run.steps_per_round
    settings = dict(MODES[run.mode])
    if "step_barrier" in settings:
        settings["inference_batch_size"] = run.num_envs
    data = HTSDataModule(
        FootballEnvs(run.scenario), frames_per_batch=frames, total_frames=frames * 10**6,
        num_envs=run.num_envs, envs_per_executor=max(1, run.num_envs // CORES), seed=1, **settings,
    )  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, limit_val_batches=0, precision=run.precision,
        gradient_clip_val=config["trainer"]["gradient_clip_val"],
        callbacks=[Watch(Stopwatch(frames, 0))], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(PPO(**config["model"]["init_args"], num_threads=run.threads), data)


def command(run: Run) -> list[str]:
    passive = PASSIVE if run.mode == "HTS-RL" else ()
    return [*passive, *child_of(__file__, asdict(run))]


def report(speeds: dict[Run, list[float]], num_envs: int) -> str:
    """Return a table with the median, smallest and largest of each row, and ratios."""
    mine = {run: np.array(values) for run, values in speeds.items() if run.num_envs == num_envs}
    head = (
        f"| {num_envs} environments | steps/s of each learner's threads | HTS-RL beside it, 95 % |"
    )
    lines = [head, "|---|---|---|"]
    faster = {
        mode: max((values for run, values in mine.items() if run.mode == mode), key=np.median)
        for mode in dict.fromkeys(run.mode for run in mine)
    }
    for mode, best in faster.items():
        cells = ", ".join(
            f"{run.threads}: {spread(v)}" for run, v in mine.items() if run.mode == mode
        )
        ratio = faster["HTS-RL"] / best if "HTS-RL" in faster else np.array([np.nan])
        lines.append(f"| {mode} | {cells} | {confidence(ratio, '.2f')} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="HTS-RL beside synchronous PPO, steps a second")
    parser.add_argument("--rows", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--scenario", default="3_vs_1_with_keeper")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--steps-per-round", type=int, default=128)
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=5, help="of a turn, at least a round")
    parser.add_argument("--quick", action="store_true", help="2 turns, rounds of 16 steps")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        keep_freed_memory()
        train(Run(**args.child))
        return
    if args.quick:
        args.turns, args.seconds, args.steps_per_round = 2, 3.0, 16
    about = machine()
    print(about)
    speeds: dict[Run, list[float]] = {}
    for num_envs in args.num_envs:
        runs = [
            Run(mode, threads, args.scenario, num_envs, args.steps_per_round, args.precision)
            for mode, threads in product(args.rows, dict.fromkeys([1, CORES]))
        ]
        commands = {run: command(run) for run in runs}
        frames = num_envs * args.steps_per_round
        for run, turns in take_turns(commands, args.turns, args.seconds).items():
            speeds[run] = [turn.rounds * frames / turn.seconds for turn in turns]
    tables = [report(speeds, num_envs) for num_envs in args.num_envs]
    text = "\n\n".join(tables) + "\n"
    print("\n" + text)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "synchronous.md").write_text(f"{about}\n{text}")
    with (args.output / "synchronous.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(field.name for field in fields(Run)), "steps_per_s"])
        for run, values in speeds.items():
            writer.writerows([*asdict(run).values(), f"{value:.1f}"] for value in values)


if __name__ == "__main__":
    main()
