"""Is the delay of one update free? Steps to a score with delay 0 and 1, seed by seed.

Run: python benchmarks/delay.py --tasks CartPole Acrobot --seeds 10 --jobs 2

A task is configs of this repository (``_a2c``, ``_ppo``, and ``_pqn`` where there is one), a
score, and a number of games: a run ends after the round in which the mean return of the last so
many games in training first reached the score. It ends without it at the task's limit of frames,
which counts as never. Nothing is evaluated. ``delay0`` of a task is the rule of the config without
the delay. All methods have it whose names do not begin with ``delay0``.

A run is one process with one thread, and its bits are those of any worker pool. So steps depend on
the seed and not on the load of the machine, and ``--jobs`` runs may go at once. A process trains
one run after another.

Results are appended to ``delay.csv`` in ``--output`` as each run ends. A run that is there is not
repeated, so an interrupted study goes on when it is started again. ``delay.md`` has the median of
the steps, its ratio to that of ``delay0``, and the geometric mean of these ratios over all tasks,
also to other methods, and over the tasks that are named. A ratio is above 1 where the delay costs
steps. ``steps_to_score.py`` says what the intervals are.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import delayed_learners
import numpy as np
import torch
from finished_runs import NEVER, FinishedRuns
from harness import machine, options
from lightning.pytorch import Callback, Trainer, seed_everything
from recipes import CONFIGS, merged
from steps_to_score import Steps, overview, table, whole

from hts_torchrl import A2C, PPO, PQN, GymEnvs, HTSDataModule


@dataclass(frozen=True)
class Task:
    config: str
    """Path in ``configs/``, without ``_ppo.yaml``."""
    score: float
    games: int
    """Of whose returns the mean is taken."""
    frames: int
    """After which a run ends without the score."""


@dataclass(frozen=True)
class Method:
    delay: int = 1
    model: Mapping[str, Any] = field(default_factory=dict)
    learner: type[A2C] | type[PPO] | type[PQN] | None = None
    """None is the config's."""


TASKS = {
    "CartPole": Task("cartpole", 400.0, 20, 256_000),
    "Acrobot": Task("acrobot", -120.0, 50, 256_000),
    "Breakout": Task("minatar/breakout", 3.0, 100, 307_200),
    "SpaceInvaders": Task("minatar/space_invaders", 9.0, 100, 307_200),
}
GRADIENT = {"delayed_step": "gradient"}
RATIO = {"delayed_step": "ratio"}
DISPLACEMENT = {"delayed_step": "displacement"}
DECOUPLED = {"delayed_step": "decoupled"}
EXPLORES = {"exploration_fraction": 0.02}
"""Epsilon falls early, so that its fall does not decide when the score is reached."""
METHODS = {
    "a2c": {
        "delay0": Method(0),
        "gradient": Method(1, GRADIENT),
        "ratio": Method(1, RATIO),
        "ratio, uncut": Method(1, RATIO, delayed_learners.Uncut),
    },
    "ppo": {
        "delay0": Method(0),
        "ratio": Method(1, RATIO),
        "displacement": Method(1, DISPLACEMENT),
        "decoupled": Method(1, DECOUPLED),
        "delay0, decoupled": Method(0, DECOUPLED, delayed_learners.AlwaysDecoupled),
    },
    "pqn": {
        "delay0": Method(0, EXPLORES),
        "delay1": Method(1, EXPLORES),
        "stored values": Method(1, EXPLORES, delayed_learners.StoredValues),
    },
}
REFERENCES = ("delay0", "ratio", "displacement", "delay0, decoupled")
"""Methods to which the means over all tasks are compared."""
MAIN = ("delay0", "gradient", "ratio", "displacement", "decoupled", "delay1")


@dataclass(frozen=True)
class Run:
    """What is run: columns of the results by which a finished run is found again."""

    task: str
    algorithm: str
    method: str
    seed: int
    score: float
    games: int
    frames: int


@dataclass(frozen=True)
class Outcome:
    steps: float
    """Until the score; infinite if never."""
    last_return: float
    """Mean of the last games."""


