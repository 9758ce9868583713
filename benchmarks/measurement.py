"""What the programs of this folder share: fresh processes, spreads, CPU times, the machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

CORES = len(os.sched_getaffinity(0))
PASSIVE = ("env", "OMP_WAIT_POLICY=passive")
"""Before a command: its threads sleep while they wait, and leave their cores to those who act."""


def child_of(program: str, child: Any) -> list[str]:
    """Return the command that runs a program with ``--child`` and its argument."""
    return [sys.executable, program, "--child", json.dumps(child)]


def in_fresh_process(program: str, child: Any, seconds: float = 300) -> Any:
    """Run a program with ``--child``, its argument and its last line of output in JSON.

    Ends this process, with the end of the other's errors, if that one fails or takes longer.
    """
    command = ["timeout", f"{seconds:g}", *child_of(program, child)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{child} ended with status {result.returncode}\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def spread(values: Iterable[float], form: str = ".0f") -> str:
    """Return the median, with the smallest and the largest."""
    values = list(values)
    return f"{np.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def confidence(values: Iterable[float], form: str = ".3f") -> str:
    """Return the median and its 95 % interval (percentiles of 10,000 resamples' medians)."""
    values = np.asarray(list(values))
    resamples = np.random.default_rng(0).choice(values, (10_000, len(values)))
    low, high = np.percentile(np.median(resamples, axis=1), [2.5, 97.5])
    return f"{np.median(values):{form}} ({low:{form}} to {high:{form}})"


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has used, of user and system, in all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def crew_cpu_s() -> float:
    """Return the seconds of CPU that this process and its workers have used."""
    workers = [process.pid for process in multiprocessing.active_children()]
    return sum(map(cpu_s, [os.getpid(), *workers]))


def machine() -> str:
    """Return the processor, how loaded it is, and the versions of what is measured."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    packages = ("torch", "torchrl", "tensordict", "ale-py", "gymnasium", "lightning", "numpy")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    load = f"{CORES} cores, load {os.getloadavg()[0]:.1f} at the start"
    return f"{model[1] if model else 'Unknown processor'}, {load}\n{versions}\n"
