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
    OnExceptionCheckpoint,
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


def test_a_checkpoint_of_a_rank_that_fails_alone_is_refused_on_several(tmp_path):
    saves = {"callbacks": [OnExceptionCheckpoint(tmp_path)], "enable_checkpointing": True}
    require_supported(quiet_trainer(**saves))
    with pytest.raises(ConfigurationError, match=r"^callback OnExceptionCheckpoint on 2 ranks: "):
        require_supported(quiet_trainer(devices=2, strategy="ddp", **saves))


def test_a_second_task_of_a_trainer_with_one_rank_is_refused(monkeypatch):
    """As under torchrun or srun without devices: it would train the same again, without a log."""
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with pytest.raises(ConfigurationError, match=r"^rank 1 of several tasks .* devices"):
        require_supported(quiet_trainer())
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    require_supported(quiet_trainer())


@pytest.fixture
def task(monkeypatch):
    """Set the variables with which SLURM 22.05 starts one of two tasks of a node."""

    def start(number, **others):
        variables = {
            "NTASKS": 2, "NTASKS_PER_NODE": 2, "NNODES": 1, "JOB_NAME": "train", "JOB_ID": 7,
            "PROCID": number, "LOCALID": number, "NODEID": 0, "NODELIST": "n1", "STEP_ID": 0,
        }  # fmt: skip
        for name, value in {**variables, **others}.items():
            if value is None:
                monkeypatch.delenv(f"SLURM_{name}", raising=False)
            else:
                monkeypatch.setenv(f"SLURM_{name}", str(value))

    rank = rank_zero_only.rank
    yield start
    rank_zero_only.rank = rank


def two_ranks():
    return Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)


def test_tasks_of_slurm_are_ranks(task):
    for number in (0, 1):
        task(number)
        require_supported(two_ranks())


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NNODES": 2}, "You set `num_nodes=1` in Lightning, but the number of nodes"),
        ({"NTASKS_PER_NODE": 4}, "You set `devices=2` in Lightning, but the number of tasks"),
        ({"STEP_ID": None}, "2 ranks in a job of SLURM, and srun has not started this one: "),
        ({"JOB_NAME": "interactive", "PROCID": 1}, "task 1 of srun in a job named interactive: "),
    ],
)
def test_ranks_that_are_not_the_tasks_of_slurm_are_refused(variables, message, task):
    task(0, **variables)
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        require_supported(two_ranks())


@pytest.mark.usefixtures("task")
def test_ranks_that_are_not_those_of_torchrun_are_refused(monkeypatch):
    variables = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "TORCHELASTIC_RUN_ID": "one"}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigurationError, match="does not match the world size"):
        require_supported(two_ranks())
    monkeypatch.setenv("WORLD_SIZE", "2")
    require_supported(two_ranks())


@pytest.mark.usefixtures("task")
def test_a_rank_of_a_node_beyond_the_last_is_refused(monkeypatch):
    monkeypatch.setenv("NODE_RANK", "1")
    with pytest.raises(ConfigurationError, match=r"^rank 2 .* of 2, which .*: num_nodes and"):
        require_supported(two_ranks())


def test_lightnings_own_ranks_in_an_interactive_job_are_not_refused(task, monkeypatch):
    task(0, JOB_NAME="interactive")
    require_supported(two_ranks())  # from a shell, which is the first task
    task(1, JOB_NAME="interactive")
    monkeypatch.setenv("LOCAL_RANK", "1")  # as a user sets it
    require_supported(two_ranks())
