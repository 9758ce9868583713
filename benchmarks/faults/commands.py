"""The command line as a process of its own, as a user starts it, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from processes import alive, soon

from hts_torchrl import DurableCheckpointIO

FIT = [sys.executable, "-u", "-m", "hts_torchrl.cli", "fit"]
# Two executors and an actor; each of its 32 frames is an update.
CARTPOLE = [
    "--data.env=GymEnvs",
    "--data.env.id=CartPole-v1",
    "--data.num_envs=4",
    "--data.envs_per_executor=2",
    "--data.frames_per_batch=32",
    "--data.evaluation_episodes=2",
    "--trainer.accelerator=cpu",
    "--trainer.log_every_n_steps=1",
    "--model=A2C",
]
LAST = Path("runs/run/version_0/checkpoints/last.ckpt")
RESUMED = Path("runs/resumed/version_0/checkpoints/last.ckpt")
_ENDED_S = 240.0
_GONE_S = 20.0


class Command:
    """A process in a folder and a session of its own; kills what is left of it when closed.

    Temporary files go to the folder ``tmp`` in ``folder``, so that any that stays is seen.
    """

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder = folder
        self._temporary = folder / "tmp"
        self._temporary.mkdir(exist_ok=True)
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                # Torch keeps a folder for what it compiles among the temporary files.
                env={
                    **os.environ,
                    "TMPDIR": str(self._temporary),
                    "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
                },
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                # A shell starts its background commands with Ctrl-C ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def trains(self) -> bool:
        """Whether a line of progress has told of training."""
        return "steps/s" in self._stdout.read_text()

    @property
    def errors(self) -> str:
        return self._stderr.read_text()

    def wait_until_it_trains(self) -> None:
        """Return when training has begun, or the process has ended."""
        while not self.trains and self.process.poll() is None:
            time.sleep(0.05)

    def send(self, number: int, *, to_all: bool = False) -> None:
        """Send a signal to the process alone, or, as a terminal does Ctrl-C, to its whole group."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if to_all else os.kill)(self.process.pid, number)

    def status(self) -> int | None:
        """Return the status that a shell would give once it has ended; None if it does not end."""
        try:
            status = self.process.wait(_ENDED_S)
        except subprocess.TimeoutExpired:
            return None
        return 128 - status if status < 0 else status

    def processes(self) -> list[int]:
        """Return the processes of its session that run."""
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return [pid for pid in pids if _session(pid) == self.process.pid and alive(pid)]

    def ends(self) -> bool:
        """Return whether all processes of its session end in time."""
        return soon(lambda: not self.processes(), _GONE_S)

    def leaves_nothing(self) -> bool:
        """Return whether they do, and no temporary file stays."""
        return self.ends() and not list(self._temporary.iterdir())


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


@cache
def undisturbed(*run: str) -> dict[str, Any]:
    """Return the last checkpoint of a whole run."""
    with tempfile.TemporaryDirectory() as folder, Command([*run], Path(folder)) as command:
        assert command.status() == 0, command.errors
        return DurableCheckpointIO().load_checkpoint(Path(folder, LAST))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two checkpoints have the same updates, weights and optimizer's state."""
    states = [each["optimizer_states"][0]["state"] for each in (one, other)]
    pairs = [(states[0][number], state) for number, state in states[1].items()]
    pairs.append((one["state_dict"], other["state_dict"]))
    return one["updates"] == other["updates"] and all(
        torch.equal(mine[name], tensor) for mine, theirs in pairs for name, tensor in theirs.items()
    )


def passed(outcome: dict[str, bool], what: str, errors: str) -> bool:
    """Return whether all of a trial is as it must be; else write what is not, and its errors."""
    wrong = [name for name, right in outcome.items() if not right]
    if wrong:
        sys.stderr.write(f"wrong: {wrong}; {what}\n{errors[-6000:]}\n")
    return not wrong
