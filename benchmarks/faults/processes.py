"""Whether processes are gone, and in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

NAMED_S = GONE_S = 5.0


def soon(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition holds within some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def gone(pids: list[int]) -> bool:
    """Return whether all processes end within the time they are given."""
    return soon(lambda: not any(map(alive, pids)), GONE_S)


def alive(pid: int) -> bool:
    """Return whether a process runs, and has not ended and waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
