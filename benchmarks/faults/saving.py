"""Checkpoints: cut off while they are written, or damaged afterwards."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hts_torchrl import CheckpointError, ConfigurationError, DurableCheckpointIO


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
        return _number(path) >= written


def killed_at(dice: random.Random) -> bool:
    """Kill a process at one of the file system's calls that saving makes; there are 20 or so."""
    with tempfile.TemporaryDirectory() as folder:
        path, call = Path(folder, "last.ckpt"), dice.randrange(25)
        child = subprocess.run(
            [sys.executable, __file__, str(path), str(call)], stdout=subprocess.PIPE, text=True
        )
        return child.returncode == -signal.SIGKILL and _number(path) in (0, 1)


def unwritable(why: str, dice: random.Random) -> bool:
    """Save where it cannot be done; the error says so, and the file before is there and whole."""
    with tempfile.TemporaryDirectory() as folder, _file_system(Path(folder), "size=16M"):
        path = Path(folder, "checkpoints", "last.ckpt")
        DurableCheckpointIO().save_checkpoint(_content(0), path)
        others = {file.name for file in path.parent.iterdir()}
        with _prevented(why, Path(folder), dice):
            try:
                DurableCheckpointIO().save_checkpoint(_content(1), path)
                error = ""
            except CheckpointError as refused:
                error = str(refused)
        expected = 1 if not error else 0
        told = f"cannot write the checkpoint {path}" in error
        # Whatever was half written has been cleared away.
        left = {file.name for file in path.parent.iterdir()} - others - {"last.ckpt.previous"}
        may_succeed = why == "a full disk"
        return _number(path) == expected and not left and (told or (may_succeed and not error))


@contextlib.contextmanager
def _prevented(why: str, folder: Path, dice: random.Random) -> Iterator[None]:
    if why == "a full disk":  # with nothing left, or anything up to enough for all but the digests
        free, needed = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize, 4_100_000
        left = dice.choice([0, dice.randrange(needed), needed - dice.randrange(100_000)])
        Path(folder, "filler").write_bytes(bytes(free - left))
        yield
    elif why == "a read-only disk":
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        yield
    else:  # root may write everywhere
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)


@contextlib.contextmanager
def _file_system(folder: Path, options: str) -> Iterator[None]:
    """Mount a small file system in memory, which takes root."""
    folder.chmod(0o755)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def _content(number: int) -> dict[str, Any]:
    return {"number": number, "data": torch.full((500_000,), number)}


def _number(path: Path) -> int:
    """Return the number in a checkpoint; fails if it does not fit the rest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = DurableCheckpointIO().load_checkpoint(path)
    assert (saved["data"] == saved["number"]).all()
    return int(saved["number"])


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
            path.with_name("last.ckpt.digests").unlink()
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
        DurableCheckpointIO().save_checkpoint(_content(number), path)
        print(number, flush=True)


def save_and_be_killed(path: str, call: int) -> None:
    """Save twice; at the given call of the second time, or at its end, kill this process."""
    DurableCheckpointIO().save_checkpoint(_content(0), path)
    calls = iter(range(10**6))

    def count(event: str, _: object) -> None:
        writes = event == "open" or event.startswith("os.")  # rename, link, remove, ...
        if writes and next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    DurableCheckpointIO().save_checkpoint(_content(1), path)
    os.kill(os.getpid(), signal.SIGKILL)


KINDS = ("bit flip", "truncation", "code", "code, digest removed")
ROWS = {
    "SIGKILL while saving: a whole file": (100, killed_while_saving),
    "SIGKILL at a call of the file system while saving: the same": (50, killed_at),
    **{
        f"saving to {why}: an error, the file before": (trials, partial(unwritable, why))
        for why, trials in (("a full disk", 30), ("a read-only disk", 10), ("a closed folder", 10))
    },
    **{f"checkpoint damaged by {kind}: refused": (20, partial(damaged, kind)) for kind in KINDS},
}

if __name__ == "__main__":
    save_until_killed(sys.argv[1]) if len(sys.argv) == 2 else save_and_be_killed(
        sys.argv[1], int(sys.argv[2])
    )
