"""The Trainer as it was between two rounds: what a checkpoint of a round that was cut off holds."""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch import Trainer

from hts_torchrl.compat.lightning import FitLoop


class RoundStart:
    """Counts, optimisers and schedules at the start of a round.

    A round that is cut off is learned again from its start, and the Trainer must not have counted
    any of its parts by then. Optimisers are copied only if they step before the round's last part:
    else they have not moved.

    Args:
        trainer: between two of its batches.
        copy_optimizers: whether a round has several steps.
    """

    def __init__(self, trainer: Trainer, *, copy_optimizers: bool) -> None:
        self._global_step = trainer.global_step
        self._loop = trainer.fit_loop.state_dict()
        self._moving: dict[str, Any] = {}
        if copy_optimizers:
            states = [trainer.strategy.optimizer_state(each) for each in trainer.optimizers]
            schedules = [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]
            self._moving = copy.deepcopy({"optimizer_states": states, "lr_schedulers": schedules})

    def put_into(self, checkpoint: dict[str, Any]) -> None:
        """Replace what has moved since; a checkpoint of weights alone has no more than counts."""
        checkpoint["global_step"] = self._global_step
        FitLoop.replace(checkpoint, self._loop)
        checkpoint.update({k: v for k, v in self._moving.items() if k in checkpoint})
