"""Minutes and steps until training reaches a score: HTS-RL beside its baselines and other systems.

Run: python benchmarks/time_to_score.py --tasks football/empty_goal_close --seeds 1 2 3
         [-- ARGUMENTS OF EVERY hts-torchrl fit, such as --data.envs_per_executor=8]
     python benchmarks/time_to_score.py --by training --tasks pong --scores 0 18 --seeds 1 2 3
         --methods hts stable_baselines3 cleanrl_envpool sample_factory

A task is a config of this repository. A method is ``hts``, one of ``configs/baselines`` behind the
config, or another system with the settings that its authors publish. With ``--same-recipe`` it
has those of the config instead, which must be PPO on Atari, football, Box2D or MuJoCo. Runs come
one after another, each on all cores of this process, the methods in turns for each seed.

``--by evaluation``, for methods of this repository: a run has a score when an evaluation (the mean
of its games) has it. ``--evaluation-frames`` is the resolution. ``--by training``, for all: when
the mean raw return of the last 100 finished games of training has it, once 20 games have finished.
Nothing is evaluated then, and each system looks after each of its updates. Minutes are those of
training from the first rollout on: starting and evaluation are not counted, though evaluation
counts towards ``--max-minutes``. Steps are those of the agent, not frames of the emulator.

A run ends at the last score, at ``--max-minutes``, or at its steps: those of the config, or those
that the other system's authors publish. With ``--scores`` and no number, only steps and minutes end
it: that compares scores after the same steps. ``--settings`` gives another system other threads,
workers or memory format, in the words of ``throughput.py``.

Results are appended to ``time_to_score.csv`` in ``--output`` after each run; a run that is there
with the same arguments is not repeated, so an interrupted comparison goes on when it is started
again. ``time_to_score.md`` has the median over seeds (the worse one of two), the smallest and the
largest, ``-`` for a run that did not reach the score. ``time_to_score.png`` has the curves: of
several seeds the median and the range, where a run that has ended keeps its last score.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import throughput
from finished_runs import NEVER, FinishedRuns
from harness import CORES, exit_at_sigterm, machine, options, run_to_end
from recipes import CONFIGS, merged, recipe_of
from score_report import Curve, Point, Run, draw, middle, table

METHODS = ("hts", "synchronous", "impala", "seed_rl")
PEERS = {
    "stable_baselines3": "stable_baselines3",
    "cleanrl_envpool": "envpool",
    "sample_factory": "sample_factory_async",
}
"""Their rows of ``throughput.py``."""
PEER_ENVS, PEER_STEPS = 8, 128
PEERS_GAMES = ("mujoco/HalfCheetah-v5", "mujoco/Hopper-v5", "box2d/LunarLander-v3")
"""For which Stable-Baselines3 has settings."""
TAKES_RECIPES = ("stable_baselines3", "cleanrl_envpool")
SAME_RECIPE = " recipe=config"
"""Behind the settings of a peer that has those of the config."""


def game_of(task: str) -> str:
    """Return what a config plays in the words of ``throughput.py``; empty if it has none."""
    env = merged(task)["data"]["env"]
    settings = env.get("init_args", {})
    if env["class_path"] == "AtariEnvs":
        return str(settings["game"])
    if env["class_path"] == "FootballEnvs":
        return f"football/{settings['scenario']}"
    folder = task.partition("/")[0]
    if folder in ("mujoco", "box2d"):
        game = f"{folder}/{settings['id']}"
        return game if game in PEERS_GAMES else ""
    return "cartpole" if settings.get("id") == "CartPole-v1" else ""


def plays(method: str, task: str) -> bool:
    game = game_of(task)
    return bool(game) and throughput.kind_of(game) in throughput.ROWS[PEERS[method]].games.split()


def peer_run(method: str, task: str, settings: Sequence[str] = ()) -> throughput.Run:
    """Return how another system is run: on all cores, with its threads as throughput has them.

    Raises:
        ValueError: if a setting is none of throughput's.
    """
    game = game_of(task)
    system = throughput.Run(PEERS[method], game, PEER_ENVS, PEER_STEPS, 0.0, "ppo")
    for text in settings:
        name, _, values = text.partition(" ")
        if name == method:
            return throughput.given(f"{PEERS[method]} {values}", system)
    first = throughput.candidates(PEERS[method], system)[0]
    first = replace(first, emulator_threads=min(CORES, PEER_ENVS))
    small = ("cartpole", "mujoco", "box2d")
    if throughput.kind_of(game) in small:  # more threads are slower
        return replace(first, main_threads=1, envs="dummy")
    return replace(first, main_threads=CORES)


def fit_command(run: Run, watch: dict[str, Any]) -> list[str | Path]:
    """Return the command line of a method of this repository; watch is of its training scores."""
    configs = [CONFIGS / f"{run.task}.yaml"]
    if run.method != "hts":
        configs.append(CONFIGS / "baselines" / f"{run.method}.yaml")
    return [
        *(sys.executable, "-m", "hts_torchrl.cli", "fit", f"--name={run.name}"),
        *(f"--config={config}" for config in configs),
        *(f"--seed_everything={run.seed}", "--trainer.enable_progress_bar=false"),
        "--trainer.enable_checkpointing=false",
        *(evaluating(run) if run.by == "evaluation" else watching(watch)),
        *run.arguments.split(),
    ]


def evaluating(run: Run) -> list[str]:
    minutes, seconds = divmod(round(60 * run.max_minutes), 60)
    limit = f"00:{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"
    # A little less, as the callback waits for more than the threshold.
    threshold = "null" if run.last_score == NEVER else run.last_score - 1e-6
    stopping = {"monitor": "eval/score", "mode": "max", "stopping_threshold": threshold}
    return [
        *(f"--data.evaluation_frames={run.evaluation_frames}", f"--trainer.max_time={limit}"),
        "--trainer.callbacks+=EarlyStopping",
        *(f"--trainer.callbacks.{key}={value}" for key, value in stopping.items()),
        "--trainer.callbacks.patience=1000000",
    ]


def watching(watch: dict[str, Any]) -> list[str]:
    return [
        *("--trainer.limit_val_batches=0", "--trainer.callbacks+=trainer_scores.Scores"),
        *(f"--trainer.callbacks.{key}={value}" for key, value in watch.items()),
    ]


def train(run: Run, folder: Path, scores: Sequence[float]) -> Curve:
    """Train to the end in processes of its own; returns its evaluations, or training scores."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "scores.csv"
        watch = {"path": str(path), "scores": list(scores), "max_minutes": run.max_minutes}
        if run.method in PEERS:
            setting, same, _ = run.arguments.partition(SAME_RECIPE)
            peer = peer_run(run.method, run.task, [f"{run.method} {setting}"])
            recipe = {"recipe": recipe_of(run.task, run.method)} if same else {}
            command = throughput.command(peer, seed=run.seed, scores=watch, **recipe)
        else:
            command = fit_command(run, watch)
        # Starting, evaluating and saving are not training; three times its minutes are generous.
        limit_s = 180 * run.max_minutes + 600
        run_to_end(command, run.name, Path(temporary), cwd=folder, limit_s=limit_s)
        if run.by == "training":
            found = points(path, "")
        else:
            versions = (folder / "runs" / run.name).glob("version_*")
            newest = max(versions, key=lambda version: version.stat().st_mtime)
            found = points(newest / "metrics.csv", "eval/")
    if not found:
        missing = "an evaluation" if run.by == "evaluation" else "20 games"
        raise RuntimeError(f"{run.name} ended before {missing}: raise --max-minutes")
    return found


