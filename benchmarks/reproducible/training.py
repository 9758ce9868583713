"""What the contestants of ``reproducibility.py`` share: what is asked of them, and what they tell.

A contestant trains for some updates and prints a line after each, ``update 3 8996 4f2a...``: its
number, how many weights there are, and the SHA-256 digest of all of them. If its run is to end in
the middle, it saves its own checkpoint there; another process then goes on from it.

Contestants from other environments import this file too, so it needs numpy and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

NUM_ENVS, STEPS = 4, 32
FRAMES = NUM_ENVS * STEPS
EPOCHS, MINIBATCHES = 2, 2
"""Of PPO; the rest of its settings are the defaults of each system."""
GAMES = {"cartpole": "CartPole-v1", "breakout": "BreakoutNoFrameskip-v4"}


@dataclass(frozen=True)
class Training:
    """What a contestant is asked for."""

    system: str
    task: str
    workers: int
    seed: int
    begins: int
    """After which update its checkpoint was saved; 0: it starts anew."""
    ends: int
    updates: int
    folder: str
    """Where the checkpoint is."""
    threads: int = 1
    """Of torch in the learner."""
    mkldnn: bool = True

    @classmethod
    def asked_for(cls) -> Self:
        """Return what the command line says."""
        return cls(**json.loads(sys.argv[1]))

    @property
    def resumed(self) -> bool:
        return self.begins > 0

    @property
    def is_stopped(self) -> bool:
        return self.ends < self.updates

    @property
    def checkpoint(self) -> Path:
        return Path(self.folder, "checkpoint")

    @property
    def envs_per_worker(self) -> int:
        return NUM_ENVS // max(self.workers, 1)

    def seed_python_and_numpy(self) -> None:
        random.seed(self.seed)
        np.random.seed(self.seed)  # noqa: NPY002 - the generator that libraries draw from


def digest(weights: Iterable[tuple[str, Any]]) -> tuple[int, str]:
    """Return how many numbers there are, and SHA-256 over names, types, shapes and bytes.

    Args:
        weights: tensors or arrays, in any order.
    """
    sha, count = hashlib.sha256(), 0
    for name, value in sorted(weights, key=lambda item: item[0]):
        array = np.ascontiguousarray(value.detach().cpu() if hasattr(value, "detach") else value)
        sha.update(f"{name} {array.dtype} {array.shape}\n".encode())
        sha.update(array.tobytes())
        count += array.size
    return count, sha.hexdigest()


def tell(update: int, weights: Iterable[tuple[str, Any]]) -> None:
    """Print the digest of all weights after an update."""
    count, sha = digest(weights)
    print(f"\nupdate {update} {count} {sha}", flush=True)
