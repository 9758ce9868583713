"""A Trainer that is asked to stop ends with a whole round."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from hts_torchrl.training.round_slice import RoundSlice


class StopAfterRound(Callback):
    """Lets the Trainer learn the rest of a round before it stops.

    ``max_time``, ``Timer`` and callbacks of the user's set ``trainer.should_stop`` after any step.
    Lightning then evaluates, and checkpoints would have that score beside the weights of the
    round's start. The data module adds it, before the callbacks that save checkpoints.
    """

    def __init__(self) -> None:
        self._asked = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RoundSlice, *_: Any
    ) -> None:
        """Put a stop off to the end of the round."""
        self._asked |= trainer.should_stop
        trainer.should_stop = self._asked and batch.is_last
