"""Runs of several ranks: a signal is answered by all of them at the same round."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from hts_torchrl.compat.lightning import (
    answer_sigterm,
    put_back_at_end,
    requeue,
    requeue_signals,
)
from hts_torchrl.compat.processes import end_with
from hts_torchrl.errors import NotFiniteError
from hts_torchrl.training.round_slice import RoundSlice
from hts_torchrl.workers.process import is_running

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAUNCHER = "HTS_TORCHRL_LAUNCHER"


class StopTogether(Callback):
    """Records Ctrl-C and SIGTERM, and raises in all ranks at the start of the next round.

    If one rank left by itself, the others would wait for it forever, and a checkpoint needs all
    of them. At SLURM's signal to requeue (SIGUSR1) they save there as Lightning does, and train
    until SLURM ends the job. With one rank it does nothing. The data module adds it to a
    Trainer of several ranks that has none.

    Args:
        last: writes a checkpoint when all ranks end together, and only then.
    """

    def __init__(self, last: ModelCheckpoint | None = None) -> None:
        self._last = last
        self._noted: set[int] = set()
        self._answered: set[int] = set()
        self._before: dict[int, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to note signals, which reach the main thread only."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if trainer.world_size > 1 and stage == "fit" and in_main_thread:
            # Lightning's handlers broadcast and save, wherever in a collective the process is.
            answer_sigterm(trainer, self._note)
            numbers = [*_SIGNALS, *requeue_signals(trainer)]
            self._noted, self._answered = set(), set()
            self._before = {number: signal.signal(number, self._note) for number in numbers}

    def _note(self, number: int, _: FrameType | None) -> None:
        if _launcher_has_ended():  # and this rank may be where it waits for none of the others
            raise SystemExit(128 + number)
        if number in _SIGNALS and number not in self._noted:
            told = "%s: all ranks end at the start of the next round, after a running evaluation"
            _log.warning(told, signal.Signals(number).name)
        self._noted.add(number)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: RoundSlice, batch_idx: int
    ) -> None:
        """Ask at the start of a round whether a rank has been sent a signal."""
        if trainer.world_size == 1 or not batch.is_first:
            return
        open_one = max(self._noted - self._answered, default=0)
        noted = torch.tensor(open_one, device=trainer.strategy.root_device)
        number = int(trainer.strategy.reduce(noted, reduce_op="max"))
        if number in requeue_signals(trainer):
            self._answered.add(number)  # it may still be on its way to other ranks
            requeue(trainer, number)
        elif number:
            # Lightning kills the first rank of a host where another of it leaves with an error.
            raise Stopped(0 if trainer.local_rank else 128 + number)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Let all ranks save together, if all have come here; signals are no more noted then.

        Lightning calls no ``teardown`` after an exception.
        """
        if self._before:
            put_back_at_end(trainer, self._before)
        if isinstance(exception, Stopped | NotFiniteError):
            if self._last is not None:
                self._last.save_on_exception = True
        elif trainer.world_size > 1:  # one that fails alone would wait for the others to save
            for saving in trainer.checkpoint_callbacks:
                if isinstance(saving, ModelCheckpoint):
                    saving.save_on_exception = False

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put back what answered signals before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class Stopped(SIGTERMException):
    """All ranks end with this round, each with its exit status."""


def end_at_once(local_rank: int) -> None:
    """Let a signal end a rank that has yet to meet the others, and a rank end with its launcher.

    Ranks wait for each other in C++, where no handler of Python's runs, for half an hour.

    Args:
        local_rank: of this process; Lightning starts the others of a machine from rank 0.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if local_rank == 0:
        os.environ[_LAUNCHER] = str(os.getpid())  # for the ranks that it starts
    elif _LAUNCHER in os.environ:  # else torchrun or a cluster started it, and ends it
        end_with(int(os.environ[_LAUNCHER]))


def _launcher_has_ended() -> bool:
    # Its children are told before they have another parent, where it has several threads.
    launcher = os.environ.get(_LAUNCHER)
    return launcher is not None and not is_running(int(launcher))


def leave_together() -> None:
    """Close the process group, once all ranks have come to their end.

    Gloo's threads free tensors under Python's lock, and that aborts a process whose interpreter has
    ended (https://github.com/pytorch/pytorch/issues/190489).
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
