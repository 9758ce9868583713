"""When a run is evaluated: environment frames in the Trainer's count of batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from hts_torchrl.errors import ConfigurationError, require
from hts_torchrl.training.trainer_limits import parts_of_round

if TYPE_CHECKING:
    from hts_torchrl.training.datamodule import HTSDataModule


def evaluation_interval(data: HTSDataModule, trainer: Trainer) -> int | None:
    """Return the batches between two evaluations, in whole rounds; None is the Trainer's own.

    Args:
        data: whose ``evaluation_frames`` asks for evaluations; it knows the batches of an epoch.
        trainer: whose ``val_check_interval`` may ask for them too, and is not changed.

    Raises:
        ConfigurationError: if both say when to evaluate, or the Trainer's does not fit.
    """
    # None where Lightning was given a time.
    given: int | float | None = getattr(trainer, "val_check_interval", None)
    frames, in_epoch = data.evaluation_frames, data.parts_per_epoch
    if frames is None:
        fits = not isinstance(given, int) or 1 <= given <= in_epoch
        require(fits, f"val_check_interval={given}", f"1 to {in_epoch} (parts of the run)")
        _refuse_within_rounds(trainer, given, in_epoch)
        return None
    if given != 1 or isinstance(given, int):
        told = "a time" if given is None else given
        raise ConfigurationError(
            f"val_check_interval={told} and evaluation_frames={frames}: both say when to "
            "evaluate; give one of them"
        )
    every, epochs = trainer.check_val_every_n_epoch or 1, trainer.max_epochs or 1
    if 0 < epochs < every:
        rank_zero_warn(
            f"check_val_every_n_epoch={every}: the run has {epochs} of max_epochs, so it is "
            f"never evaluated (evaluation_frames={frames})",
            stacklevel=2,
        )
    parts = max(1, round(frames / data.schedule.frames_per_round)) * parts_of_round(trainer)
    if parts > in_epoch:
        _refuse_within_rounds(trainer, given, in_epoch)
    return max(1, min(parts, in_epoch))


def _refuse_within_rounds(trainer: Trainer, given: float | None, in_epoch: int) -> None:
    """Refuse to score weights that no checkpoint of then would hold."""
    parts = parts_of_round(trainer)
    saves_whole_rounds = getattr(trainer.lightning_module, "publishes_weights", False)
    if not saves_whole_rounds or parts == 1 or not trainer.limit_val_batches:
        return
    if given is None:
        raise ConfigurationError(
            f"val_check_interval is a time, which may end within one of the {parts} parts of a "
            "round: give a multiple of them, or data.evaluation_frames"
        )
    batches = given if isinstance(given, int) else max(1, int(in_epoch * given))
    told, or_ = f"val_check_interval={given}", ", or data.evaluation_frames,"
    if batches == in_epoch:  # which is the end of an epoch
        told, or_ = f"limit_train_batches={trainer.limit_train_batches:g}", ""
    require(
        batches % parts == 0 or trainer.fast_dev_run,  # type: ignore[attr-defined]
        f"{told}: an evaluation after {batches} parts is within a round",
        f"a multiple of {parts} (parts of a round){or_}",
    )
