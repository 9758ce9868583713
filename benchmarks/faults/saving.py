"""Checkpoints: cut off while they are written, or damaged afterwards."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from hts_torchrl import ConfigurationError, DurableCheckpointIO


def killed_while_saving(dice: random.Random) -> bool:
    """Kill a process that writes one checkpoint after the other; a whole one must be there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "last.ckpt")
        child = subprocess.Popen(
            [sys.executable, __file__, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        child.stdout.readline()  # the first one is there
        time.sleep(dice.uniform(0, 0.3))
        child.kill()
        written = [0, *map(int, child.stdout.read().split())][-1]
        child.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved = DurableCheckpointIO().load_checkpoint(path)
        return saved["number"] >= written and bool((saved["data"] == saved["number"]).all())


def damaged(kind: str, dice: random.Random) -> bool:
    """Damage the newest checkpoint; the one before must be read, and no code be run."""
    with tempfile.TemporaryDirectory() as folder:
        path, trap = Path(folder, "last.ckpt"), Path(folder, "trap")
        for number in range(2):
            DurableCheckpointIO().save_checkpoint(
                {"number": number, "data": torch.zeros(5000)}, path
            )
        content = bytearray(path.read_bytes())
        if kind == "bit flip":
            content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        elif kind == "truncation":
            content = content[: dice.randrange(len(content))]
        else:
            content = bytearray(pickle.dumps(Trap(str(trap))))
        path.write_bytes(content)
        if kind == "code, digest removed":
            path.with_name("last.ckpt.sha256").unlink()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                number = DurableCheckpointIO().load_checkpoint(path)["number"]
        except (ConfigurationError, pickle.UnpicklingError):
            number = 0 if kind == "code, digest removed" else -1
        return number == 0 and not trap.exists()


class Trap:
    """A pickle that makes a file when it is loaded as Python would."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def save_until_killed(path: str) -> None:
    for number in range(10**6):
        data = torch.full((500_000,), number)
        DurableCheckpointIO().save_checkpoint({"number": number, "data": data}, path)
        print(number, flush=True)


KINDS = ("bit flip", "truncation", "code", "code, digest removed")
ROWS = {
    "SIGKILL while saving: a whole file": (100, killed_while_saving),
    **{f"checkpoint damaged by {kind}: refused": (20, partial(damaged, kind)) for kind in KINDS},
}

if __name__ == "__main__":
    save_until_killed(sys.argv[1])
