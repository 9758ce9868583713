"""Throughput against the length of a round, when every environment has a core of its own.

Run: python benchmarks/rendezvous.py [--quick]

The cores are simulated: CartPole, each step of which sleeps until a random time is over
(``hts_torchrl.envs.timed``), so a few cores run as many processes as there are environments. The
collector acts with a small network and nothing is learnt: what is measured is who waits for whom.
Beside it stand

- the physical limit: nobody ever waits;
- the exact expectation, which has a rendezvous every alpha steps but neither inference nor
  signals, and the paper's estimate of it (Claim 1);
- a barrier at every step: Gymnasium's ``AsyncVectorEnv`` and Stable-Baselines3's ``SubprocVecEnv``
  (from its own environment, as in ``throughput.py``) with random actions, so without the time of a
  policy, which favours them.

``--case slow`` makes one environment ten times slower, and ``phases`` each of them for 256 steps at
a time, a sixteenth of the time: there no round helps that is shorter than a phase. ``replayed`` has
the times of a football task, measured at the beginning and stretched to the mean, each environment
from another place of them. Where no formula is known (``phases``, ``pareto``, ``replayed``) the
expectation is a mean of rounds by drawn times.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np
from gymnasium.vector import AsyncVectorEnv
from matplotlib.figure import Figure
from measurement import crew_cpu_s, machine
from throughput import interpreter
from timed_cartpole import PHASE_STEPS, SHAPES, SLOW_SHARE, SLOWER, timed_cartpole, times_s

import hts_torchrl
from hts_torchrl import FootballEnvs, GymEnvs, HTSCollector, make_actor_critic
from hts_torchrl.advisor import measured_step_times
from hts_torchrl.theory import claimed_round_s, expected_round_s

NO_GAMMA = ("pareto", "phases", "replayed")  # whose sums are no Gamma variables
SOURCES = Path(hts_torchrl.__file__).parents[1]
COLUMNS = (
    "envs", "alpha", "measured", "min", "max", "cores", "expected", "claim 1", "limit", "gymnasium",
    "sb3",
)  # fmt: skip
TRACE_S = 20.0


def measured_trace() -> list[float]:
    """Return the times of a football task's steps, in units of their mean."""
    group = FootballEnvs("run_to_score_with_keeper").group([0])
    times = np.array(list(measured_step_times(group, TRACE_S)))
    group.close()
    return (times / times.mean()).round(4).tolist()


def measure_collector(make_env, num_envs: int, alpha: int, seconds: float) -> tuple[float, float]:
    """Return steps a second and cores at work, over whole rounds.

    They last ``seconds`` or longer, and there are at least three of them, after two others.
    """
    spec = GymEnvs("CartPole-v1").group([0]).spec
    frames = num_envs * alpha
    collector = HTSCollector(
        make_env, make_actor_critic("mlp", spec), num_envs=num_envs, frames_per_batch=frames,
        clone=False,
    )  # fmt: skip
    batches, rounds = iter(collector), 0
    for _ in range(2):
        next(batches)
    used_s, began_s = crew_cpu_s(), time.perf_counter()
    while time.perf_counter() - began_s < seconds or rounds < 3:
        next(batches)
        rounds += 1
    took_s = time.perf_counter() - began_s
    cores = (crew_cpu_s() - used_s) / took_s
    collector.shutdown()
    return rounds * frames / took_s, cores


def measure_gymnasium(make_env, num_envs: int, seconds: float) -> float:
    makers = [partial(make_env, index) for index in range(num_envs)]
    envs = AsyncVectorEnv(makers, context="fork")  # torchrl's default would import torch in each
    envs.reset(seed=0)
    steps, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        envs.step(envs.action_space.sample())
        steps += num_envs
    speed = steps / (time.perf_counter() - began_s)
    envs.close()
    return speed


def measure_stable_baselines3(make_env, num_envs: int, seconds: float) -> float:
    program = Path(__file__).with_name("barrier_stable_baselines3.py")
    task = {"num_envs": num_envs, "seconds": seconds, "arguments": make_env.keywords}
    result = subprocess.run(
        [interpreter("stable_baselines3"), program], input=json.dumps(task), text=True, check=True,
        stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(SOURCES)},
    )  # fmt: skip
    return float(result.stdout)


def expectation(case: str, num_envs: int, alpha: int, mean_s: float, trace: list[float]) -> float:
    if case == "slow":  # the sum of one environment, ten times longer, outlasts all others
        return num_envs / (SLOWER * mean_s)
    if case in NO_GAMMA:
        round_s = drawn_round_s(case, num_envs, alpha, mean_s, trace)
    else:
        round_s = expected_round_s(num_envs, alpha, mean_s, shape=SHAPES[case])
    return num_envs * alpha / round_s


