"""Minutes and steps until an evaluation reaches a score: HTS-RL beside its baselines.

Run: python benchmarks/time_to_score.py --tasks football/empty_goal_close --seeds 1 2 3
         [-- ARGUMENTS OF EVERY hts-torchrl fit, such as --data.envs_per_executor=8]

A task is a config of this repository, a method one of ``configs/baselines`` behind it. The runs
are `hts-torchrl fit` one after another, each on all cores of this process, the methods in turns
for each seed. A run ends when an evaluation (the mean of its games) has reached the last score, at
``--max-minutes``, or at the config's ``total_frames``. Minutes are those of training: evaluation is
not counted, though it counts towards ``--max-minutes``. As scores are known at evaluations only,
``--evaluation-frames`` is the resolution.

Results are appended to ``time_to_score.csv`` in ``--output`` after each run; a run that is there
with the same arguments is not repeated, so an interrupted comparison goes on when it is started
again. ``time_to_score.md`` has the median over seeds, ``-`` where half of the runs or more did not
reach the score; ``time_to_score.png`` every evaluation.
"""

from __future__ import annotations

import csv
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from finished_runs import NEVER, FinishedRuns
from harness import machine, options
from matplotlib.figure import Figure

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
METHODS = ("hts", "synchronous", "impala", "seed_rl")


@dataclass(frozen=True)
class Run:
    """What is run: columns of the results by which a finished run is found again."""

    task: str
    method: str
    seed: int
    max_minutes: float
    evaluation_frames: int
    arguments: str


@dataclass(frozen=True)
class Evaluation:
    minutes: float
    frames: float
    score: float


def command(run: Run, name: str, last_score: float) -> list[str]:
    configs = [CONFIGS / f"{run.task}.yaml"]
    if run.method != "hts":
        configs.append(CONFIGS / "baselines" / f"{run.method}.yaml")
    minutes, seconds = divmod(round(60 * run.max_minutes), 60)
    limit = f"00:{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"
    # A little less, as the callback waits for more than the threshold.
    stopping = {"monitor": "eval/score", "mode": "max", "stopping_threshold": last_score - 1e-6}
    return [
        *(sys.executable, "-m", "hts_torchrl.cli", "fit", f"--name={name}"),
        *(f"--config={config}" for config in configs),
        *(f"--seed_everything={run.seed}", f"--data.evaluation_frames={run.evaluation_frames}"),
        *("--trainer.enable_progress_bar=false", f"--trainer.max_time={limit}"),
        *("--trainer.enable_checkpointing=false", "--trainer.callbacks+=EarlyStopping"),
        *(f"--trainer.callbacks.{key}={value}" for key, value in stopping.items()),
        *("--trainer.callbacks.patience=1000000", *run.arguments.split()),
    ]


def train(run: Run, folder: Path, last_score: float) -> list[Evaluation]:
    """Train to the end in a process of its own; returns its evaluations."""
    name = f"{run.task.replace('/', '_')}_{run.method}_{run.seed}"
    process = subprocess.Popen(
        command(run, name, last_score),
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        # Starting, evaluating and saving are not training; three times its minutes are generous.
        _, errors = process.communicate(timeout=180 * run.max_minutes + 600)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise RuntimeError(f"{name} ended with status {process.returncode}\n{errors[-3000:]}")
    newest = max((folder / "runs" / name).glob("version_*"), key=lambda path: path.stat().st_mtime)
    found = evaluations(newest / "metrics.csv")
    if not found:
        raise RuntimeError(f"{name} was not evaluated: raise --max-minutes")
    return found


def evaluations(metrics: Path) -> list[Evaluation]:
    with metrics.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("eval/score")]
    names = ("eval/minutes", "eval/frames", "eval/score")
    # Logged in single precision, in which 0.9 is less than 0.9.
    return [Evaluation(*(round(float(row[name]), 6) for name in names)) for row in rows]


def reached(curve: list[Evaluation], score: float, unit: str) -> float:
    """Return the minutes or frames of the first evaluation that has the score."""
    return next((getattr(point, unit) for point in curve if point.score >= score), NEVER)


