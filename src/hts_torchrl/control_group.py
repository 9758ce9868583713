"""What a container, or a job of a batch system, may use of the machine: Linux's control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
# Of version 2, and of version 1; a folder has those of one.
_QUOTA_AND_PERIOD = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
_MEMORY = ("memory.max", "memory.limit_in_bytes")


def allowed_cores(root: Path = _ROOT) -> float:
    """Return the cores on which this process may run, or the share of them that it may use.

    Args:
        root: of the file system that is asked.
    """
    shares = [float(len(os.sched_getaffinity(0)))]
    for group in _groups(root, "cpu"):
        words = [word for name in _QUOTA_AND_PERIOD for word in _words(group / name)]
        if words and words[0] not in ("max", "-1"):
            shares.append(int(words[0]) / int(words[1]))
    return min(shares)


def allowed_memory(root: Path = _ROOT) -> float:
    """Return the bytes of memory that this process may take; infinite without a limit.

    Args:
        root: of the file system that is asked.
    """
    limits = [math.inf]
    for group in _groups(root, "memory"):
        words = [word for name in _MEMORY for word in _words(group / name)]
        limits += [float(word) for word in words if word != "max"]
    return min(limits)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and of those above it, whose limits count too.

    In a container the names of its own groups may be those of the host, which are not there: its
    group is then the uppermost.
    """
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2, one group for all
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = Path(path).relative_to("/")
        yield from (top / each for each in (group, *group.parents))


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []
