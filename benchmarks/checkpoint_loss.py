"""What is left of a checkpoint when the process that replaces it is killed: Lightning's way, ours.

Run: python benchmarks/checkpoint_loss.py [--trials 10]

A process writes a checkpoint and then another one in its place. It is killed (SIGKILL) while the
second is being written into the folder: when the file in place, or the new one beside it, has a
random share of its size. ``TMPDIR`` is on another file system than the folder, as it is where /tmp
is kept in memory.

Lightning's ``TorchCheckpointIO`` writes within an fsspec transaction: into a temporary file, which
is then moved. From another file system a move is a copy, and that begins by emptying the file in
place. *Lost* is a trial after which neither the old checkpoint nor the new one can be read.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from hts_torchrl import DurableCheckpointIO

KINDS = {"Lightning's TorchCheckpointIO": TorchCheckpointIO, "ours": DurableCheckpointIO}
NUMBERS = 50_000_000  # 200 MB


def save_twice(kind: str, path: str) -> None:
    for number in range(2):
        checkpoint = {"number": number, "data": torch.full((NUMBERS,), float(number))}
        KINDS[kind]().save_checkpoint(checkpoint, path)
        print(number, flush=True)


def is_lost(kind: str, path: Path) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved = KINDS[kind]().load_checkpoint(path)
        return not bool((saved["data"] == saved["number"]).all())
    except Exception:
        return True


def size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def killed_in_the_move(kind: str, elsewhere: str, dice: random.Random) -> bool:
    """Return whether both checkpoints are gone; tries again where the kill came too late."""
    while True:
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryDirectory(dir=elsewhere) as temporary,
        ):
            if Path(folder).stat().st_dev == Path(temporary).stat().st_dev:
                sys.exit(f"{folder} and {temporary} are on one file system: give --elsewhere")
            path = Path(folder, "last.ckpt")
            child = subprocess.Popen(
                [sys.executable, __file__, "--child", kind, str(path)],
                env=os.environ | {"TMPDIR": temporary}, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert child.stdout is not None
            child.stdout.readline()  # the first is there
            whole, share = size(path), dice.uniform(0, 0.9)
            written = [path, path.with_name(".last.ckpt.new")]
            while child.poll() is None:
                if any(share * whole <= size(file) < whole and file.exists() for file in written):
                    child.kill()
                    break
                time.sleep(0.0001)
            late = child.stdout.read() != ""
            child.wait()
            if not late:
                return is_lost(kind, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--elsewhere", default="/dev/shm", help="folder on another file system")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        save_twice(*args.child)
        return
    print("| saved by | killed in the move | lost |\n|---|---|---|")
    for kind in KINDS:
        trials = [
            killed_in_the_move(kind, args.elsewhere, random.Random(number))
            for number in range(args.trials)
        ]
        print(f"| {kind} | {len(trials)} | {sum(trials)} |", flush=True)


if __name__ == "__main__":
    main()