def points(path: Path, prefix: str) -> Curve:
    """Return the rows of a CSV file that have a score."""
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get(f"{prefix}score")]
    names = [prefix + field.name for field in fields(Point)]
    # Metrics are logged in single precision, in which 0.9 is less than 0.9.
    return [Point(*(round(float(row[name]), 6) for name in names)) for row in rows]


def wanted(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Run]:
    """Return all runs of the table; names what cannot be run."""
    runs = []
    for seed, task, method in product(args.seeds, args.tasks, args.methods):
        arguments = " ".join(args.arguments)
        if method in PEERS:
            if args.by == "evaluation":
                parser.error(f"--methods: {method} has no evaluation; give --by training")
            if not plays(method, task):
                parser.error(f"--methods: {method} cannot play {task}")
            try:
                arguments = peer_run(method, task, args.settings).setting
            except ValueError as error:
                parser.error(f"--settings: {error}; such as 'cleanrl_envpool main_threads=2'")
            if throughput.kind_of(game_of(task)) == "football" and not args.same_recipe:
                parser.error(
                    f"--methods: nobody has published settings of {method} for {task}; "
                    "give --same-recipe"
                )
            if args.same_recipe:
                if method not in TAKES_RECIPES:
                    parser.error(f"--same-recipe: {method} has its own recipe only")
                try:
                    recipe_of(task, method)
                except ValueError as error:
                    parser.error(f"--same-recipe: {error}")
                arguments += SAME_RECIPE
        frames = args.evaluation_frames if args.by == "evaluation" else 0
        runs.append(
            Run(
                task, method, seed, args.by, max(args.scores, default=NEVER), args.max_minutes,
                frames, arguments,
            )
        )  # fmt: skip
    return runs


