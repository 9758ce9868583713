"""A long run: its memory, its descriptors, its processes and its speed stay as they are.

Run: python benchmarks/faults/soak.py [--minutes 30] [--only CartPole]
"""

from __future__ import annotations

import argparse
import csv
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from commands import FIT, LAST, Command

from hts_torchrl import DurableCheckpointIO

_CONFIGS = Path(__file__).parents[2] / "configs"
_ENDLESS = ["--data.total_frames=1000000000", "--data.evaluation_frames=null"]
TASKS = {
    "CartPole": [f"--config={_CONFIGS / 'cartpole_a2c.yaml'}"],
    "Breakout": [
        f"--config={_CONFIGS / 'atari/breakout_a2c.yaml'}",
        "--data.envs_per_executor=8",
    ],
}
_MINUTES = 30.0
_MOST_MB_AN_HOUR = 1.0
_LEAST_SPEED = 0.97
_EPISODES = 1000
_SAMPLE_S = 5.0


@dataclass(frozen=True)
class Sample:
    """What the processes of a run hold at one time."""

    at_s: float
    memory_mb: float
    """Resident, anonymous and shared memory; a page that several share counts once.

    Without mapped files: libraries weigh less as soon as another program has them, too.
    """
    descriptors: int
    processes: int


@dataclass(frozen=True)
class Course:
    """How a run went."""

    samples: list[Sample]
    """After warming up, for the first fifth of the run."""
    speed: float
    """Frames a minute in the last tenth, as a share of those in the second tenth."""
    episodes: int

    @property
    def mb_an_hour(self) -> float:
        """Slope of the straight line through the resident memory."""
        times_s = np.array([sample.at_s for sample in self.samples])
        memory_mb = np.array([sample.memory_mb for sample in self.samples])
        return float(np.polyfit(times_s / 3600, memory_mb, 1)[0])

    @property
    def growth(self) -> tuple[int, int]:
        """Descriptors and processes that came."""
        first, last = self.samples[0], self.samples[-1]
        return last.descriptors - first.descriptors, last.processes - first.processes

    def __str__(self) -> str:
        """Say all figures in one line."""
        first, last = self.samples[0], self.samples[-1]
        return (
            f"{self.episodes} episodes, memory {first.memory_mb:.1f} to {last.memory_mb:.1f} MB "
            f"({self.mb_an_hour:+.2f} MB/h), descriptors {self.growth[0]:+d}, "
            f"processes {self.growth[1]:+d}, speed of the last tenth {self.speed:.3f}"
        )


def run(task: str, minutes: float) -> Course:
    """Train for some minutes by the command line, and watch it from outside."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with Command([*FIT, *TASKS[task], "--name=run", *_ENDLESS], folder) as command:
            command.wait_until_it_trains()
            began_s, samples = time.monotonic(), []
            while (at_s := time.monotonic() - began_s) < 60 * minutes:
                samples.append(_sample(command, at_s))
                time.sleep(_SAMPLE_S)
            command.send(signal.SIGTERM)
            status = command.status()
            assert status == 128 + signal.SIGTERM, command.errors
        last = DurableCheckpointIO().load_checkpoint(folder / LAST)
        return Course(
            [sample for sample in samples if sample.at_s > 12 * minutes],
            _speed_of_last_tenth(folder / LAST.parents[1] / "metrics.csv"),
            last["callbacks"]["TrainingStatistics"]["episodes"],
        )


def _sample(command: Command, at_s: float) -> Sample:
    pids = command.processes()
    memory_kb = [_resident_kb(pid) for pid in pids]
    descriptors = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]
    return Sample(at_s, sum(memory_kb) / 1024, sum(descriptors), len(pids))


def _resident_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))


def _speed_of_last_tenth(log: Path) -> float:
    with log.open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/frames"]]
    minutes = np.array([float(row["train/minutes"]) for row in rows])
    frames = np.array([float(row["train/frames"]) for row in rows])
    tenths = np.interp(np.linspace(0, minutes[-1], 11), minutes, frames)
    return float(np.diff(tenths)[-1] / np.diff(tenths)[1])


def soaked(task: str, _: random.Random) -> bool:
    """Run for half an hour; nothing may grow, and nothing slow down."""
    course = run(task, _MINUTES)
    sys.stderr.write(f"{task}: {course}\n")
    return (
        course.episodes >= _EPISODES
        and course.mb_an_hour < _MOST_MB_AN_HOUR
        and course.growth == (0, 0)
        and course.speed >= _LEAST_SPEED
    )


ROWS: dict[str, tuple[int, Callable[[random.Random], bool]]] = {
    f"{task}, half an hour: memory, descriptors, processes, speed": (1, partial(soaked, task))
    for task in TASKS
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=_MINUTES)
    parser.add_argument("--only", choices=TASKS, nargs="+", default=list(TASKS))
    arguments = parser.parse_args()
    for task in arguments.only:
        print(f"{task}: {run(task, arguments.minutes)}", flush=True)
