"""A Ray cluster of several machines, all of them this one, and what is left of it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

_MARK = "HTS_TEST_CLUSTER"
_STORE_BYTES = 78_643_200
_GONE_S = 30.0


def marked(mark: str) -> dict[int, str]:
    """Command lines of living processes that a cluster has started, however indirectly, by pid."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().decode()
        except OSError:  # it has ended, or is another user's
            continue
    found.pop(os.getpid(), None)
    return {pid: command for pid, command in found.items() if command}


class Machines:
    """A cluster whose head has no place for rollout nodes.

    Args:
        mark: by which the processes of this cluster are known.
    """

    def __init__(self, mark: str) -> None:
        from ray.cluster_utils import Cluster  # noqa: PLC0415 - Ray may be missing

        self.mark = mark
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": _STORE_BYTES,
            },
        )
        self.address = self._cluster.address
        self._before: set[int] = set()

    def add(self, num_cpus: int, **resources: float) -> object:
        """Add a machine with places for so many rollout nodes."""
        return self._cluster.add_node(
            num_cpus=num_cpus, resources=resources, object_store_memory=_STORE_BYTES
        )

    def lose(self, machine: object) -> None:
        """Kill all processes of a machine."""
        self._cluster.remove_node(machine, allow_graceful=False)

    @contextmanager
    def cut_off(self, machine: Any) -> Iterator[None]:
        """Stop all processes of a machine, which then answers nobody, and let them go on."""
        stopped = [
            each.process.pid for of_kind in machine.all_processes.values() for each in of_kind
        ]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
            stopped += _children(pid)
        try:
            yield
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def rollout_processes(self) -> dict[int, str]:
        """Return the rollout nodes, and the processes that they have started."""
        words = ("ray::RolloutNode", "multiprocessing", "forkserver")
        found = marked(self.mark)
        return {pid: each for pid, each in found.items() if any(word in each for word in words)}

    def nothing_left(self) -> bool:
        """Whether all rollout nodes end, with all that they have started.

        Ray also has to know which machines are lost: it may place the next node on one of them.
        """
        self._cluster.wait_for_nodes(timeout=120)
        return _soon(lambda: not self.rollout_processes())

    def shutdown(self) -> None:
        """End all machines."""
        import ray  # noqa: PLC0415

        ray.shutdown()
        self._cluster.shutdown()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _soon(condition) -> bool:
    deadline = time.monotonic() + _GONE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


@contextmanager
def machines() -> Iterator[Machines]:
    """Yield a cluster in a folder of its own, and see to it that nothing is left."""
    # Sockets lie in it, whose paths are limited to about 100 characters.
    folder = tempfile.mkdtemp(prefix="hts", dir="/tmp")
    mark, stores = uuid.uuid4().hex, set(Path("/dev/shm").glob("plasma*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token to the home folder
        patch.setenv(_MARK, mark)
        patch.delenv("RAY_ADDRESS", raising=False)
        cluster = Machines(mark)
        try:
            yield cluster
        finally:
            cluster.shutdown()
    assert _soon(lambda: not marked(mark)), f"left behind: {marked(mark)}"
    shutil.rmtree(folder, ignore_errors=True)
    assert set(Path("/dev/shm").glob("plasma*")) <= stores
    assert not Path(folder).exists()
