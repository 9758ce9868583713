"""One of two ranks is killed; the others must end, and any number of ranks goes on."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

from commands import CARTPOLE, FIT, LAST, RESUMED, Command, passed, same, undisturbed

from hts_torchrl import DurableCheckpointIO

_UPDATES = 1000
RUN = [*FIT, *CARTPOLE, f"--data.total_frames={32 * _UPDATES}", "--model.gradient_chunks=2"]
# Several ranks save after evaluations.
_RANKS = ["--trainer.devices=2", "--trainer.strategy=ddp", "--data.evaluation_frames=1600"]


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
                "left": command.ends(),
            }
            first = killed == command.process.pid
            what, errors = (
                f"rank {0 if first else 1} of {len(ranks)}, status {status}",
                command.errors,
            )
        resume = [*RUN, "--name=resumed", f"--ckpt_path={folder / LAST}"]
        with Command(resume, folder) as command:
            outcome["resumed"] = command.status() == 0
            errors += command.errors
        outcome["bits"] = outcome["resumed"] and has_the_bits_of_one_rank(folder)
        return passed(outcome, what, errors)


def has_the_bits_of_one_rank(folder: Path) -> bool:
    """Return whether the resumed run's end is that of a whole run of one rank."""
    resumed = DurableCheckpointIO().load_checkpoint(folder / RESUMED)
    return same(resumed, undisturbed(*RUN))


def _is_rank(pid: int) -> bool:
    try:
        return b"fit" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


ROWS = {
    "SIGKILL of one of 2 ranks: the other ends, nothing left; 1 rank resumes with the bits of 1": (
        10,
        killed_and_resumed,
    ),
}
