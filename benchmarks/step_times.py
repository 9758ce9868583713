"""How long environment steps take, and whether they are what the paper's Claim 1 assumes.

Run: python benchmarks/step_times.py [--seconds 60] [--games pong]

One environment of each task steps by random actions, resets included, in this process alone. Sums
of 100 step times are compared with the Gamma distribution of their mean and variance by the
Kolmogorov-Smirnov test, as the paper does. As the distribution is fitted to the very sums that are
tested, the textbook's p is too large; ``p refitted`` is the share of samples drawn from the fitted
distribution, and fitted again, that lie farther from it (Lilliefors, 1967). Neither knows that
steps depend on those before them: ``correlation`` is that of a step with the one before.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hts_torchrl import AtariEnvs, FootballEnvs
from hts_torchrl.advisor import measured_step_times
from hts_torchrl.envs.group import Array, EnvFactory
from hts_torchrl.theory import gamma_fit, kolmogorov_smirnov

SCENARIOS = ["empty_goal_close", "run_to_score_with_keeper", "3_vs_1_with_keeper", "lazy"]
SUMMED = 100  # the paper's
REPEATS = 500
FIGURES = ("mean ms", "deviation ms", "shortest ms", "longest ms", "correlation", "steps", "sums",
           "shape of a sum", "D", "p", "p refitted")  # fmt: skip


def sums_of(step_s: Array) -> Array:
    """Return the sums of 100 steps each, in seconds ``[K // 100]``."""
    whole = len(step_s) // SUMMED * SUMMED
    return step_s[:whole].reshape(-1, SUMMED).sum(1)


def refitted(distance: float, count: int, mean: float, shape: float) -> float:
    """Return how often as many samples of the very distribution lie as far from their own fit."""
    random = np.random.default_rng(0)
    samples = random.gamma(shape, mean / shape, (REPEATS, count))
    fits = [(sample, *gamma_fit(sample)) for sample in samples]
    drawn = [kolmogorov_smirnov(sample, m, shape=k)[0] for sample, m, k in fits]
    return float(np.mean(np.array(drawn) >= distance))


def figures(step_s: Array) -> dict[str, float]:
    ms, sums = 1e3 * step_s, sums_of(step_s)
    mean, shape = gamma_fit(sums)
    distance, probability = kolmogorov_smirnov(sums, mean, shape=shape)
    values = (
        ms.mean(), ms.std(), ms.min(), ms.max(), np.corrcoef(ms[1:], ms[:-1])[0, 1], len(ms),
        len(sums), shape, distance, probability, refitted(distance, len(sums), mean, shape),
    )  # fmt: skip
    return dict(zip(FIGURES, map(float, values), strict=True))


def measure(envs: EnvFactory, seconds: float) -> Array:
    group = envs.group([0])
    step_s = np.array(list(measured_step_times(group, seconds)))
    group.close()
    return step_s


def draw(name: str, step_s: Array, row: dict[str, float], steps: Axes, sums: Axes) -> None:
    steps.hist(1e3 * step_s, bins=np.linspace(0, np.quantile(1e3 * step_s, 0.995), 80))
    steps.set(title=name, xlabel="a step, ms", yticks=[])
    measured = 1e3 * np.sort(sums_of(step_s))
    mean, shape = gamma_fit(measured)
    fitted = np.random.default_rng(0).gamma(shape, mean / shape, 100_000)
    share = np.arange(1, len(measured) + 1) / len(measured)
    sums.step(measured, share, where="post", label="measured")
    sums.plot(np.quantile(fitted, levels := np.linspace(0.001, 0.999, 200)), levels, label="Gamma")
    title = f"D = {row['D']:.3f}, p = {row['p']:.3f}"
    sums.set(title=title, xlabel=f"sum of {SUMMED} steps, ms", ylim=(0, 1))
    sums.legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description="Step times, and sums of 100 of them")
    parser.add_argument("--scenarios", nargs="*", default=SCENARIOS, help="of football")
    parser.add_argument("--games", nargs="*", default=[], help="of Atari")
    parser.add_argument("--seconds", type=float, default=60, help="for each task")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    tasks: dict[str, EnvFactory] = {name: FootballEnvs(name) for name in args.scenarios}
    tasks |= {name: AtariEnvs(name) for name in args.games}
    figure = Figure(figsize=(3.2 * len(tasks), 5.5), layout="constrained")
    axes = figure.subplots(2, len(tasks), squeeze=False)
    width, rows = max(map(len, tasks)), []
    print(" " * width, " ".join(f"{name:>14}" for name in FIGURES))
    for column, (name, envs) in enumerate(tasks.items()):
        step_s = measure(envs, args.seconds)
        row = figures(step_s)
        draw(name, step_s, row, *axes[:, column])
        rows.append({"task": name, **row})
        print(f"{name:{width}}", " ".join(f"{value:14.6g}" for value in row.values()), flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output / "step_times.png", dpi=120)
    with (args.output / "step_times.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["task", *FIGURES])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
