"""The two checkpoints of a run: ``last.ckpt`` and, by the evaluations' score, ``best.ckpt``."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from hts_torchrl.compat.lightning import last_saved, save_if_anything_is_new


class LastCheckpoint(ModelCheckpoint):
    """Writes ``last.ckpt`` after each evaluation, and at the end of training if more was learned.

    A class of its own, so that a ``ModelCheckpoint`` of the user's can be saved beside it.

    Args:
        dirpath: folder; None is ``checkpoints`` in the Trainer's log directory.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        # Apart from the best: save_last writes no evaluation that is not the best so far.
        super().__init__(
            dirpath, filename="last", enable_version_counter=False, save_on_train_epoch_end=False
        )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what was learned since the last evaluation, however training ended."""
        # Not on_train_end, where WeightAveraging has put its averages in the weights' place.
        save_if_anything_is_new(self, trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save where an exception ends training, and keep the file's name."""
        super().on_exception(trainer, pl_module, exception)
        self.best_model_path = last_saved(self) or self.best_model_path


class BestCheckpoint(ModelCheckpoint):
    """Writes ``best.ckpt`` after each evaluation whose ``eval/score`` is the highest so far.

    Args:
        dirpath: folder; None is ``checkpoints`` in the Trainer's log directory.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        super().__init__(
            dirpath,
            filename="best",
            monitor="eval/score",
            mode="max",
            enable_version_counter=False,
            save_on_train_epoch_end=False,
        )
