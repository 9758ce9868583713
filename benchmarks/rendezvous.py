"""Throughput against the length of a round, when every environment has a core of its own.

Run: python benchmarks/rendezvous.py [--quick]

The cores are simulated: CartPole, each step of which sleeps until a random time is over
(``timed_envs.py``), so a few cores run as many processes as there are environments. The
collector acts with a small network and nothing is learnt: what is measured is who waits for whom.
Beside it stand

- the physical limit: nobody ever waits;
- the exact expectation, which has a rendezvous every alpha steps but neither inference nor
  signals, and the paper's estimate of it (Claim 1);
- a barrier at every step: Gymnasium's ``AsyncVectorEnv`` with random actions, so without the time
  of a policy, which favours it.

Step times of ``--case gamma`` have four times the variance of ``exponential``, and ``pareto`` has a
heavy tail. ``slow`` makes one environment ten times slower, and ``phases`` each of them for 256
steps at a time, a sixteenth of the time: there no round helps that is shorter than a phase.
``replayed`` has the times of a football task, measured at the beginning and stretched to the mean,
each environment from another place of them. Where no formula is known (``phases``, ``pareto``,
``replayed``) the expectation is a mean of rounds by drawn times.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from harness import cpu_s, machine, markdown, options, write_csv
from matplotlib.figure import Figure
from scipy.stats import gamma
from timed_envs import PHASE_STEPS, SHAPES, SLOW_SHARE, SLOWER, timed_cartpole, times_s

from hts_torchrl import FootballEnvs, GymEnvs, HTSCollector, env_spec_of, make_actor_critic
from hts_torchrl.tools.runtime_model import expected_round_s
from hts_torchrl.tools.step_times import measured_step_times

NO_GAMMA = ("pareto", "phases", "replayed")  # whose sums are no Gamma variables
TRACE_S = 20.0


def measured_trace() -> list[float]:
    """Return the times of a football task's steps, in units of their mean."""
    group = FootballEnvs("run_to_score_with_keeper").group([0])
    times = np.array(list(measured_step_times(group, TRACE_S)))
    group.close()
    return (times / times.mean()).round(4).tolist()


def measure_collector(
    make_env, num_envs: int, alpha: int, seconds: float, compiled: bool
) -> tuple[float, ...]:
    """Return steps a second, cores at work, and milliseconds from an observation to its answer.

    Of whole rounds, which last ``seconds`` or longer. There are at least three, after two others.
    The answers are those of one more round.
    """
    spec = env_spec_of(GymEnvs("CartPole-v1"))
    frames = num_envs * alpha
    collector = HTSCollector(
        make_env, make_actor_critic("mlp", spec), num_envs=num_envs, frames_per_batch=frames,
        compile_policy=compiled, clone=False,
    )  # fmt: skip
    batches, rounds = iter(collector), 0
    for _ in range(2):
        next(batches)
    pids = [os.getpid(), *(process.pid for process in multiprocessing.active_children())]
    used_s, began_s = sum(map(cpu_s, pids)), time.perf_counter()
    while time.perf_counter() - began_s < seconds or rounds < 3:
        next(batches)
        rounds += 1
    took_s = time.perf_counter() - began_s
    cores = (sum(map(cpu_s, pids)) - used_s) / took_s
    collector.trace_round(rounds + 3)  # the one before it runs
    for _ in range(2):
        next(batches)
    answer_s = [
        after[0] - before[1]
        for worker, works in collector.trace.items()
        for before, after in itertools.pairwise(works)
        if worker.startswith("executor")
    ]
    collector.shutdown()
    return rounds * frames / took_s, cores, 1000 * float(np.mean(answer_s))


def measure_barrier(make_env, num_envs: int, seconds: float) -> float:
    makers = [partial(make_env, index) for index in range(num_envs)]
    # As the collector does: else a reset would be a step that takes no time, and would count.
    same_step = AutoresetMode.SAME_STEP
    # torchrl's default context would import torch in each.
    envs = AsyncVectorEnv(makers, context="fork", autoreset_mode=same_step)
    envs.reset(seed=0)
    steps, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        envs.step(envs.action_space.sample())
        steps += num_envs
    speed = steps / (time.perf_counter() - began_s)
    envs.close()
    return speed


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


def claimed_round_s(num_envs: int, alpha: int, mean_s: float, *, shape: float) -> float:
    """Return the paper's estimate of ``expected_round_s``, for two environments or more.

    ``b + g * a`` with ``b = F^-1(1 - 1/n)``, ``a = F^-1(1 - 1/(n e)) - b`` and ``g`` the
    Euler-Mascheroni constant: the extreme-value limit for large N.
    """
    b, far = gamma.ppf([1 - 1 / num_envs, 1 - 1 / (num_envs * np.e)], alpha * shape)
    return float(b + np.euler_gamma * (far - b)) * mean_s / shape


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
        axes.plot(alphas, [row["barrier"] for row in mine], ":", **style, label="AsyncVectorEnv")
    axes.set(xscale="log", yscale="log", xlabel="steps between rendezvous", ylabel="steps a second")
    axes.figure.legend(fontsize=8, loc="outside right upper")
    axes.figure.savefig(path, dpi=150)


def measure(
    task: dict, num_envs: int, alphas: list[int], repeats: int, seconds: float, compiled: bool
) -> list[dict[str, float]]:
    """Return a row of the table for each length of a round."""
    measured: dict[int, list[tuple[float, ...]]] = {alpha: [] for alpha in alphas}
    barriers = []
    for seed in range(repeats):
        make_env = partial(timed_cartpole, seed=seed, **task)
        barriers.append(measure_barrier(make_env, num_envs, seconds))
        for alpha, turns in measured.items():
            turns.append(measure_collector(make_env, num_envs, alpha, seconds, compiled))
    case, mean_s, rows = task["case"], task["mean_s"], []
    for alpha, turns in measured.items():
        speeds, cores, answer_ms = zip(*turns, strict=True)
        middle, barrier = float(np.median(speeds)), float(np.median(barriers))
        expected = expectation(case, num_envs, alpha, mean_s, task["trace"])
        rows.append({
            "envs": num_envs, "alpha": alpha, "measured": middle, "min": min(speeds),
            "max": max(speeds), "cores": float(np.median(cores)),
            "answer, ms": float(np.median(answer_ms)), "expected": expected,
            "claim 1": claim(case, num_envs, alpha, mean_s),
            "limit": without_waiting(case, num_envs, mean_s), "barrier": barrier,
            "measured / expected": middle / expected, "measured / barrier": middle / barrier,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = options(__doc__, "one repeat of 1 s at 3 lengths")
    parser.add_argument("--case", choices=[*SHAPES, "replayed"], default="exponential")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--alphas", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256, 512])
    parser.add_argument("--mean-ms", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--compile-policy", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.seconds, args.alphas = 1, 1.0, [1, 16, 128]
    trace = measured_trace() if args.case == "replayed" else []
    task = {"case": args.case, "mean_s": args.mean_ms / 1000, "trace": trace}
    about = f"{machine()}{args.case}, mean {args.mean_ms:g} ms; steps a second\n"
    print(about)
    rows = []
    for num_envs in args.num_envs:
        rows += measure(
            task, num_envs, args.alphas, args.repeats, args.seconds, args.compile_policy
        )
        print(markdown(rows), flush=True)
    name = f"rendezvous_{args.case}"
    write_csv(args.output / f"{name}.csv", rows)
    (args.output / f"{name}.md").write_text(f"{about}\n{markdown(rows)}")
    draw(rows, args.output / f"{name}.png")


if __name__ == "__main__":
    main()
