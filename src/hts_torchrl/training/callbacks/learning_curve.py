"""The figure of a run: score against steps and against minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure

from hts_torchrl.durable_file import replacing
from hts_torchrl.training.callbacks.statistics import TrainingStatistics
from hts_torchrl.training.round_slice import RoundSlice

_TRAINING_POINTS = 500


class LearningCurve(Callback):
    """Draws ``learning_curve.png`` into the log directory when training ends.

    It shows the mean raw score of the last 100 training games and each evaluation's score. The
    Trainer also needs the callback :class:`TrainingStatistics`, from which it takes them.
    """

    def __init__(self) -> None:
        self._training = _no_points()
        self._evaluation = _no_points()
        self.path: Path | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RoundSlice, *_: Any
    ) -> None:
        """Add a point of training after each round in which the Trainer has logged."""
        statistics = TrainingStatistics.of(trainer)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        steps = batch.count // trainer.accumulate_grad_batches
        logs = batch.is_last and every > 0 and trainer.global_step % every < steps
        if logs and statistics.mean_return is not None:
            _add(self._training, statistics, statistics.mean_return)
            if len(self._training["scores"]) > _TRAINING_POINTS:
                for values in self._training.values():
                    del values[::2]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add a point of evaluation."""
        if trainer.sanity_checking or "eval/score" not in trainer.callback_metrics:
            return
        score = float(trainer.callback_metrics["eval/score"])
        _add(self._evaluation, TrainingStatistics.of(trainer), score)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the figure, if there is a point."""
        directory = trainer.log_dir  # which all ranks must ask for, or none
        has_points = self._training["scores"] or self._evaluation["scores"]
        if trainer.is_global_zero and directory is not None and has_points:
            path = Path(directory) / "learning_curve.png"
            with replacing(path) as new:
                self._draw(new)
            self.path = path

    def _draw(self, path: Path) -> None:
        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        training, games = self._training, self._evaluation
        for axis, unit, name in (
            (left, "frames", "environment steps"),
            (right, "minutes", "minutes of training"),
        ):
            axis.plot(training[unit], training["scores"], label="training, last 100")
            axis.plot(games[unit], games["scores"], "o-", label="evaluation")
            axis.set_xlabel(name)
            axis.grid(alpha=0.3)
        left.set_ylabel("score")
        left.legend()
        figure.savefig(path, format="png", dpi=120)

    def state_dict(self) -> dict[str, Any]:
        """Return both curves for the checkpoint."""
        return {"training": self._training, "evaluation": self._evaluation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on drawing where the checkpoint was taken."""
        self._training, self._evaluation = state_dict["training"], state_dict["evaluation"]


def _no_points() -> dict[str, list[float]]:
    return {"frames": [], "minutes": [], "scores": []}


def _add(curve: dict[str, list[float]], statistics: TrainingStatistics, score: float) -> None:
    curve["frames"].append(statistics.frames)
    curve["minutes"].append(statistics.minutes)
    curve["scores"].append(score)