def drawn_round_s(case: str, num_envs: int, alpha: int, mean_s: float, trace: list[float]) -> float:
    """Return the mean time of the slowest environment's steps in a round."""
    rounds = max(200, 64 * PHASE_STEPS // alpha)
    steps = rounds * alpha
    each = [
        np.fromiter(times_s(env, case, mean_s, 99, trace), float, steps) for env in range(num_envs)
    ]
    return float(np.reshape(each, (num_envs, rounds, alpha)).sum(2).max(0).mean())


def claim(case: str, num_envs: int, alpha: int, mean_s: float) -> float:
    """Return what the paper's Claim 1 says, which is of Gamma variables that are all alike."""
    if case in ("slow", *NO_GAMMA):
        return float("nan")
    return num_envs * alpha / claimed_round_s(num_envs, alpha, mean_s, shape=SHAPES[case])


def without_waiting(case: str, num_envs: int, mean_s: float) -> float:
    """Return the physical limit."""
    if case == "slow":
        return (num_envs - 1 + 1 / SLOWER) / mean_s
    return num_envs / (mean_s * (1 + (SLOWER - 1) * SLOW_SHARE * (case == "phases")))


def draw(rows: list[dict[str, float]], path: Path) -> None:
    axes = Figure(figsize=(8, 4), layout="constrained").subplots()
    for colour, num_envs in enumerate(dict.fromkeys(row["envs"] for row in rows)):
        mine = [row for row in rows if row["envs"] == num_envs]
        alphas = [row["alpha"] for row in mine]
        middle = np.array([row["measured"] for row in mine])
        low, high = (np.array([row[name] for row in mine]) for name in ("min", "max"))
        style = {"color": f"C{colour}"}
        axes.errorbar(alphas, middle, [middle - low, high - middle], fmt="o", **style,
                      label=f"measured, {num_envs:g} environments")  # fmt: skip
        axes.plot(alphas, [row["expected"] for row in mine], **style, label="exact expectation")
        axes.plot(alphas, [row["gymnasium"] for row in mine], ":", **style, label="AsyncVectorEnv")
        axes.plot(alphas, [row["sb3"] for row in mine], "--", **style, label="SubprocVecEnv")
    axes.set(xscale="log", yscale="log", xlabel="steps between rendezvous", ylabel="steps a second")
    axes.figure.legend(fontsize=8, loc="outside right upper")
    axes.figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput against the length of a round")
    parser.add_argument("--case", choices=[*SHAPES, "replayed"], default="exponential")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--alphas", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256, 512])
    parser.add_argument("--mean-ms", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--quick", action="store_true", help="one repeat of 1 s at 3 lengths")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.seconds, args.alphas = 1, 1.0, [1, 16, 128]
    mean_s, rows = args.mean_ms / 1000, []
    trace = measured_trace() if args.case == "replayed" else []
    print(machine())
    print(f"{args.case}, mean {args.mean_ms:g} ms; steps a second")
    print(" ".join(f"{name:>9}" for name in COLUMNS), "measured/expected measured/best barrier")
    for num_envs in args.num_envs:
        measured: dict[int, list[tuple[float, float]]] = {alpha: [] for alpha in args.alphas}
        barriers: dict[str, list[float]] = {"gymnasium": [], "sb3": []}
        for seed in range(args.repeats):
            make_env = partial(
                timed_cartpole, case=args.case, mean_s=mean_s, seed=seed, trace=trace
            )
            barriers["gymnasium"].append(measure_gymnasium(make_env, num_envs, args.seconds))
            barriers["sb3"].append(measure_stable_baselines3(make_env, num_envs, args.seconds))
            for alpha, turns in measured.items():
                turns.append(measure_collector(make_env, num_envs, alpha, args.seconds))
        for alpha, turns in measured.items():
            speeds, cores = zip(*turns, strict=True)
            values = (
                num_envs, alpha, np.median(speeds), min(speeds), max(speeds), np.median(cores),
                expectation(args.case, num_envs, alpha, mean_s, trace),
                claim(args.case, num_envs, alpha, mean_s),
                without_waiting(args.case, num_envs, mean_s), *map(np.median, barriers.values()),
            )  # fmt: skip
            rows.append(dict(zip(COLUMNS, map(float, values), strict=True)))
            text = " ".join(f"{value:9.4g}" for value in values)
            against = rows[-1]["expected"], max(rows[-1][name] for name in barriers)
            ratios = [rows[-1]["measured"] / speed for speed in against]
            print(text, " ".join(f"{ratio:16.2f}" for ratio in ratios), flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    draw(rows, args.output / f"rendezvous_{args.case}.png")
    with (args.output / f"rendezvous_{args.case}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
