"""One of two ranks is killed; the others must end, and any number of ranks goes on."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from commands import CARTPOLE, FIT, LAST, Command

from hts_torchrl import DurableCheckpointIO

_UPDATES = 1000
RUN = [*FIT, *CARTPOLE, f"--data.total_frames={32 * _UPDATES}", "--model.gradient_chunks=2"]
# Several ranks save after evaluations.
_RANKS = ["--trainer.devices=2", "--trainer.strategy=ddp", "--data.evaluation_frames=1600"]
RESUMED = Path("runs/resumed/version_0/checkpoints/last.ckpt")


def killed_and_resumed(dice: random.Random) -> bool:
    """Kill a rank once there is a checkpoint; one rank goes on from it to the end."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with Command([*RUN, *_RANKS], folder) as command:
            while not (folder / LAST).exists() and command.process.poll() is None:
                time.sleep(0.05)
            time.sleep(dice.uniform(0, 2))
            ranks = [pid for pid in command.processes() if _is_rank(pid)]
            killed = dice.choice(ranks)
            os.kill(killed, signal.SIGKILL)
            status = command.status()
            outcome = {
                "ranks": len(ranks) == 2,
                "status": status not in (0, None),
                "left": _all_end(command),
            }
            first = killed == command.process.pid
            told = f"rank {0 if first else 1} of {len(ranks)}, status {status}\n{command.errors}"
        resume = [*RUN, "--name=resumed", f"--ckpt_path={folder / LAST}"]
        with Command(resume, folder) as command:
            outcome["resumed"] = command.status() == 0
            told += command.errors
        outcome["bits"] = outcome["resumed"] and same(weights(folder / RESUMED), undisturbed())
        wrong = [what for what, right in outcome.items() if not right]
        if wrong:
            sys.stderr.write(f"wrong: {wrong}; {told[-3000:]}\n")
        return not wrong


def _is_rank(pid: int) -> bool:
    try:
        return b"fit" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _all_end(command: Command) -> bool:
    deadline = time.monotonic() + 20
    while command.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not command.processes()


@cache
def undisturbed() -> dict[str, Any]:
    """The weights of a whole run of one rank."""
    with tempfile.TemporaryDirectory() as text, Command(RUN, Path(text)) as command:
        assert command.status() == 0, command.errors
        return weights(Path(text, LAST))


def weights(path: Path) -> dict[str, Any]:
    weights: dict[str, Any] = DurableCheckpointIO().load_checkpoint(path)["state_dict"]
    return weights


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


ROWS = {
    "SIGKILL of one of 2 ranks: the other ends, nothing left; 1 rank resumes with the bits of 1": (
        10,
        killed_and_resumed,
    ),
}
