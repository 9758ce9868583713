"""A container's small /dev/shm, which holds less than the shared arrays of a run."""

from __future__ import annotations

import random
import tempfile
from functools import partial
from pathlib import Path

from commands import CARTPOLE, FIT, LAST, Command, passed

from hts_torchrl import DurableCheckpointIO

# Two storages of 64 * 40 frames, each with an observation of 28 kB and the next: 289 MB.
_PONG = [
    "--data.env=AtariEnvs",
    "--data.env.game=pong",
    "--data.num_envs=64",
    "--data.envs_per_executor=16",
    "--data.frames_per_batch=2560",
    "--data.evaluation_episodes=1",
    "--data.env.max_frames=2000",
    "--model=A2C",
    "--model.network=nips",
]
_RUNS = {
    "CartPole": [*CARTPOLE, "--data.total_frames=3200"],
    "Pong": [*_PONG, "--data.total_frames=7680"],
    "Pong, spawn": [*_PONG, "--data.total_frames=7680", "--data.start_method=spawn"],
}
_MOUNT = 'mount -t tmpfs -o size=64M tmpfs /dev/shm && exec "$@"'


def runs(name: str, _: random.Random) -> bool:
    """Train with 64 MB of /dev/shm, mounted for the run alone, which takes root."""
    command = ["unshare", "--mount", "sh", "-c", _MOUNT, "sh", *FIT, *_RUNS[name]]
    with tempfile.TemporaryDirectory() as folder, Command(command, Path(folder)) as fit:
        status = fit.status()
        return passed({"ends": status == 0}, f"{name}: status {status}", fit.errors) and bool(
            DurableCheckpointIO().load_checkpoint(Path(folder, LAST))["updates"]
        )


ROWS = {f"64 MB /dev/shm, {name}: runs": (1, partial(runs, name)) for name in _RUNS}
