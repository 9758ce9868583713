"""The picture of a run: score against steps and against minutes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure

from hts_torchrl.callbacks.statistics import TrainingStatistics
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.round_part import RoundPart

_TRAINING_POINTS = 500


@dataclass
class _Curve:
    frames: list[int]
    minutes: list[float]
    scores: list[float]

    def add(self, statistics: TrainingStatistics, score: float) -> None:
        self.frames.append(statistics.frames)
        self.minutes.append(statistics.minutes)
        self.scores.append(score)

    def thin(self, most: int) -> None:
        """Drop every other point once there are too many."""
        if len(self.frames) > most:
            for values in (self.frames, self.minutes, self.scores):
                del values[::2]


class LearningCurve(Callback):
    """Draws ``learning_curve.png`` into the log directory when training ends.

    It shows the mean raw score of the last 100 training games and each evaluation's score.
    """

    def __init__(self) -> None:
        self._training = _Curve([], [], [])
        self._evaluation = _Curve([], [], [])
        self.path: Path | None = None

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        outputs: Any,  # noqa: ANN401, ARG002
        batch: RoundPart,
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Add a point of training now and then."""
        statistics = _statistics(trainer)
        logs = trainer.global_step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        if batch.is_last and logs:
            score = statistics.mean_return
            if score is not None:
                self._training.add(statistics, score)
                self._training.thin(_TRAINING_POINTS)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Add a point of evaluation."""
        if trainer.sanity_checking or "eval/score" not in trainer.callback_metrics:
            return
        score = float(trainer.callback_metrics["eval/score"])
        self._evaluation.add(_statistics(trainer), score)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Draw the picture."""
        directory = trainer.log_dir  # which all ranks must ask for, or none
        if trainer.is_global_zero and directory is not None:
            self.path = Path(directory) / "learning_curve.png"
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._draw(self.path)

    def _draw(self, path: Path) -> None:
        figure = Figure(figsize=(10, 4), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, unit in zip(axes, ("frames", "minutes"), strict=True):
            axis.plot(
                getattr(self._training, unit), self._training.scores, label="training, last 100"
            )
            axis.plot(
                getattr(self._evaluation, unit), self._evaluation.scores, "o-", label="evaluation"
            )
            axis.set_xlabel("environment steps" if unit == "frames" else "minutes of training")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("score")
        axes[0].legend()
        figure.savefig(path, dpi=120)

    def state_dict(self) -> dict[str, Any]:
        """Return both curves for the checkpoint."""
        return {"training": vars(self._training), "evaluation": vars(self._evaluation)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on drawing where the checkpoint was taken."""
        self._training = _Curve(**state_dict["training"])
        self._evaluation = _Curve(**state_dict["evaluation"])


def _statistics(trainer: Trainer) -> TrainingStatistics:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, TrainingStatistics):
            return callback
    raise ConfigurationError("LearningCurve needs the callback TrainingStatistics beside it")