def measure(run: Run, args: argparse.Namespace, results: FinishedRuns[Run, Point]) -> None:
    """Train, unless the run is there; a failure is told, and leaves no results."""
    if run not in results.runs:
        try:
            results.add(run, train(run, args.output, args.scores))
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            return
    curve = results.runs[run]
    minutes = "/".join(middle([curve], score, "minutes") for score in args.scores)
    ended = f"best {max(point.score for point in curve):g}, last {curve[-1].score:g}"
    minutes = minutes or f"{curve[-1].minutes:.2f}"
    print(f"{run.task} {run.method} seed {run.seed}: {minutes} minutes, {ended}", flush=True)


def main() -> None:
    parser = options(__doc__, "CartPole for half a minute")
    parser.add_argument("--by", choices=["evaluation", "training"], default="evaluation")
    parser.add_argument("--tasks", nargs="+", default=["football/empty_goal_close"])
    parser.add_argument(
        "--methods", nargs="+", choices=[*METHODS, *PEERS], default=list(METHODS)
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--scores", type=float, nargs="*", default=[0.4, 0.8])
    parser.add_argument("--max-minutes", type=float, default=60, help="of each run")
    parser.add_argument("--evaluation-frames", type=int, default=20_480)
    parser.add_argument(
        "--same-recipe", action="store_true", help="other systems learn with the config's settings"
    )
    parser.add_argument("--settings", nargs="+", metavar="'METHOD NAME=VALUE ...'", default=[])
    parser.add_argument("arguments", nargs="*", help="behind --: of every hts-torchrl fit")
    args = parser.parse_args()
    if args.quick:
        args.tasks, args.seeds, args.scores = ["cartpole_ppo"], [1], [20.0]
        args.max_minutes, args.evaluation_frames = 0.5, 4096
        args.methods = [name for name in args.methods if name in PEERS] or ["hts"]
    for setting in args.settings:
        if (method := setting.partition(" ")[0]) not in set(args.methods) & set(PEERS):
            parser.error(f"--settings: {method} is no other system of --methods")
    runs = wanted(args, parser)
    exit_at_sigterm()
    args.output.mkdir(parents=True, exist_ok=True)
    results = FinishedRuns(args.output / "time_to_score.csv", Run, Point)
    for run in runs:
        measure(run, args, results)
    found = {run: results.runs[run] for run in runs if run in results.runs}
    if not found:
        sys.exit(1)
    how = {"evaluation": "evaluations", "training": "the last 100 games of training"}[args.by]
    text = [machine(), f"Scores of {how}. Median of {len(args.seeds)} seeds and range, at most "
            f"{args.max_minutes:g} minutes a run. {' '.join(args.arguments)}",
            table(found, args.scores)]  # fmt: skip
    print(document := "\n\n".join(text))
    (args.output / "time_to_score.md").write_text(document)
    draw(found, args.scores, args.output / "time_to_score.png")
    sys.exit(len(found) < len(runs))


if __name__ == "__main__":
    main()
