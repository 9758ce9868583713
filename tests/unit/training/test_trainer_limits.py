"""What of Lightning cannot work with rounds is refused before training, by its name."""

from types import SimpleNamespace

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import rank_zero_only

from hts_torchrl import A2C
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.training.trainer_limits import require_supported
from tests.fits import cartpole, quiet_trainer, watched_fit

REFUSED = {
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.01),
    "GradientAccumulationScheduler": lambda: GradientAccumulationScheduler({0: 2}),
    "LearningRateFinder": LearningRateFinder,
    "BatchSizeFinder": BatchSizeFinder,
    "ModelPruning": lambda: ModelPruning("l1_unstructured", amount=0.5),
    "BackboneFinetuning": BackboneFinetuning,
}


class Own(StochasticWeightAveraging):
    """A user's subclass of what is refused."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_callback_that_would_spoil_training_is_refused_by_name(name):
    with pytest.raises(ConfigurationError, match=f"^callback {name}: "):
        watched_fit(A2C(), cartpole(), callbacks=[REFUSED[name]()])


def test_so_is_a_subclass_of_the_users():
    with pytest.raises(ConfigurationError, match=r"^callback Own: .* WeightAveraging"):
        watched_fit(A2C(), cartpole(), callbacks=[Own(0.01)])


def test_so_is_the_search_for_a_learning_rate_of_the_tuner():
    trainer = quiet_trainer()
    with pytest.raises(ConfigurationError, match=r"^callback LearningRateFinder: "):
        Tuner(trainer).lr_find(A2C(), datamodule=cartpole())


@pytest.mark.parametrize("name", ["ddp_spawn", "ddp_fork"])
def test_a_strategy_that_leaves_the_caller_untrained_is_refused_by_name(name):
    trainer = Trainer(accelerator="cpu", devices=1, strategy=name, logger=False)
    with pytest.raises(ConfigurationError, match=f"^strategy={name}: .*use ddp"):
        require_supported(trainer)


@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy])
def test_a_strategy_that_divides_the_weights_is_refused_by_name(kind):
    # Their constructors want GPUs or packages.
    trainer = SimpleNamespace(strategy=kind.__new__(kind), callbacks=[])
    with pytest.raises(ConfigurationError, match=f"^strategy={kind.__name__}: .*use ddp"):
        require_supported(trainer)


def test_ddp_in_processes_of_its_own_and_other_callbacks_are_not_refused():
    settings = {"strategy": DDPStrategy(), "callbacks": [EarlyStopping("eval/score")]}
    require_supported(quiet_trainer(**settings))
    require_supported(quiet_trainer(callbacks=[EMAWeightAveraging()]))


def test_a_second_task_of_a_trainer_with_one_rank_is_refused(monkeypatch):
    """As under torchrun or srun without devices: it would train the same again, without a log."""
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with pytest.raises(ConfigurationError, match=r"^rank 1 of several tasks .* devices"):
        require_supported(quiet_trainer())
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    require_supported(quiet_trainer())
