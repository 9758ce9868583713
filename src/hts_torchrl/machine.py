"""What the machine holds, compared with what is wanted before any of it is taken."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path

from hts_torchrl.control_group import allowed_memory
from hts_torchrl.errors import ConfigurationError


def require_memory(size: int, what: str, remedy: str) -> None:
    """Refuse what machine or container can never hold; else the kernel would end the run.

    Args:
        size: in bytes.
        what: is to be held, with a verb.
        remedy: what would be right.

    Raises:
        ConfigurationError: naming both sizes.
    """
    whole, allowed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), allowed_memory()
    if size > min(whole, allowed):
        has = "the container may use" if allowed < whole else "the machine has"
        raise ConfigurationError(
            f"{what} {size / 1e9:.1f} GB, and {has} {min(whole, allowed) / 1e9:.1f} GB: {remedy}"
        )


def require_descriptors(count: int, what: str, remedy: str) -> None:
    """Refuse what this process may not open.

    Args:
        count: of descriptors, more than are open.
        what: is to be opened, with a verb.
        remedy: what would be right, besides a higher limit.

    Raises:
        ConfigurationError: naming the limit, and how to raise it.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(list(Path("/dev/fd").iterdir())) + count
    if most != resource.RLIM_INFINITY and needed > most:
        raise ConfigurationError(
            f"{what} {needed} open files, and the limit is {most}: raise it (ulimit -n), or "
            f"{remedy}"
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
