"""Ranks of a run as processes of their own, started as a launcher such as torchrun would."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch

from hts_torchrl.training.callbacks.stop_together import leave_together

Target = Callable[..., None]


def run_ranks(world_size: int, target: Target, *arguments: Any, limit_s: float = 550) -> None:
    """Call ``target(*arguments)`` on each rank, and wait until all have ended well."""
    deadline = time.monotonic() + limit_s
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, port, target, arguments))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(max(0, deadline - time.monotonic()))
    for rank in ranks:
        rank.kill()
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * world_size


def _rank(rank: int, world_size: int, port: int, target: Target, arguments: tuple[Any]) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(world_size),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
    )
    target(*arguments)
    leave_together()
