"""Training throughput: this project compared with its peers, or with another checkout of itself.

Run: python benchmarks/throughput.py [--quick] [--tune] [--settings "trainer workers=2" ...]

A figure is environment steps a second of rollout *and* learning together, with the same network
and batch for all: A2C, or PPO with 4 epochs of 4 minibatches. Every contestant is a program of its
own; they take turns (``harness.py``), and ratios are taken within a turn.

``--games``: an Atari game; ``cartpole``, which has next to no work in environment and network, so
that everybody's overhead remains; ``football/SCENARIO`` or ``mujoco/ID`` with the settings of its
config, which are PPO's, by ``--algorithm ppo``.

``--tune`` measures settings of each row, this project's too: threads, workers, memory format, and
for TorchRL ``torch.compile`` of the update. The best four of each row take turns, and the fastest
of each are compared. ``--settings`` compares the given ones instead. Two questions for it:

- a barrier at every step, or the update between rounds: ``"trainer"``, ``"trainer delay=0"``,
  ``"trainer delay=0 step_barrier=True inference_batch=16"``;
- before and after a change: ``"trainer"``, ``"trainer source=/path/of/another/checkout/src"``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import (
    CORES,
    PASSIVE,
    confidence,
    machine,
    markdown,
    options,
    spread,
    take_turns,
    write_csv,
)


class Row(NamedTuple):
    """A contestant; ``peer`` is the environment of those who need their own."""

    label: str
    program: str
    games: str = "atari cartpole"
    algorithms: str = "a2c ppo"
    peer: str = ""
    overlaps: bool = False
    """Whether others act while it learns."""
    settings: str = ""
    """Which fields of ``Run`` its program reads, besides the task."""


TORCHRL, SAMPLE_FACTORY = "peer_torchrl.py", "peer_sample_factory.py"
_ACTS = "workers actors inference_batch"
_TORCHRL = "source main_threads compiled bf16 device policy_device cudagraph"
_MULTI = f"{_TORCHRL} emulator_threads workers worker_threads"
_SAMPLE_FACTORY = "workers double_buffered channels_last"
_OF_EVERY_ROW = ("variables", "here")
ROWS = {
    "trainer": Row(
        "hts_torchrl, Trainer", "trainer.py", "atari cartpole football mujoco", overlaps=True,
        settings=f"{_TORCHRL} {_ACTS} emulator_threads delay step_barrier cudagraph_loss "
        "gradient_chunks",
    ),
    "loop": Row(
        "hts_torchrl, TorchRL loop", TORCHRL, algorithms="a2c", overlaps=True,
        settings=f"{_TORCHRL} {_ACTS}",
    ),
    "collector": Row(
        "TorchRL Collector", TORCHRL, algorithms="a2c", settings=f"{_TORCHRL} emulator_threads"
    ),
    "sync": Row("TorchRL MultiCollector(sync)", TORCHRL, algorithms="a2c", settings=_MULTI),
    "async": Row(
        "TorchRL MultiCollector(async)", TORCHRL, algorithms="a2c", overlaps=True, settings=_MULTI
    ),
    "stable_baselines3": Row(
        "Stable-Baselines3",
        "peer_stable_baselines3.py",
        "atari cartpole mujoco box2d football",
        peer="stable_baselines3",
        settings="main_threads channels_last envs device",
    ),
    "envpool": Row(
        "CleanRL-style on EnvPool", "peer_envpool.py", peer="envpool",
        settings="main_threads emulator_threads channels_last device",
    ),
    "sample_factory": Row(
        "Sample Factory, synchronous", SAMPLE_FACTORY, "atari", "ppo", "sample_factory",
        settings=_SAMPLE_FACTORY,
    ),
    "sample_factory_async": Row(
        "Sample Factory, asynchronous", SAMPLE_FACTORY, "atari", "ppo", "sample_factory", True,
        settings=_SAMPLE_FACTORY,
    ),
}  # fmt: skip
PEERS = {
    "stable_baselines3": [
        "stable-baselines3>=2.7",
        "ale-py",
        "opencv-python-headless",
        "gymnasium[box2d,mujoco]",
        "envpool>=1.2.5",
    ],
    "envpool": ["envpool>=1.2.5"],
    "sample_factory": ["sample-factory>=2.1,<2.2", "gymnasium<1", "numpy<2", "ale-py<0.11"],
    "sheeprl": ["sheeprl>=0.8.4,<0.9", "ale-py>=0.12"],
    "rllib": ["ray[rllib]>=2.60,<2.61", "ale-py>=0.12", "opencv-python-headless"],
}
"""What each environment holds beside torch; the last two are of ``reproducibility.py``."""
FOLDER = Path(__file__).parent
FINALISTS, FINAL_TURNS = 4, 5


@dataclass(frozen=True)
class Run:
    """What is measured: one of ``ROWS``, the task (up to ``algorithm``), and how it is run."""

    system: str
    game: str
    num_envs: int
    steps: int
    seconds: float
    algorithm: str = "a2c"
    envs: str = "subproc"
    workers: int = 1
    actors: int = 1
    main_threads: int = 1
    inference_batch: int = 8
    worker_threads: int = 1
    emulator_threads: int = 1
    delay: int = 1
    step_barrier: bool = False
    gradient_chunks: int = 1
    channels_last: bool = True
    double_buffered: bool = False
    compiled: bool = False
    bf16: bool = False
    source: str = ""
    device: str = "cpu"
    """Of the learner, and of whoever acts unless ``policy_device`` says so."""
    policy_device: str = ""
    cudagraph: bool = False
    """Whether who acts replays its passes."""
    cudagraph_loss: bool = False
    """Whether A2C replays its loss and gradient."""
    variables: str = ""
    """Of its environment, as ``NAME=VALUE,NAME=VALUE``: settings of the numeric libraries."""
    here: bool = False
    """In this environment, though a peer has its own: for a machine without a network."""

    @property
    def frames(self) -> int:
        return self.num_envs * self.steps

    @property
    def name(self) -> str:
        return ROWS[self.system].label + ", bf16" * self.bf16

    @property
    def setting(self) -> str:
        values = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        return " ".join(f"{name}={value}" for name, value, usual in values[6:] if value != usual)


def kind_of(game: str) -> str:
    """Return ``cartpole``, ``football``, ``mujoco``, ``box2d`` or ``atari``."""
    kind = game.partition("/")[0]
    return kind if kind in ("cartpole", "football", "mujoco", "box2d") else "atari"


def candidates(system: str, task: Run) -> list[Run]:
    """Return what ``--tune`` measures for a row; the first is used without it."""
    threads = list(dict.fromkeys([min(2, CORES), 1, CORES]))
    workers = [count for count in (1, 2, 4, 8, 16, 32) if task.num_envs % count == 0]
    workers.sort(key=lambda count: abs(count - CORES))
    learner: dict[str, list] = {"main_threads": threads}
    native = learner | {"emulator_threads": threads}
    layouts = {"channels_last": [True, False]} if kind_of(task.game) == "atari" else {}
    batches = list(dict.fromkeys([min(8, task.num_envs), task.num_envs]))
    executors = {"workers": workers, "actors": [1] if CORES <= 2 else [1, 2]}
    executors |= {"main_threads": [1, 2], "inference_batch": batches}
    several = [count for count in workers if count < task.num_envs]
    samplers = [
        layouts | {"workers": several, "double_buffered": [True, False]},
        layouts | {"workers": [task.num_envs]},
    ]
    grids = {
        "collector": [native],
        "sync": [learner | {"worker_threads": [1, 2], "workers": workers}],
        "async": [native | {"workers": [1, 2], "main_threads": threads[::-1]}],
        "stable_baselines3": [learner | layouts | {"envs": ["subproc", "dummy"]}],
        "envpool": [native | layouts],
        "sample_factory": samplers,
        "sample_factory_async": samplers,
    }
    return [
        replace(task, system=system, **dict(zip(grid, values, strict=True)))
        for grid in grids.get(system, [executors])
        for values in product(*grid.values())
    ]


def given(text: str, task: Run) -> Run:
    """Return the run of ``system name=value ...``, as tables have it.

    Raises:
        ValueError: if a name or a value is none of ``Run``'s.
    """
    system, *pairs = text.split()
    kinds = {field.name: type(field.default) for field in fields(Run)[6:]}
    values = dict(pair.split("=", 1) for pair in pairs)
    known = system in ROWS and values.keys() <= kinds.keys()
    if not known or any(
        kinds[name] is bool and value not in ("True", "False") for name, value in values.items()
    ):
        raise ValueError(text)
    typed = {
        name: value == "True" if kinds[name] is bool else kinds[name](value)
        for name, value in values.items()
    }
    return replace(task, system=system, **typed)


def unread(run: Run) -> set[str]:
    """Return the settings of a run that its program does not read."""
    named = {pair.partition("=")[0] for pair in run.setting.split()}
    return named - {*ROWS[run.system].settings.split(), *_OF_EVERY_ROW}


def interpreter(peer: str) -> str:
    """Return the Python that a row runs with; a peer's environment is made here."""
    if not peer:
        return sys.executable
    folder = FOLDER / ".venvs" / peer
    python = str(folder / "bin" / "python")
    if not (folder / "complete").exists():
        print(f"making {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        packages = [f"torch=={version('torch').partition('+')[0]}", *PEERS[peer]]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "complete").touch()
    return python


def command(run: Run, **further: object) -> list[str | Path]:
    """Return what runs it; what is given further goes to its program too.

    Learner threads that spin while they wait for each other take the cores of all who act
    meanwhile, so they sleep, as those of ``hts-torchrl`` do. Where nobody acts during an update,
    they wait as OpenMP has it.
    """
    row = ROWS[run.system]
    prefix = list(PASSIVE if row.overlaps and run.delay else ("env",))
    if run.source:
        prefix.append(f"PYTHONPATH={run.source}")
    prefix += filter(None, run.variables.split(","))
    program = FOLDER / row.program
    python = sys.executable if run.here else interpreter(row.peer)
    return [*prefix, python, program, "--child", json.dumps(asdict(run) | further)]


def measure(run: Run) -> float:
    """Return steps a second, measured by itself in a fresh process; 0 if that fails."""
    result = subprocess.run(
        ["timeout", "900", *command(run)], capture_output=True, text=True, check=False
    )
    last = "0" if result.returncode else result.stdout.splitlines()[-1]
    speed, remark = float(last.split()[0]), last.partition(" ")[2]
    print(f"{speed:8.0f}  {run.name:31} {run.setting} {remark}", flush=True)
    print(result.stderr[-3000:] if result.returncode else "", file=sys.stderr, end="")
    return speed


def contest(
    runs: Sequence[Run], turns: int, seconds: float, failed: dict[Run, str] | None = None
) -> dict[Run, list[float]]:
    """Return the steps a second of each run in each of its turns."""
    taken = take_turns({run: command(run) for run in runs}, turns, seconds, failed)
    return {
        run: [turn.rounds * run.frames / turn.seconds for turn in each]
        for run, each in taken.items()
    }


def tune(system: str, task: Run) -> Run:
    """Return the fastest setting of a row.

    Each is measured by itself for as long as a turn, which is one glimpse of a machine that changes
    its speed; the best of them then take turns.
    """
    speeds = {run: measure(run) for run in candidates(system, task)}
    if ROWS[system].program == TORCHRL:
        compiled = replace(max(speeds, key=speeds.__getitem__), compiled=True)
        speeds[compiled] = measure(compiled)
    best = sorted(speeds, key=speeds.__getitem__)[-FINALISTS:]
    finalists = [run for run in best if speeds[run]]
    if not finalists:
        sys.exit(f"{ROWS[system].label}: no setting works, see above")
    finals = contest(finalists, FINAL_TURNS, task.seconds)
    return max(finals, key=lambda run: float(np.median(finals[run])))


def report(speeds: dict[Run, list[float]]) -> str:
    """Return a table; ratios are those of the first row to each, within a turn."""
    (first, base), *_ = speeds.items()
    task = f"{first.game}, {first.algorithm}, {first.num_envs} environments, {first.steps} steps"
    rows = [
        {
            "row": run.name,
            "steps/s": spread(values),
            "first row / this, 95 %": confidence(np.divide(base, values)),
            "setting": run.setting,
        }
        for run, values in speeds.items()
    ]
    return f"{task}, {len(base)} turns of {first.seconds:g} s\n\n{markdown(rows)}"


def chosen(task: Run, rows: Sequence[str], *, bf16: bool, tuned: bool) -> list[Run]:
    """Return a run of every row that can do the task, in its best setting or in its first."""
    kind = kind_of(task.game)
    able = [n for n in rows if kind in ROWS[n].games and task.algorithm in ROWS[n].algorithms]
    of_each = [(name, task) for name in able]
    if bf16 and kind in ("atari", "football"):
        of_each += [(name, replace(task, bf16=True)) for name in able if not ROWS[name].peer]
    return [tune(*row) if tuned else candidates(*row)[0] for row in of_each]


def main() -> None:
    parser = options(__doc__, "2 turns of 3 s")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--games", nargs="+", default=["breakout"])
    parser.add_argument("--algorithm", choices=["a2c", "ppo"], default="a2c")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--steps-per-round", type=int, nargs="+", default=[5])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4, help="of a turn")
    parser.add_argument("--tune", action="store_true", help="find each row's best setting first")
    parser.add_argument("--settings", nargs="+", metavar="'ROW NAME=VALUE ...'", default=[])
    parser.add_argument("--bf16", action="store_true", help="add bfloat16 rows")
    args = parser.parse_args()
    for game in args.games:
        if args.algorithm != "ppo" and kind_of(game) not in ("atari", "cartpole"):
            parser.error(f"--games {game}: the settings of its config are PPO's; --algorithm ppo")
    args.turns, args.seconds = (2, 3.0) if args.quick else (args.turns, args.seconds)
    text, speeds = [machine()], {}
    for game, steps in product(args.games, args.steps_per_round):
        task = Run("", game, args.num_envs, steps, args.seconds, args.algorithm)
        try:
            runs = [given(setting, task) for setting in args.settings]
        except ValueError as error:
            parser.error(f"--settings: {error}; such as 'trainer workers=2' is needed")
        runs = runs or chosen(task, args.rows, bf16=args.bf16, tuned=args.tune)
        if not runs:
            parser.error(f"none of the rows has {args.algorithm} on {game}")
        for run in runs:
            if names := unread(run):
                parser.error(f"--settings: {run.system} has no {min(names)}")
        if twice := [run for run in runs if runs.count(run) > 1]:
            parser.error(f"two rows are the same: {twice[0].system} {twice[0].setting}".rstrip())
        speeds |= contest(runs, args.turns, args.seconds)
        text.append(report({run: speeds[run] for run in runs}))
        print("\n", *text, sep="\n", flush=True)
    rows = [
        asdict(run) | {"steps_per_s": round(v, 1)} for run, each in speeds.items() for v in each
    ]
    write_csv(args.output / "throughput.csv", rows)
    (args.output / "throughput.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
