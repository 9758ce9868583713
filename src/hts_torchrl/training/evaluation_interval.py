"""When a run is evaluated: environment frames in the Trainer's count of batches."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from hts_torchrl.errors import ConfigurationError, require


class EvaluationInterval:
    """Sets how often a Trainer evaluates in a run, and gives its own interval back afterwards.

    Args:
        trainer: whose ``val_check_interval`` is read and set.
        parts_per_round: batches of which a round consists.
        in_epoch: batches of an epoch.
        whole_rounds: whether weights within a round are none that a checkpoint would hold.
    """

    def __init__(
        self, trainer: Trainer, *, parts_per_round: int, in_epoch: int, whole_rounds: bool
    ) -> None:
        self._trainer = trainer
        self._parts_per_round = parts_per_round
        self._in_epoch = in_epoch
        self._whole_rounds = whole_rounds
        self._replaced: float | None = None
        # None where Lightning was given a time.
        self._given: int | float | None = getattr(trainer, "val_check_interval", None)

    def set(self, frames: int | None, frames_per_round: int) -> None:
        """Evaluate after so many environment frames, in whole rounds.

        Args:
            frames: of ``evaluation_frames``; None leaves the Trainer's interval as it is.
            frames_per_round: of all environments.

        Raises:
            ConfigurationError: if both say when to evaluate, or the Trainer's does not fit.
        """
        given, in_epoch = self._given, self._in_epoch
        if frames is None:
            fits = not isinstance(given, int) or 1 <= given <= in_epoch
            require(fits, f"val_check_interval={given}", f"1 to {in_epoch} (parts of the run)")
            self._refuse_within_rounds()
            return
        if given != 1 or isinstance(given, int):
            told = "a time" if given is None else given
            raise ConfigurationError(
                f"val_check_interval={told} and evaluation_frames={frames}: both say when to "
                "evaluate; give one of them"
            )
        every, epochs = self._trainer.check_val_every_n_epoch or 1, self._trainer.max_epochs or 1
        if 0 < epochs < every:
            rank_zero_warn(
                f"check_val_every_n_epoch={every}: the run has {epochs} of max_epochs, so it is "
                f"never evaluated (evaluation_frames={frames})",
                stacklevel=2,
            )
        parts = max(1, round(frames / frames_per_round)) * self._parts_per_round
        if parts > in_epoch:
            self._refuse_within_rounds()
        self._replaced = given
        self._trainer.val_check_interval = max(1, min(parts, in_epoch))

    def _refuse_within_rounds(self) -> None:
        """Refuse to score weights that no checkpoint of then would hold."""
        parts, given, trainer = self._parts_per_round, self._given, self._trainer
        if not self._whole_rounds or parts == 1 or not trainer.limit_val_batches:
            return
        if given is None:
            raise ConfigurationError(
                f"val_check_interval is a time, which may end within one of the {parts} parts of a "
                "round: give a multiple of them, or data.evaluation_frames"
            )
        batches = given if isinstance(given, int) else max(1, int(self._in_epoch * given))
        told, or_ = f"val_check_interval={given}", ", or data.evaluation_frames,"
        if batches == self._in_epoch:  # which is the end of an epoch
            told, or_ = f"limit_train_batches={trainer.limit_train_batches:g}", ""
        require(
            batches % parts == 0 or trainer.fast_dev_run,  # type: ignore[attr-defined]
            f"{told}: an evaluation after {batches} parts is within a round",
            f"a multiple of {parts} (parts of a round){or_}",
        )

    def restore(self) -> None:
        """Leave the Trainer as it was, for its next run."""
        if self._replaced is not None:
            self._trainer.val_check_interval = self._replaced
            self._replaced = None