def table(runs: dict[Run, list[Evaluation]], scores: list[float], unit: str) -> str:
    methods = list(dict.fromkeys(run.method for run in runs))
    lines = [f"| task | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for task in dict.fromkeys(run.task for run in runs):
        cells = []
        for method in methods:
            mine = [curve for r, curve in runs.items() if (r.task, r.method) == (task, method)]
            cells.append("/".join(middle(mine, score, unit) for score in scores))
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines)


def middle(curves: list[list[Evaluation]], score: float, unit: str) -> str:
    """Return the median of runs, the worse one of two; ``-`` if it is never."""
    values = [reached(curve, score, unit) for curve in curves]
    value = statistics.median_high(values) if values else NEVER
    return "-" if value == NEVER else f"{value:.1f}" if unit == "minutes" else f"{value:,.0f}"


def draw(runs: dict[Run, list[Evaluation]], scores: list[float], path: Path) -> None:
    tasks = list(dict.fromkeys(run.task for run in runs))
    methods = list(dict.fromkeys(run.method for run in runs))
    figure = Figure(figsize=(8, 3.2 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), 2, squeeze=False, sharey="row")
    for (row, task), (column, unit) in product(enumerate(tasks), enumerate(("minutes", "frames"))):
        axes = panels[row, column]
        for score in scores:
            axes.axhline(score, color="0.8")
        for run, curve in runs.items():
            if run.task == task:
                first = run == next(r for r in runs if (r.task, r.method) == (task, run.method))
                place = [getattr(point, unit) for point in curve]
                style = {"color": f"C{methods.index(run.method)}", "label": run.method * first}
                axes.plot(place, [point.score for point in curve], ".-", **style)
        axes.set(title=task, xlabel={"minutes": "minutes of training", "frames": "steps"}[unit])
    panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = options(__doc__, "CartPole for half a minute")
    parser.add_argument("--tasks", nargs="+", default=["football/empty_goal_close"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--scores", type=float, nargs="+", default=[0.4, 0.8])
    parser.add_argument("--max-minutes", type=float, default=60, help="of each run")
    parser.add_argument("--evaluation-frames", type=int, default=20_480)
    parser.add_argument("arguments", nargs="*", help="behind --: of every hts-torchrl fit")
    args = parser.parse_args()
    if args.quick:
        args.tasks, args.methods, args.seeds = ["cartpole_ppo"], ["hts"], [1]
        args.scores, args.max_minutes, args.evaluation_frames = [20.0], 0.5, 4096
    args.output.mkdir(parents=True, exist_ok=True)
    results = FinishedRuns(args.output / "time_to_score.csv", Run, Evaluation)
    failed, wanted = False, []
    for seed, task, method in product(args.seeds, args.tasks, args.methods):
        run = Run(
            task, method, seed, args.max_minutes, args.evaluation_frames, " ".join(args.arguments)
        )
        wanted.append(run)
        if run not in results.runs:
            try:
                results.add(run, train(run, args.output, max(args.scores)))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(error, file=sys.stderr, flush=True)
                failed = True
                continue
        curve = results.runs[run]
        minutes = "/".join(middle([curve], score, "minutes") for score in args.scores)
        best = max(point.score for point in curve)
        print(f"{task} {method} seed {seed}: {minutes} minutes, best {best:g}", flush=True)
    runs = {run: results.runs[run] for run in wanted if run in results.runs}
    if not runs:
        sys.exit(1)
    label = "/".join(f"{score:g}" for score in args.scores)
    text = [machine(), f"Median of {len(args.seeds)} seeds, at most {args.max_minutes:g} minutes a "
            f"run. {' '.join(args.arguments)}",
            f"Minutes to {label}", table(runs, args.scores, "minutes"),
            f"Steps to {label}", table(runs, args.scores, "frames")]  # fmt: skip
    print(document := "\n\n".join(text) + "\n")
    (args.output / "time_to_score.md").write_text(document)
    draw(runs, args.scores, args.output / "time_to_score.png")
    sys.exit(failed)


if __name__ == "__main__":
    main()
