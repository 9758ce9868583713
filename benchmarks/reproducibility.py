"""Who is reproducible: each system trained twice with one seed, and the first update that differs.

Run: python benchmarks/reproducibility.py [--quick] [--systems hts rllib] [--tasks cartpole]
         [--questions again load resume libraries]

A contestant (``reproducible/``) trains with 4 environments in rounds of 32 steps, one thread of
torch, and the settings that its documents recommend for reproducibility. After each update it
prints a SHA-256 digest of all its weights. Runs come one after another, each in fresh processes.

- *again*: two runs with one seed, or three where processes run side by side; with 1 worker and with
  4; and 4 workers and 1.
- *load*: a run next to a busy process, compared with one without it.
- *resume*: a run that was stopped after half its updates and went on from its own checkpoint in
  new processes, compared with one that was not stopped.
- *libraries*, of this project alone, with its serial twin: other threads, and other kernels of the
  numeric libraries, whose environment variables hide instruction sets from one library each. With
  ``--emulator qemu-x86_64`` it also trains on CPUs that QEMU emulates. ``--other FILE`` compares
  these runs with a ``reproducibility.csv`` of another machine.

Another seed must differ from the first update on, and each update must change the weights: else the
digests would tell nothing, and the exit status is 1. It is also 1 if a run fails.

Results are appended to ``reproducibility.csv`` in ``--output`` after each run, and a run that is
there is not repeated. ``reproducibility.md`` has the tables.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import throughput
from finished_runs import FinishedRuns
from harness import EMULATED_CPUS, exit_at_sigterm, machine, options, run_to_end
from reproducibility_report import (
    IDLE,
    LOADED,
    RESUMED,
    Run,
    Runs,
    Update,
    fault_of,
    machines_table,
    row,
    seeds_differ,
    table,
    variants_table,
)

from hts_torchrl.portable import VARIABLES

CONTESTANTS = Path(__file__).parent / "reproducible"


class System(NamedTuple):
    label: str
    program: str
    peer: str = ""
    """Its environment, of ``throughput.PEERS``; empty: this one."""
    is_timed: bool = False
    """Whether processes run side by side whose order nothing fixes: "same" could be luck."""


SYSTEMS = {
    "hts": System("hts_torchrl", "train_hts.py", is_timed=True),
    "torchrl_collector": System("TorchRL `Collector`", "train_torchrl.py"),
    "torchrl_sync": System("TorchRL `MultiCollector(sync)`", "train_torchrl.py"),
    "torchrl_async": System("TorchRL `MultiCollector(async)`", "train_torchrl.py", is_timed=True),
    "stable_baselines3": System("Stable-Baselines3", "train_sb3.py", "stable_baselines3"),
    "envpool": System("CleanRL-style on EnvPool", "train_envpool.py", "envpool"),
    "sheeprl": System("SheepRL", "train_sheeprl.py", "sheeprl"),
    "rllib": System("RLlib", "train_rllib.py", "rllib", is_timed=True),
    "sample_factory_serial": System(
        "Sample Factory, `serial_mode`", "train_sample_factory.py", "sample_factory"
    ),
    "sample_factory_async": System(
        "Sample Factory, asynchronous", "train_sample_factory.py", "sample_factory", is_timed=True
    ),
}
TASKS = ("cartpole", "breakout")
QUESTIONS = ("again", "load", "resume", "libraries")
WORKERS = (1, 4)
NO_AVX2 = "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ"
NUMPY_AVX512 = "AVX512F,AVX512CD,AVX512_SKX,AVX512_CLX,AVX512_CNL,AVX512_ICL,AVX512_SPR"
BASE = "threads=1"
FIXED = "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE"
"""The oldest kernels of all three libraries that compute for torch."""
VARIANTS = (
    BASE,
    "threads=2",
    "ATEN_CPU_CAPABILITY=avx2",
    "ATEN_CPU_CAPABILITY=default",
    "ONEDNN_MAX_CPU_ISA=AVX2",
    "ONEDNN_MAX_CPU_ISA=SSE41",
    "mkldnn=False",
    "MKL_ENABLE_INSTRUCTIONS=AVX2",
    "MKL_CBWR=AVX2",
    "MKL_CBWR=COMPATIBLE",
    f"GLIBC_TUNABLES={NO_AVX2}",
    f"NPY_DISABLE_CPU_FEATURES={NUMPY_AVX512}",
)
PORTABLE = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
"""What ``--portable`` sets."""


def further(base: str) -> tuple[str, ...]:
    """Return a base and settings beyond it, compared with it: does anything still change?"""
    settings = (
        *("threads=2", "MKL_ENABLE_INSTRUCTIONS=AVX2", f"GLIBC_TUNABLES={NO_AVX2}"),
        f"NPY_DISABLE_CPU_FEATURES={NUMPY_AVX512}",
    )
    return (base, *(f"{base} {setting}" for setting in settings))


LIBRARIES = {BASE: VARIANTS, FIXED: further(FIXED), PORTABLE: further(PORTABLE)}
"""What is trained, by what it is compared with."""
LIBRARY_UPDATES = 6
"""At most, of a run of *libraries*: on an emulated CPU each takes long."""
LIMIT_S = 1800


def variants(base: str, is_emulated: bool) -> list[str]:
    """Return the settings compared with ``base``, with an emulator also ``base`` on its CPUs."""
    prefix = f"{base} " if base != BASE else ""
    return [*LIBRARIES[base], *(f"{prefix}cpu={cpu}" for cpu in EMULATED_CPUS if is_emulated)]


def repeats(system: str, condition: str) -> int:
    """Return how often a system is trained with the same settings."""
    if condition != IDLE:
        return 1
    return 3 if SYSTEMS[system].is_timed else 2


def wanted_runs(args: argparse.Namespace) -> Iterator[Run]:
    """Yield all runs of the tables, first one task, then the other."""
    systems, questions, updates = args.systems, args.questions, args.updates
    is_emulated = bool(args.emulator)
    conditions = {IDLE: True, LOADED: "load" in questions, RESUMED: "resume" in questions}
    asked = [name for name, is_asked in conditions.items() if is_asked]
    for task in args.tasks:
        for system in systems if set(questions) - {"libraries"} else ():
            for condition in asked:
                for workers in WORKERS:
                    for repeat in range(1, repeats(system, condition) + 1):
                        yield Run(system, task, workers, 1, condition, "", repeat, updates)
            yield Run(system, task, WORKERS[0], 2, IDLE, "", 1, updates)
        if "libraries" in questions and "hts" in systems:
            for variant in chain(*(variants(base, is_emulated) for base in LIBRARIES)):
                yield Run("hts", task, 0, 1, IDLE, variant, 1, min(updates, LIBRARY_UPDATES))


@contextmanager
def beside_load(is_loaded: bool) -> Iterator[None]:
    """Keep a core busy meanwhile; which one is left to the system."""
    if not is_loaded:
        yield
        return
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def train(run: Run, emulator: str = "") -> list[Update]:
    """Train once, in one process or, to be resumed, in two; returns what it told.

    Raises:
        RuntimeError: if it fails, or what it told cannot be compared.
    """
    half = run.updates // 2
    parts = [(0, half), (half, run.updates)] if run.condition == RESUMED else [(0, run.updates)]
    told: dict[int, Update] = {}
    with tempfile.TemporaryDirectory() as folder, beside_load(run.condition == LOADED):
        for begins, ends in parts:
            text = part(run, begins, ends, Path(folder), emulator)
            told |= {update.update: update for update in updates_in(text)}
    updates = [told[number] for number in sorted(told) if number <= run.updates]
    if fault := fault_of(updates, run.updates):
        raise RuntimeError(f"{run}: {fault}")
    return updates


def part(run: Run, begins: int, ends: int, folder: Path, emulator: str) -> str:
    """Run a contestant from one update to another; returns its output."""
    system = SYSTEMS[run.system]
    pairs = dict(pair.split("=", 1) for pair in run.variant.split())
    cpu = pairs.pop("cpu", "")
    variables = {name: value for name, value in pairs.items() if name.isupper()}
    settings = {name: json.loads(pairs[name].lower()) for name in pairs.keys() - variables.keys()}
    asked = {
        "system": run.system, "task": run.task, "workers": run.workers, "seed": run.seed,
        "begins": begins, "ends": ends, "updates": run.updates, "folder": str(folder),
    } | settings  # fmt: skip
    prefix = [emulator, "-cpu", cpu] if cpu else []
    python = throughput.interpreter(system.peer)
    command = [*prefix, python, CONTESTANTS / system.program, json.dumps(asked)]
    return run_to_end(
        command, str(run), folder, cwd=folder, limit_s=LIMIT_S,
        PYTHONHASHSEED="0",  # the order of sets: Sample Factory's serial mode needs it
        **variables,
    )  # fmt: skip


def updates_in(text: str) -> list[Update]:
    """Return what a contestant told, whatever else it printed."""
    lines = re.finditer(r"^update (\d+) (\d+) ([0-9a-f]{64})$", text, re.MULTILINE)
    return [Update(int(line[1]), int(line[2]), line[3][:16]) for line in lines]


def of_length(results: FinishedRuns[Run, Update], updates: int) -> Runs:
    """Return the runs of so many updates; of libraries, of as many as these have then."""
    lengths = (updates, min(updates, LIBRARY_UPDATES))
    return {
        run: points
        for run, points in results.runs.items()
        if run.updates == lengths[bool(run.variant)]
    }


def report(runs: Runs, updates: int, others: FinishedRuns[Run, Update] | None) -> str:
    """Return the tables of all runs, and how another machine's compare."""
    labels = {name: system.label for name, system in SYSTEMS.items()}
    there = {run.variant for run in runs}
    text = [
        machine(),
        f"{updates} updates a run, of libraries {min(updates, LIBRARY_UPDATES)}; w: workers.\n",
        table(runs, labels, TASKS, WORKERS),
        "### hts_torchrl, libraries\n",
    ]
    for base in LIBRARIES:
        done = [variant for variant in variants(base, True) if variant in there]
        text += [f"Each compared with `{base}`.\n", variants_table(runs, done, TASKS, base)]
    if others is not None:
        compared = machines_table(runs, others.runs, TASKS)
        text += ["### hts_torchrl, on two machines\n", compared]
    return "\n".join(text)


