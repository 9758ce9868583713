"""What the data module adds to a Trainer: a stop ends a round, and a round publishes weights."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, WeightAveraging
from torch import Tensor

from hts_torchrl.envs.own_generators import NUMPY, PYTHON
from hts_torchrl.errors import require
from hts_torchrl.policy.sampling import borrowed_generators
from hts_torchrl.rng import update_seed
from hts_torchrl.training.data_state import lost_averages, place_loops
from hts_torchrl.training.round_slice import RoundSlice
from hts_torchrl.training.run_settings import refuse
from hts_torchrl.training.trainer_limits import parts_of_round, warn_of_one_epoch


class StopAfterRound(Callback):
    """Lets the Trainer learn the rest of a round before it stops, on all ranks if one is to stop.

    ``max_time``, ``Timer`` and hooks of the user's set ``trainer.should_stop`` after any step.
    Lightning then evaluates, and checkpoints would have that score beside the weights of the
    round's start. The data module adds it, before the callbacks that save checkpoints.

    Args:
        min_epochs: the Trainer's own, which are changed within a round.
    """

    def __init__(self, min_epochs: int | None) -> None:
        self._asked = False
        self._min_epochs = min_epochs
        self._round_has_ended = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RoundSlice, *_: Any
    ) -> None:
        """Put a stop off to the end of the round."""
        self._asked |= trainer.should_stop
        self._round_has_ended = batch.is_last
        trainer.should_stop, trainer.fit_loop.min_epochs = False, sys.maxsize
        self._ask_all(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask again, as callbacks may have asked for a stop since."""
        self._ask_all(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask again, and heed EarlyStopping, which comes later and stops all ranks by itself."""
        self._ask_all(trainer)
        if self._round_has_ended and trainer.early_stopping_callbacks:
            trainer.fit_loop.min_epochs = self._min_epochs

    def _ask_all(self, trainer: Trainer) -> None:
        """Stop all ranks if one is to stop: one that leaves alone lets the others wait."""
        if not self._round_has_ended:
            return
        asked = self._asked or trainer.should_stop
        self._asked = trainer.strategy.reduce_boolean_decision(asked, all=False)
        trainer.should_stop = self._asked
        # The module's own hook, and callbacks that save, come later and may ask too. One of several
        # ranks may do so alone: they stop when all have been asked again.
        heeds = self._asked or trainer.world_size == 1
        trainer.fit_loop.min_epochs = self._min_epochs if heeds else sys.maxsize


class WeightPublisher(Callback):
    """Publishes the weights of a module's ``policy`` after each of its rounds.

    The data module adds it for a module that does not do so itself, before the callbacks that save
    checkpoints: those then save between two rounds. The Trainer calls it for each part::

        on_train_batch_start(...)   # seeds what is drawn for the part: a resumed run draws the same
        module.training_step(part, index)
        on_before_backward(...)     # on several ranks: seeds alike what is drawn by the step
        on_train_batch_end(...)     # after the last part: weights are published, updates += 1
    """

    def __init__(self) -> None:
        self.updates = 0
        """Rounds that the module has learned from, since the start of the run."""
        self.cut_off = False
        """Whether a checkpoint of now would lack the round's start: it was learned from in part."""
        self._part = self._backwards = 0
        """Where in a round the module is."""
        self._numpy = NUMPY.new()  # the user's may be one that cannot be seeded again
        self._at_end = contextlib.ExitStack()
        """Puts the global generators back."""

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on in the middle of an epoch, where the run's end or its rounds are others now."""
        if not trainer.datamodule.accept_changes:  # type: ignore[attr-defined]
            refuse(lost_averages(trainer, checkpoint))
        place_loops(trainer, checkpoint, parts_before=parts_of_round(trainer))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of what would act at the end of the run alone; keep the generators' states.

        Raises:
            ConfigurationError: for an optimiser with which a rank would wait for the others.
        """
        by_hand, ranks = not pl_module.automatic_optimization, trainer.world_size
        for each in trainer.optimizers:  # LBFGS ends a step when the loss, of each rank, says so
            fits = ranks == 1 or by_hand or not isinstance(each, torch.optim.LBFGS)
            require(fits, f"optimizer {type(each).__name__} on {ranks} ranks", "1")
        warn_of_one_epoch(trainer)
        self._at_end.enter_context(borrowed_generators(pl_module.device))
        for generator in (NUMPY, PYTHON):
            self._at_end.callback(generator.put, generator.state())

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the global generators be as they were before the run."""
        self._at_end.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Do so too where an exception ends it."""
        self._at_end.close()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: RoundSlice, batch_idx: int
    ) -> None:
        """Seed the global generators for the part, numpy's and Python's too."""
        self.cut_off = True
        self._part, self._backwards = batch.index, 0
        self._seed(trainer, trainer.global_rank)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Seed them alike on all ranks: what a noisy optimiser draws would part their weights."""
        if trainer.world_size > 1:
            self._backwards += 1
            self._seed(trainer, -self._backwards)

    def _seed(self, trainer: Trainer, rank: int) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        seed = update_seed(data.seed, self.updates, self._part, rank)
        NUMPY.put(self._numpy)
        for seed_one in (torch.manual_seed, NUMPY.seed, PYTHON.seed):
            seed_one(seed)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RoundSlice, *_: Any
    ) -> None:
        """Publish the weights after the last part of a round."""
        if batch.is_last:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            data.collector.update_policy_weights_(pl_module.policy)
            self.updates += 1
            self.cut_off = False


class UnswappedAverages(Callback):
    """Keeps weights and their averages each as what they are, also where an evaluation is cut off.

    ``WeightAveraging`` swaps the two while it evaluates the averages. A checkpoint that a signal
    asks for then would have the averages as the weights with which the run goes on, and after
    Ctrl-C the policy would have them. The data module adds it, after the callbacks that average.
    """

    def __init__(self) -> None:
        self._swapped = False

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the averages are in place."""
        self._swapped = True

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the weights are back."""
        self._swapped = False

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Put the weights back, before a callback saves them."""
        for each in trainer.callbacks if self._swapped else ():  # type: ignore[attr-defined]
            if isinstance(each, WeightAveraging):  # without what a subclass does at that time
                WeightAveraging.on_validation_epoch_end(each, trainer, pl_module)
        self._swapped = False

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Name the two by what they are."""
        averages = checkpoint.get("current_model_state")
        if self._swapped and averages is not None:
            checkpoint["current_model_state"] = checkpoint["state_dict"]
            checkpoint["state_dict"] = averages


_ADDED = StopAfterRound | WeightPublisher | UnswappedAverages


def place_callbacks(trainer: Trainer, *added: Callback) -> None:
    """Give a Trainer these, before those that save, instead of those of an earlier run."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    others = [e for e in callbacks if not isinstance(e, _ADDED)]
    saving = [each for each in others if isinstance(each, Checkpoint)]
    callbacks[:] = [*(each for each in others if each not in saving), *added, *saving]
