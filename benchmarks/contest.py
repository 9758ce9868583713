"""Programs that are measured side by side, each running only in its turns.

What a machine gives changes from minute to minute: its clock, its other guests. So all programs are
started and warmed up first, and stopped (SIGSTOP, all their processes). Then they take turns of a
few seconds, in an order that is reversed every time, and what is compared lies seconds apart.

A program counts its rounds by ``stopwatch.Stopwatch``, and a turn ends where a round does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import numpy as np
from stopwatch import NO_ROUNDS, ROUNDS_FILE

LIMIT_S = 600.0
END_S = 10.0
Name = TypeVar("Name", bound=Hashable)


class Turn(NamedTuple):
    """What a program did in a turn; the CPU is that of all its processes."""

    rounds: int
    seconds: float
    cpu_s: float


class Contestant:
    """A program that runs in a process group of its own, and is stopped but in its turns."""

    def __init__(self, command: Sequence[str | Path], folder: Path) -> None:
        self._errors, counter = folder / "errors", folder / "rounds"
        self._rounds = np.memmap(counter, np.int64, "w+", shape=1)
        self._rounds[0] = NO_ROUNDS
        environment = os.environ | {ROUNDS_FILE: str(counter), "TMPDIR": str(folder)}
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=errors,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        # Python's resource tracker outlives SIGTERM, and then removes the semaphores of the others.
        with suppress(ProcessLookupError):
            for number in (signal.SIGTERM, signal.SIGCONT):
                os.killpg(self._process.pid, number)
            ends_s = time.perf_counter() + END_S
            while time.perf_counter() < ends_s:
                self._process.poll()
                os.killpg(self._process.pid, 0)  # raises once nobody is left
                time.sleep(0.05)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def warm_up(self) -> None:
        began_s = time.perf_counter()
        while self._rounds[0] < 0:
            self._require_life(time.perf_counter() - began_s)
            time.sleep(0.01)
        os.killpg(self._process.pid, signal.SIGSTOP)

    def turn(self, seconds: float) -> Turn:
        """Run for at least so long, until a round ends."""
        first, used_s, began_s = int(self._rounds[0]), self._cpu_s(), time.perf_counter()
        os.killpg(self._process.pid, signal.SIGCONT)
        last = first
        while True:
            time.sleep(0.002)
            now_s, rounds = time.perf_counter() - began_s, int(self._rounds[0])
            if rounds != last and now_s >= seconds:
                break
            last = rounds
            self._require_life(now_s - seconds)
        os.killpg(self._process.pid, signal.SIGSTOP)
        return Turn(rounds - first, now_s, self._cpu_s() - used_s)

    def _require_life(self, waited_s: float) -> None:
        problem = "ended" if self._process.poll() is not None else f"made no round in {LIMIT_S:g} s"
        if problem == "ended" or waited_s > LIMIT_S:
            sys.exit(f"{self._process.args} {problem}\n{self._errors.read_text()[-3000:]}")

    def _cpu_s(self) -> float:
        """Return the seconds of CPU that the process group has used, in all threads."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self._process.pid:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def take_turns(
    commands: Mapping[Name, Sequence[str | Path]], turns: int, seconds: float
) -> dict[Name, list[Turn]]:
    """Start the programs, one after the other; returns what each did in each of its turns."""
    # Else they would stay behind, stopped.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    taken: dict[Name, list[Turn]] = {name: [] for name in commands}
    with ExitStack() as stack:
        contestants = {}
        for name, command in commands.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            contestants[name] = stack.enter_context(Contestant(command, folder))
            contestants[name].warm_up()
        order = list(contestants)
        for _ in range(turns):
            for name in order:
                taken[name].append(contestants[name].turn(seconds))
            order.reverse()
    return taken
