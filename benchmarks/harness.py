"""What the timing programs share: turns, stopwatch, fresh processes, spreads, and their output.

What a machine gives changes from minute to minute: its clock, its other guests. So all contestants
are started and warmed up first, each a program of its own, and stopped (SIGSTOP, with all their
processes). Then they take turns of a few seconds, in an order that is reversed every time, so that
the figures which are compared were measured seconds apart. A contestant counts its rounds with
:class:`Stopwatch`, and a turn ends where a round does.

Contestants from other environments import this file too, so it needs numpy and nothing else.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "src"))  # for programs without hts_torchrl

from hts_torchrl import keep_freed_memory
from hts_torchrl.machine import cpu_model

__all__ = ["keep_freed_memory"]  # every contestant calls it

CORES = len(os.sched_getaffinity(0))
AT_ONCE = max(1, CORES // 2)
"""Programs side by side, where nothing is timed."""
PASSIVE = ("env", "OMP_WAIT_POLICY=passive")
"""Before a command: its threads sleep while they wait, and leave their cores to others."""
OUTPUT = Path(__file__).parent / "output"
PACKAGES = ("torch", "torchrl", "tensordict", "ale-py", "gymnasium", "lightning", "numpy")
EMULATED_CPUS = ("Haswell", "EPYC-Rome")
"""Of QEMU: Intel and AMD with AVX2. On one without AVX (Nehalem) torch 2.13 does not start."""

_ROUNDS_FILE, _NO_ROUNDS = "BENCHMARK_ROUNDS", -(2**62)
_LIMIT_S, _END_S = 600.0, 10.0
Name = TypeVar("Name", bound=Hashable)
Command = Sequence[str | Path]


class Stopwatch:
    """Measures steps a second after 2400 steps of warm-up, and 2 updates.

    In a contest it counts rounds in a file, until the contest ends the program.
    """

    def __init__(self, frames_per_round: int, seconds: float) -> None:
        self.frames, self.seconds = frames_per_round, seconds
        self.rounds = -max(2, 2400 // frames_per_round)
        path = os.environ.get(_ROUNDS_FILE)
        self.counter = np.memmap(path, np.int64, "r+", shape=1) if path else None

    def round_ended(self) -> bool:
        """Count a round; returns whether enough were measured."""
        self.rounds += 1
        if self.counter is not None:
            self.counter[0] = self.rounds
            return False
        if self.rounds <= 0:
            self.began_s = time.perf_counter()
            return False
        seconds = time.perf_counter() - self.began_s
        self.steps_per_s = self.rounds * self.frames / seconds
        return seconds >= self.seconds


class Turn(NamedTuple):
    """What a contestant did in a turn; the CPU is that of all its processes."""

    rounds: int
    seconds: float
    cpu_s: float


class Failed(SystemExit):
    """A contestant ended, or did nothing for too long; ends this program if nobody catches it."""


class _Contestant:
    """A program in a session of its own, which runs in its turns and is stopped otherwise."""

    def __init__(self, command: Command, folder: Path) -> None:
        self._errors, counter = folder / "errors", folder / "rounds"
        self._rounds = np.memmap(counter, np.int64, "w+", shape=1)
        self._rounds[0] = _NO_ROUNDS
        environment = os.environ | {_ROUNDS_FILE: str(counter), "TMPDIR": str(folder)}
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=errors,
                start_new_session=True,
            )  # fmt: skip

    def end(self) -> None:
        end_session(self._process)

    def warm_up(self) -> None:
        began_s = time.perf_counter()
        while self._rounds[0] < 0:
            self._require_life(time.perf_counter() - began_s)
            time.sleep(0.01)
        self._signal(signal.SIGSTOP)

    def turn(self, seconds: float) -> Turn:
        """Run for at least so long, until a round ends."""
        first, used_s, began_s = int(self._rounds[0]), self._cpu_s(), time.perf_counter()
        self._signal(signal.SIGCONT)
        last = first
        while True:
            time.sleep(0.002)
            now_s, rounds = time.perf_counter() - began_s, int(self._rounds[0])
            if rounds != last and now_s >= seconds:
                break
            last = rounds
            self._require_life(now_s - seconds)
        self._signal(signal.SIGSTOP)
        return Turn(rounds - first, now_s, self._cpu_s() - used_s)

    def _require_life(self, waited_s: float) -> None:
        problem = "ended" if self._process.poll() is not None else f"had no round in {_LIMIT_S:g} s"
        if problem == "ended" or waited_s > _LIMIT_S:
            raise Failed(f"{self._process.args} {problem}\n{self._errors.read_text()[-3000:]}")

    def _signal(self, number: int) -> None:
        signal_session(self._process.pid, number)

    def _cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in in_session(self._process.pid))


def in_session(leader: int) -> list[int]:
    """Return all processes of a program in a session of its own: workers have their own groups."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if int(_fields(path)[3]) == leader:
                found.append(int(path.parent.name))
    return found


