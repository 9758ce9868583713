"""Whether processes are gone, and in time."""

from __future__ import annotations

import time
from pathlib import Path

NAMED_S = GONE_S = 5.0


def gone(pids: list[int]) -> bool:
    """Return whether all processes end within the time they are given."""
    deadline = time.monotonic() + GONE_S
    while time.monotonic() < deadline:
        if not any(map(alive, pids)):
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    """Return whether a process runs, and has not ended and waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
