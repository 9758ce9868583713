"""Rounds of a LightningModule that is no Learner: counted, seeded and published."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from hts_torchrl.rng import update_seed
from hts_torchrl.training.data_state import place_loops
from hts_torchrl.training.round_slice import RoundSlice
from hts_torchrl.training.trainer_limits import parts_of_round, warn_of_schedules


class WeightPublisher(Callback):
    """Publishes the weights of a module's ``policy`` after each of its rounds.

    The data module adds it for a module that does not do so itself, before the callbacks that save
    checkpoints: those then save between two rounds. The Trainer calls it for each part::

        on_train_batch_start(...)   # seeds what is drawn for the part: a resumed run draws the same
        module.training_step(part, index), the optimiser's step
        on_train_batch_end(...)     # after the last part: weights are published, updates += 1
    """

    def __init__(self) -> None:
        self.updates = 0
        """Rounds that the module has learned from, since the start of the run."""
        self.in_round = False
        """Whether a round has been learned from in part."""

    def on_load_checkpoint(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        checkpoint: dict[str, Any],
    ) -> None:
        """Go on in the middle of an epoch, where the run's end or its rounds are others now."""
        place_loops(trainer, checkpoint, parts_before=parts_of_round(trainer))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Warn of a schedule that does nothing."""
        warn_of_schedules(trainer)

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        batch: RoundSlice,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Seed torch's generators for the part."""
        self.in_round = True
        seed: int = trainer.datamodule.seed  # type: ignore[attr-defined]
        torch.manual_seed(update_seed(seed, self.updates, batch.index, trainer.global_rank))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401, ARG002
        batch: RoundSlice,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Publish the weights after the last part of a round."""
        if batch.is_last:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            data.collector.update_policy_weights_(pl_module.policy)
            self.updates += 1
            self.in_round = False
