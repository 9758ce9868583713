"""Frames, speed, episodes and waiting, in the progress bar and every logger."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Self

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from hts_torchrl.compat.lightning import logs_after_batch, set_callback_metrics
from hts_torchrl.compat.torch import of_all_ranks
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.training.round_slice import RoundSlice

_EPISODES = 100


class TrainingStatistics(Callback):
    """Logs the progress of the run, every ``log_every_n_steps`` of the Trainer.

    - ``train/frames``: environment steps of all ranks; ``train/minutes``: time of training
      without evaluation
    - ``episode/return`` (raw score), ``episode/length``: means over the last 100 finished games of
      all ranks
    - ``steps_per_second``: speed since the last logging; ``wait/...``: shares of that time in which
      executors, actors and the learner waited for each other. Evaluations are left out, with what
      came before them since the last logging, and with the round that was collected meanwhile
    - ``rendezvous/skew_ms``: mean time between the first and the last executor's end of a round
    - ``rendezvous/slowest_env``: first environment of the last executor in the latest round
    - ``eval/frames``, ``eval/minutes``: those of training at the time of an evaluation
    """

    def __init__(self) -> None:
        self.frames = 0
        self.episodes = 0
        self.evaluated_frames = 0
        """``frames`` at the last evaluation of this process."""
        self._returns: deque[float] = deque(maxlen=_EPISODES)
        self._lengths: deque[int] = deque(maxlen=_EPISODES)
        self._earlier_s = 0.0
        self._started_s: float | None = None
        self._rounds = 0
        self._counted_s = 0.0
        self._marks: dict[str, float] = {}
        """What was measured when the last speed was told, or soon after an evaluation."""
        self._evaluated_within_training = False

    @classmethod
    def of(cls, trainer: Trainer) -> Self:
        """Return the Trainer's callback of this kind.

        Raises:
            ConfigurationError: if it has none.
        """
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, cls):
                return callback
        raise ConfigurationError("the Trainer needs the callback TrainingStatistics")

    @property
    def minutes(self) -> float:
        """Minutes of training so far, without evaluation."""
        running_s = 0.0 if self._started_s is None else time.monotonic() - self._started_s
        return (self._earlier_s + running_s) / 60

    @property
    def mean_return(self) -> float | None:
        """Mean raw score of the last 100 finished games; None before the first."""
        return sum(self._returns) / len(self._returns) if self._returns else None

    def _resume(self) -> None:
        if self._started_s is None:
            self._started_s = time.monotonic()

    def _pause(self) -> None:
        self._earlier_s = self.minutes * 60
        self._started_s = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock; what is measured from now on is compared with now."""
        self._counted_s = self._earlier_s
        self._marks = self._measured(trainer)
        self._resume()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._pause()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop the clock, which a further training starts again."""
        self._pause()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock: evaluation is no training."""
        self._evaluated_within_training = self._started_s is not None
        self._pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the clock run on."""
        if self._evaluated_within_training:
            self._resume()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log where in the run the evaluation stands; tell callbacks the games so far."""
        self.evaluated_frames = self.frames
        where: dict[str, Tensor | float] = {"eval/minutes": self.minutes}
        where["eval/frames"] = _exact(self.frames, trainer)
        pl_module.log_dict(where, sync_dist=True, reduce_fx="max")  # a mean may round the frames
        self._tell_callbacks(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: RoundSlice, *_: Any
    ) -> None:
        """Count the round's frames and games."""
        if batch.is_last:
            self._count(batch, trainer)
        if logs_after_batch(trainer):
            self._log(trainer, pl_module)

    def _count(self, part: RoundSlice, trainer: Trainer) -> None:
        self.frames += part.round.numel() * trainer.world_size
        self._rounds += 1
        self._counted_s = self.minutes * 60
        if self._evaluated_within_training:  # by now all have booked it, as work or as waiting
            self._evaluated_within_training, self._marks = False, self._measured(trainer)
        ended, scores, lengths = (  # step by step: a round may end more games than are kept
            torch.cat(of_all_ranks(part.round["next", name].contiguous())).transpose(0, 1)
            for name in ("episode_end", "episode_reward", "step_count")
        )
        if ended.any():
            self._returns.extend(scores[ended].tolist())
            self._lengths.extend(lengths[ended].tolist())
            self.episodes += int(ended.sum())
            self._tell_callbacks(trainer)

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        figures: dict[str, Tensor | float] = {"train/minutes": self.minutes}
        figures["train/frames"] = _exact(self.frames, trainer)
        games = self._of_games()
        bar = {"episode/return": games.pop("episode/return")} if games else {}
        figures |= games
        if self._rounds > self._marks["rounds"]:
            rates = self._rates(trainer)
            bar["steps_per_second"] = rates.pop("steps_per_second")
            figures |= rates
        pl_module.log_dict(figures)
        pl_module.log_dict(bar, prog_bar=True)

    def _tell_callbacks(self, trainer: Trainer) -> None:
        """Let callbacks that monitor a figure of the games see it now, logged before or not."""
        set_callback_metrics(trainer, {k: torch.tensor(v) for k, v in self._of_games().items()})

    def _of_games(self) -> dict[str, float]:
        """Return means over the last games; nothing before the first has ended."""
        if self.mean_return is None:
            return {}
        length = sum(self._lengths) / len(self._lengths)
        return {"episode/return": self.mean_return, "episode/length": length}

    def _measured(self, trainer: Trainer) -> dict[str, float]:
        """Return sums over all whole rounds so far, and what the collector has measured."""
        collector = getattr(getattr(trainer, "datamodule", None), "collector", None)
        pool = {} if collector is None else collector.stats()
        counted = {"frames": self.frames, "rounds": self._rounds, "seconds": self._counted_s}
        return {**pool, **counted}  # the collector's own frames are one round ahead

    def _rates(self, trainer: Trainer) -> dict[str, float]:
        """Return speed and shares of waiting over the whole rounds since the last call."""
        now = self._measured(trainer)
        since = {name: value - self._marks.get(name, 0.0) for name, value in now.items()}
        self._marks = now
        rates = {"steps_per_second": since["frames"] / since["seconds"]}
        for role in ("learner", "actors", "executors"):
            waited, worked = since.get(f"{role}_waiting_s", 0.0), since.get(f"{role}_busy_s", 0.0)
            if waited + worked > 0:
                rates[f"wait/{role}"] = waited / (waited + worked)
        if "slowest_env" in now:
            rates["rendezvous/skew_ms"] = 1e3 * since["rendezvous_skew_s"] / since["rounds"]
            rates["rendezvous/slowest_env"] = now["slowest_env"]
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return counters and the last games for the checkpoint."""
        return {
            "frames": self.frames,
            "episodes": self.episodes,
            "seconds": self.minutes * 60,
            "returns": list(self._returns),
            "lengths": list(self._lengths),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.frames, self.episodes = state_dict["frames"], state_dict["episodes"]
        self._earlier_s = state_dict["seconds"]
        self._returns = deque(state_dict.get("returns", []), _EPISODES)
        self._lengths = deque(state_dict.get("lengths", []), _EPISODES)


def _exact(frames: int, trainer: Trainer) -> Tensor:
    """Return frames as a figure to log: float32, which a plain number becomes, ends at 2**24."""
    device = trainer.strategy.root_device if trainer.world_size > 1 else "cpu"  # where ranks meet
    return torch.tensor(frames, dtype=torch.float64, device=device)