def signal_session(leader: int, number: int) -> None:
    """Send a signal to all processes of a session."""
    for pid in in_session(leader):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def end_session(leader: subprocess.Popen[Any]) -> None:
    """End a program with all its processes: ask, wait, kill."""
    # Python's resource tracker outlives SIGTERM, and then removes the semaphores of the others.
    for number in (signal.SIGTERM, signal.SIGCONT):
        signal_session(leader.pid, number)
    ends_s = time.perf_counter() + _END_S
    while in_session(leader.pid) and time.perf_counter() < ends_s:
        leader.poll()
        time.sleep(0.05)
    signal_session(leader.pid, signal.SIGKILL)
    leader.wait()


def run_to_end(
    command: Command, name: str, folder: Path, *, cwd: Path, limit_s: float, **variables: str
) -> str:
    """Run a program to its end, let none of its processes outlive that, and return its output.

    Temporary files, output and errors go to ``folder``; it finds the modules of this folder.

    Raises:
        RuntimeError: if it fails, or takes longer.
    """
    modules = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(modules)}
    output, errors = folder / "output", folder / "errors"
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(
            command, cwd=cwd, env=os.environ | own | variables, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
    try:
        process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{name} took more than {limit_s:g} s") from error
    finally:
        end_session(process)
    if process.returncode:
        text = errors.read_text()[-3000:]
        raise RuntimeError(f"{name} ended with status {process.returncode}\n{text}")
    return output.read_text()


def exit_at_sigterm() -> None:
    """Let SIGTERM end this process as an exception does: else it would leave others behind."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def take_turns(
    commands: Mapping[Name, Command],
    turns: int,
    seconds: float,
    failed: dict[Name, str] | None = None,
) -> dict[Name, list[Turn]]:
    """Start the programs, a few at once; returns what each did in each of its turns.

    One that does not start ends all, or goes to ``failed`` with its reason if that is given.
    """
    exit_at_sigterm()
    taken: dict[Name, list[Turn]] = {}
    with ExitStack() as stack:
        contestants: dict[Name, _Contestant] = {}
        names = list(commands)
        for few in (names[i : i + AT_ONCE] for i in range(0, len(names), AT_ONCE)):
            for name in few:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                contestants[name] = _Contestant(commands[name], folder)
                stack.callback(contestants[name].end)
            for name in few:
                try:
                    contestants[name].warm_up()
                except Failed as error:
                    if failed is None:
                        raise
                    failed[name] = str(error)
                    contestants[name].end()  # one that waits for ever would disturb the others
                else:
                    taken[name] = []
        order = list(taken)
        for _ in range(turns):
            for name in order:
                taken[name].append(contestants[name].turn(seconds))
            order.reverse()
    return taken


def in_fresh_process(
    program: str,
    child: Any,
    seconds: float = 300,
    *,
    emulator: Command = (),
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Run a program with ``--child`` and return its last line of output, which is JSON.

    Ends this process, with the end of the other's errors, if that one fails or takes longer.
    """
    python = [*emulator, sys.executable, program, "--child", json.dumps(child)]
    result = subprocess.run(
        ["timeout", f"{seconds:g}", *python], env=os.environ | (variables or {}),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if result.returncode:
        sys.exit(f"{child} ended with status {result.returncode}\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def cpu_us(call: Callable[[], object], seconds: float) -> float:
    """Return the microseconds of CPU that a call takes, after a tenth of the time."""
    for span_s in (0.1 * seconds, seconds):
        count, began_s = 0, time.process_time()
        while not count or time.process_time() - began_s < span_s:
            call()
            count += 1
    return 1e6 * (time.process_time() - began_s) / count


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has used in all threads, 0 if it has ended."""
    try:
        fields = _fields(Path(f"/proc/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _fields(stat: Path) -> list[str]:
    """Return what a ``stat`` file of Linux holds after the program's name."""
    return stat.read_text().rpartition(")")[2].split()


def number(value: float) -> str:
    """Return a figure with three digits, or all of them before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: Iterable[float]) -> str:
    """Return the median, with the smallest and the largest."""
    values = list(values)
    return f"{number(np.median(values))} ({number(min(values))} to {number(max(values))})"


def confidence(values: Iterable[float]) -> str:
    """Return the median and its 95 % interval (percentiles of 10,000 resamples' medians)."""
    values = np.asarray(list(values))
    resamples = np.random.default_rng(0).choice(values, (10_000, len(values)))
    low, high = np.percentile(np.median(resamples, axis=1), [2.5, 97.5])
    return f"{np.median(values):.2f} ({low:.2f} to {high:.2f})"


def machine() -> str:
    """Return the processor, how loaded it is, and the versions of what is measured."""
    versions = []
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    load = f"{CORES} cores, load {os.getloadavg()[0]:.1f} at the start"
    return f"{cpu_model()}, {load}\n{time.strftime('%Y-%m-%d')}, {', '.join(versions)}\n"


def options(doc: str, quick: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all timing programs have."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{quick}: does it run? no figures")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for what it writes")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return parser


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as a table."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    for row in rows:
        cells = (number(v) if isinstance(v, float) else str(v) for v in row.values())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows, and make the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
