"""Ctrl-C and SIGTERM, at moments from the first import to the last line."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from commands import CARTPOLE, FIT, LAST, RESUMED, Command, passed, same, undisturbed

from hts_torchrl import ConfigurationError, DurableCheckpointIO

_SIGNALS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}
_UPDATES = 1000  # some seconds of training
_RUN = [*FIT, *CARTPOLE, f"--data.total_frames={32 * _UPDATES}", "--model.learning_rate_decay=true"]
_RANKS = ["--trainer.devices=2", "--trainer.strategy=ddp"]


def stopped(name: str, times: int, flags: list[str], dice: random.Random) -> bool:
    """Send a signal, once or twice; half of the time while the run starts.

    Ctrl-C reaches the whole group, as from a terminal, SIGTERM the process alone or, as from a
    scheduler, the whole group. Before training was seen to run there need be no checkpoint; after
    it there must be one.
    """
    number = _SIGNALS[name]
    with tempfile.TemporaryDirectory() as folder, Command([*_RUN, *flags], Path(folder)) as command:
        if dice.random() < 0.5:
            command.wait_until_it_trains()
        time.sleep(dice.uniform(0, 6))
        trained, to_all = command.trains, number == signal.SIGINT or dice.random() < 0.5
        for _ in range(times):
            command.send(number, to_all=to_all)
            time.sleep(dice.uniform(0, 0.5))
        status, updates = command.status(), _updates(Path(folder, LAST))
        outcome = {
            "status": status == 128 + number or (status == 0 and updates == _UPDATES),
            "tracebacks": command.errors.count("Traceback (most recent call last)") <= 1,
            "checkpoint": updates > 0 if trained else updates >= 0,
            "left": command.leaves_nothing(),
        }
        what = f"{name} {times}x {flags}, to all: {to_all}, trained: {trained}"
        return passed(outcome, f"{what}, status {status}, {updates} updates", command.errors)


def stopped_and_resumed(name: str, dice: random.Random) -> bool:
    """Stop a run in the middle and let it go on; its last weights are those of a whole one."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        while True:
            with Command(_RUN, folder) as command:
                command.wait_until_it_trains()
                time.sleep(dice.uniform(0, 2))
                command.send(_SIGNALS[name], to_all=True)
                command.status()
            stopped = folder / LAST
            if 0 < _updates(stopped) < _UPDATES:
                break
            shutil.rmtree(folder / "runs", ignore_errors=True)  # too early, or too late
        with Command([*_RUN, "--name=resumed", f"--ckpt_path={stopped}"], folder) as command:
            status = command.status()
        resumed = _loaded(folder / RESUMED)
        return status == 0 and resumed is not None and same(resumed, undisturbed(*_RUN))


def _updates(path: Path) -> int:
    """Return the updates in a checkpoint: 0 if there is none, -1 if it is not whole."""
    saved = _loaded(path) if path.exists() else {"updates": 0}
    return -1 if saved is None else int(saved["updates"])


def _loaded(path: Path) -> dict[str, Any] | None:
    try:
        return DurableCheckpointIO().load_checkpoint(path)
    except ConfigurationError:
        return None


ROWS = {
    **{
        f"{name}, {how}: exit status, checkpoint, nothing left": (
            10,
            partial(stopped, name, times, []),
        )
        for name in _SIGNALS
        for times, how in ((1, "once"), (2, "twice"))
    },
    **{
        f"{name} with 2 ranks: the same": (5, partial(stopped, name, 1, _RANKS))
        for name in _SIGNALS
    },
    **{
        f"{name}, then --ckpt_path: the bits of a whole run": (
            2,
            partial(stopped_and_resumed, name),
        )
        for name in _SIGNALS
    },
}
