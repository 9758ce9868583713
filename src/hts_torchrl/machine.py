"""What the machine holds, and what a container or a batch system lets a process use of it."""

from __future__ import annotations

import math
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from hts_torchrl.errors import ConfigurationError

_ROOT = Path("/")
# Of version 2, and of version 1; a folder has those of one.
_QUOTA_AND_PERIOD = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
_MEMORY = ("memory.max", "memory.limit_in_bytes")


def allowed_cores() -> float:
    """Return the cores on which this process may run, or the share of them that it may use."""
    shares = [float(len(os.sched_getaffinity(0)))]
    for group in _groups("cpu"):
        words = [word for name in _QUOTA_AND_PERIOD for word in _words(group / name)]
        if words and words[0] not in ("max", "-1"):
            shares.append(int(words[0]) / int(words[1]))
    return min(shares)


def allowed_memory() -> float:
    """Return the bytes of memory that this process may take; infinite without a limit."""
    limits = [math.inf]
    for group in _groups("memory"):
        words = [word for name in _MEMORY for word in _words(group / name)]
        limits += [float(word) for word in words if word != "max"]
    return min(limits)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and of those above it, whose limits count too.

    In a container the names of its own groups may be those of the host, which are not there: its
    group is then the uppermost.
    """
    own = _ROOT / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2, one group for all
            top = _ROOT / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = _ROOT / "sys/fs/cgroup" / controller
        else:
            continue
        group = Path(path).relative_to("/")
        yield from (top / each for each in (group, *group.parents))


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []


def require_memory(size: int, what: str, remedy: str) -> None:
    """Refuse bytes that machine or container can never hold; else the kernel would end the run."""
    whole, allowed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), allowed_memory()
    if size > min(whole, allowed):
        has = "the container may use" if allowed < whole else "the machine has"
        raise ConfigurationError(
            f"{what} {size / 1e9:.1f} GB, and {has} {min(whole, allowed) / 1e9:.1f} GB: {remedy}"
        )


def require_proc() -> Path:
    """Return the folder in which the kernel tells of this process.

    Raises:
        ConfigurationError: if there is none, as in a bare ``chroot``.
    """
    folder = _ROOT / "proc/self"
    if not folder.exists():
        raise ConfigurationError(
            "/proc is not mounted, and only it tells which workers run: mount -t proc proc /proc"
        )
    return folder


def require_descriptors(count: int, what: str) -> None:
    """Refuse what this process may not open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(list((require_proc() / "fd").iterdir())) + count
    if most != resource.RLIM_INFINITY and needed > most:
        raise ConfigurationError(
            f"{what} {needed} open files, and the limit is {most}: raise it (ulimit -n), or "
            "envs_per_executor"
        )


def process_limit() -> str:
    """Say what allows no further process or thread; the system tells only that there is a limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    own = "unlimited" if most == resource.RLIM_INFINITY else most
    return (
        f"the limit on processes and threads is reached (ulimit -u is {own}; a container may have "
        "a lower one): raise it, or envs_per_executor"
    )


def cpu_model() -> str:
    """Return the name of the processor's model, or the architecture where the kernel tells none."""
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