def control(runs: Runs) -> list[str]:
    """Return of which systems and tasks two seeds have the same weights."""
    pairs = {(run.system, run.task) for run in runs if not run.variant}
    return [
        f"{system} on {task}: two seeds have the same weights, so a digest tells nothing"
        for system, task in sorted(pairs)
        if not seeds_differ(row(runs, system, task, WORKERS))
    ]


def main() -> None:
    parser = options(__doc__, "this project on CartPole, 4 updates, without load")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--updates", type=int, default=10, help="of a run; at least 2")
    parser.add_argument("--emulator", default="", help="QEMU's program of user mode, for libraries")
    parser.add_argument("--other", type=Path, help="reproducibility.csv of another machine")
    args: argparse.Namespace = parser.parse_args()
    if args.other and not args.other.is_file():
        parser.error(f"--other {args.other}: there is no such file")
    if args.quick:
        args.systems, args.tasks, args.updates = ["hts"], ["cartpole"], 4
        args.questions = ["again", "resume"]
    if args.updates < 2:
        parser.error(f"--updates {args.updates}: a run is stopped in its middle; 2 or more")
    exit_at_sigterm()
    args.output.mkdir(parents=True, exist_ok=True)
    results = FinishedRuns(args.output / "reproducibility.csv", Run, Update)
    failures = 0
    for run in wanted_runs(args):
        if run in results.runs:
            continue
        try:
            results.add(run, train(run, args.emulator))
            print(f"{run}: {results.runs[run][-1].digest}", flush=True)
        except RuntimeError as error:
            failures += 1
            print(error, file=sys.stderr, flush=True)
    others = args.other and FinishedRuns(args.other, Run, Update)
    runs = of_length(results, args.updates)
    print(document := report(runs, args.updates, others))
    (args.output / "reproducibility.md").write_text(document)
    faults = control(runs)
    print("\n".join(faults), file=sys.stderr)
    sys.exit(bool(failures or faults))


if __name__ == "__main__":
    main()
