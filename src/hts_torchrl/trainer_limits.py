"""What of Lightning's Trainer cannot work with rounds, each with what would be right."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from hts_torchrl.errors import ConfigurationError

_REFUSED: dict[type[Callback], str] = {
    StochasticWeightAveraging: (
        "it averages between epochs, and an epoch is the whole run; WeightAveraging and "
        "EMAWeightAveraging average after steps"
    ),
    GradientAccumulationScheduler: (
        "it schedules by epochs, and an epoch is the whole run; set accumulate_grad_batches of the "
        "Trainer"
    ),
    BaseFinetuning: (
        "it unfreezes between epochs, and an epoch is the whole run; give a policy whose frozen "
        "parameters do not require a gradient"
    ),
    LearningRateFinder: (
        "it trains on rounds of the run before the run begins; compare learning rates by short runs"
    ),
    BatchSizeFinder: "a batch is a round; set frames_per_batch of the data module",
    ModelPruning: (
        "it replaces parameters, which actors take by their names; prune the policy after training"
    ),
}


def require_supported(trainer: Trainer) -> None:
    """Refuse strategies and callbacks of Lightning that would spoil a training.

    Raises:
        ConfigurationError: naming what cannot work, and what would.
    """
    strategy = trainer.strategy
    known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
    if not known or isinstance(strategy, DeepSpeedStrategy):
        name = type(strategy).__name__
        raise ConfigurationError(
            f"strategy={name}: it divides the weights, which actors need whole; use ddp"
        )
    if isinstance(strategy.launcher, _MultiProcessingLauncher):
        name = f"ddp_{strategy.launcher._start_method}"
        raise ConfigurationError(
            f"strategy={name}: it trains in processes that leave the "
            "caller with the weights of the start; use ddp"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _REFUSED.items():
            if isinstance(callback, kind):
                raise ConfigurationError(f"callback {type(callback).__name__}: {reason}")