class ReachesScore(Callback):
    """Ends the Trainer's run in the round in which the mean return has the score."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.frames = 0
        self.outcome = Outcome(NEVER, float("nan"))
        self._returns: deque[float] = deque(maxlen=run.games)

    def on_train_batch_end(
        self, trainer: Trainer, _: object, __: object, part: Any, ___: int
    ) -> None:
        if not part.is_last:
            return
        self.frames += part.round.numel()
        after = part.round["next"]
        self._returns.extend(after["episode_reward"][after["episode_end"]].tolist())
        if len(self._returns) < self.run.games:
            return
        mean = float(np.mean(self._returns))
        reached = mean >= self.run.score
        self.outcome = Outcome(self.frames if reached else NEVER, round(mean, 6))
        trainer.should_stop = reached or self.frames >= self.run.frames


def config_of(task: str, algorithm: str) -> str:
    return f"{TASKS[task].config}_{algorithm}"


def asked(task: str, algorithm: str, method: str, seed: int, *, quick: bool = False) -> Run:
    """Return the run that a task asks for."""
    each = TASKS[task]
    frames = 2000 if quick else each.frames
    return Run(task, algorithm, method, seed, each.score, each.games, frames)


def steps_of(runs: Mapping[Run, Sequence[Outcome]], *, quick: bool = False) -> Steps:
    """Return the steps of all runs that the tasks ask for; others had another score or limit."""
    return {
        (task, algorithm, method): [
            outcome.steps
            for run, (outcome,) in runs.items()
            if run == asked(task, algorithm, method, run.seed, quick=quick)
        ]
        for task, algorithm in product(TASKS, METHODS)
        for method in METHODS[algorithm]
    }


def train(run: Run) -> Outcome:
    """Train in this process until the score or the limit."""
    config = merged(config_of(run.task, run.algorithm))
    method = METHODS[run.algorithm][run.method]
    data, model = config["data"], config["model"]["init_args"] | method.model
    # No bit depends on these; a pool of processes would be slower.
    data |= {"num_actors": 0, "envs_per_executor": data["num_envs"], "seed": run.seed}
    envs = GymEnvs(**data.pop("env")["init_args"])
    learner = method.learner or {"A2C": A2C, "PPO": PPO, "PQN": PQN}[config["model"]["class_path"]]
    ends = ReachesScore(run)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, limit_val_batches=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ends], **config["trainer"],
    )  # fmt: skip
    seed_everything(run.seed, verbose=False)
    trainer.fit(
        learner(**model),
        HTSDataModule(envs, **data | {"delay": method.delay, "evaluation_frames": None}),
    )
    return ends.outcome


def outcome_of(run: Run) -> tuple[Run, Outcome | str, float]:
    """Return what became of a run, or how it failed; and its minutes."""
    began_s = time.monotonic()
    try:
        outcome: Outcome | str = train(run)
    except Exception:
        outcome = traceback.format_exc()
    return run, outcome, (time.monotonic() - began_s) / 60


def prepare() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


def outcomes(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, Outcome | str, float]]:
    """Yield each run as it ends."""
    if jobs == 1:
        prepare()
        yield from map(outcome_of, runs)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(jobs, prepare) as pool:
        yield from pool.imap_unordered(outcome_of, runs)


def main() -> None:
    parser = options(__doc__, "CartPole's A2C for 2,000 frames")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--algorithms", nargs="+", choices=METHODS, default=list(METHODS))
    known = list(dict.fromkeys(name for methods in METHODS.values() for name in methods))
    parser.add_argument("--methods", nargs="+", choices=known, default=list(MAIN))
    parser.add_argument("--seeds", type=int, default=10, help="1 to this many")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    args = parser.parse_args()
    if args.quick:
        args.tasks, args.algorithms, args.seeds = ["CartPole"], ["a2c"], 1
    args.output.mkdir(parents=True, exist_ok=True)
    name = "delay_quick" if args.quick else "delay"
    results = FinishedRuns(args.output / f"{name}.csv", Run, Outcome)
    about = machine()
    wanted = [
        asked(task, algorithm, method, seed, quick=args.quick)
        for task, seed, algorithm in product(args.tasks, range(1, args.seeds + 1), args.algorithms)
        if (CONFIGS / f"{config_of(task, algorithm)}.yaml").exists()
        for method in METHODS[algorithm]
        if method in args.methods
    ]
    failed = False
    for run, outcome, minutes in outcomes([r for r in wanted if r not in results.runs], args.jobs):
        who = f"{run.task} {run.algorithm} {run.method} seed {run.seed}"
        if isinstance(outcome, str):
            print(f"{who}\n{outcome}", flush=True)
            failed = True
            continue
        results.add(run, [outcome])
        print(f"{who}: {whole(outcome.steps)} steps, {minutes:.1f} minutes", flush=True)
    steps = steps_of(results.runs, quick=args.quick)
    tables = [table(steps, "delay0"), *(overview(steps, each) for each in REFERENCES)]
    if set(args.tasks) != set(TASKS):
        named = {key: values for key, values in steps.items() if key[0] in args.tasks}
        tables.append(overview(named, "delay0"))
    document = "\n".join([about, *tables])
    print(document)
    (args.output / f"{name}.md").write_text(document)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
