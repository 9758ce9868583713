"""Rounds of a LightningModule that is no Learner: counted, seeded and published."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

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

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.updates = 0
        """Rounds that the module has learned from, since the start of the run."""
        self.in_round = False
        """Whether a round has been learned from in part."""

    @classmethod
    def put_into(cls, trainer: Trainer, publisher: WeightPublisher | None) -> None:
        """Replace the Trainer's publisher of an earlier run, or take it away.

        Callbacks that save come last, as Lightning has them.
        """
        others = [each for each in _callbacks(trainer) if not isinstance(each, cls)]
        saving = [each for each in others if isinstance(each, Checkpoint)]
        first = [each for each in others if not isinstance(each, Checkpoint)]
        _callbacks(trainer)[:] = [*first, *([publisher] if publisher else []), *saving]

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
        torch.manual_seed(update_seed(self._seed, self.updates, batch.index, trainer.global_rank))

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


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
