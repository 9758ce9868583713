"""Collectors that are opened and closed, and what is left of them."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path

from processes import GONE_S, gone
from short_runs import make


def open_and_close(dice: random.Random) -> bool:
    """Close at a random rendezvous, or at a random moment between two; nothing may be left."""
    _open_once()
    before = _belongings()
    collector = make(num_actors=dice.choice([1, 2]))
    batches = iter(collector)
    for _ in range(dice.randrange(4)):
        next(batches)
    if dice.random() < 0.5:
        collector.start()
        time.sleep(dice.uniform(0, 0.01))  # while workers start, or in the middle of a round
    pids = [worker.pid for worker in multiprocessing.active_children()]
    began_s = time.monotonic()
    collector.shutdown()
    took_s = time.monotonic() - began_s
    del collector, batches
    gc.collect()
    return took_s <= GONE_S and gone(pids) and _belongings() == before


@cache
def _open_once() -> None:
    """Let the fork server, and what libraries keep, come first."""
    collector = make()
    next(iter(collector))
    collector.shutdown()
    del collector
    gc.collect()


def _belongings() -> tuple[Counter[str], int, set[Path]]:
    """Kinds of open descriptors, mappings of shared memory, temporary files."""
    kinds: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            kinds[str(link.readlink()).partition(":")[0]] += 1
    mappings = Path("/proc/self/maps").read_text().count("memfd:hts_torchrl")
    return kinds, mappings, set(Path(tempfile.gettempdir()).iterdir())


ROWS = {"open and close, half of them between rendezvous: nothing left": (200, open_and_close)}
