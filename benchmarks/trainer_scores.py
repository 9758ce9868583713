"""This project's part of ``time_to_score.py --by training``: a callback of ``hts-torchrl fit``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from training_scores import TrainingScores

from hts_torchrl.training.callbacks.statistics import TrainingStatistics


class Scores(TrainingStatistics):
    """Notes the scores of training, and ends the Trainer's run at the last of them.

    It takes the place of the run's own statistics, which would count a round after it was asked.

    Workers are still being started when training starts. So the clock is set when the first round
    is there: it took what an actor has worked and waited by then. IMPALA's workers tell no such
    times, so their start is counted. The serial twin has none to start.

    Args:
        path: of the file that it writes.
        scores: that the table will have.
        max_minutes: of training.
    """

    def __init__(self, path: str, scores: list[float], max_minutes: float) -> None:
        super().__init__()
        self.scores = TrainingScores(path, scores, max_minutes)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.scores.begin()

    def on_train_batch_start(self, trainer: Trainer, _: object, part, index: int) -> None:
        data = trainer.datamodule
        stats = data.collector.stats() if index == 0 else {}
        if data.pool.num_actors and "actors_busy_s" in stats:
            rollout_s = stats["actors_busy_s"] + stats["actors_waiting_s"]
            self.scores.begin(rollout_s / data.pool.num_actors)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *others: Any
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, *others)
        if batch.is_last:
            games = self.state_dict()["returns"]
            trainer.should_stop |= self.scores.add(self.frames, games)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self.scores.end()
