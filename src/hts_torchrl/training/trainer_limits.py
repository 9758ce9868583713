"""What of a Trainer, its module and its ranks cannot work with rounds, and what would be right."""

from __future__ import annotations

import math
import os
import sys
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from hts_torchrl.compat.lightning import process_start_method
from hts_torchrl.errors import ConfigurationError, require, require_counts
from hts_torchrl.portable import is_portable
from hts_torchrl.training.round_slice import ONE_EPOCH

if TYPE_CHECKING:
    from hts_torchrl.training.datamodule import HTSDataModule

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


def require_fitting(data: HTSDataModule, trainer: Trainer) -> None:
    """Refuse a Trainer, or a module of it, that cannot work with a data module."""
    require_supported(trainer)
    _require_sound(trainer)
    if is_portable():
        _require_portable(data, trainer)
    _require_collection(data, trainer)
    _require_divided_rounds(trainer)
    _require_kept_statistics(data, trainer)


def require_supported(trainer: Trainer) -> None:
    """Refuse strategies, callbacks and ranks of Lightning that would spoil a training."""
    strategy = trainer.strategy
    known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
    if not known or isinstance(strategy, DeepSpeedStrategy):
        name = type(strategy).__name__
        raise ConfigurationError(
            f"strategy={name}: it divides the weights, which actors need whole; use ddp"
        )
    if (method := process_start_method(strategy)) is not None:
        raise ConfigurationError(
            f"strategy=ddp_{method}: it trains in processes that leave the "
            "caller with the weights of the start; use ddp"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _REFUSED.items():
            if isinstance(callback, kind):
                raise ConfigurationError(f"callback {type(callback).__name__}: {reason}")
        if isinstance(callback, OnExceptionCheckpoint) and trainer.world_size > 1:
            raise ConfigurationError(
                f"callback {type(callback).__name__} on {trainer.world_size} ranks: one that fails "
                "alone would wait for the others; use ModelCheckpoint(save_on_exception=True), "
                "which saves where all stop together"
            )
    rank = rank_zero_only.rank  # type: ignore[attr-defined]
    if rank > 0 and trainer.world_size == 1:  # Lightning would train here and log nothing
        raise ConfigurationError(
            f"rank {rank} of several tasks (RANK, LOCAL_RANK or SLURM_PROCID), and the Trainer has "
            "one rank: set its devices and num_nodes to the tasks, with strategy=ddp; for a run of "
            "its own start it without RANK, LOCAL_RANK, SLURM_PROCID and SLURM_NTASKS (env -u)"
        )
    if isinstance(strategy, DDPStrategy):
        _require_started_ranks(strategy.cluster_environment, trainer)


def _require_started_ranks(environment: ClusterEnvironment | None, trainer: Trainer) -> None:
    """Refuse ranks that would wait for others which nobody starts, and a run in each task."""
    if isinstance(environment, SLURMEnvironment | TorchElasticEnvironment):
        try:
            environment.validate_settings(trainer.num_devices, trainer.num_nodes)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
    if trainer.global_rank >= trainer.world_size:
        raise ConfigurationError(
            f"rank {trainer.global_rank} (NODE_RANK or LOCAL_RANK) of {trainer.world_size}, which "
            "would wait for others forever: num_nodes and devices must count all ranks"
        )
    if isinstance(environment, SLURMEnvironment):
        if trainer.world_size > 1 and "SLURM_STEP_ID" not in os.environ:
            raise ConfigurationError(
                f"{trainer.world_size} ranks in a job of SLURM, and srun has not started this one: "
                "it would wait for the others; put srun before the command"
            )
    elif isinstance(environment, LightningEnvironment):
        task = int(os.environ.get("SLURM_PROCID", "0"))
        if task and not environment.node_rank() and not environment.creates_processes_externally:
            raise ConfigurationError(
                f"task {task} of srun in a job named {os.environ.get('SLURM_JOB_NAME')}: Lightning "
                "starts all ranks in each task of such a job; give srun --job-name=train"
            )


def _require_portable(data: HTSDataModule, trainer: Trainer) -> None:
    """Refuse what has no portable kernels, and a processor on which libraries do not take them."""
    policy_device, compiles = data.policy_device, data.pool.compile_arguments is not None
    device, precision = trainer.strategy.root_device.type, trainer.precision
    require(device == "cpu", f"portable bits with accelerator={device}", "cpu")
    on_cpu = policy_device is None or torch.device(policy_device).type == "cpu"
    require(on_cpu, f"portable bits with policy_device={policy_device}", "cpu")
    require(precision == "32-true", f"portable bits with precision={precision}", "32-true")
    require(not compiles, "portable bits with compile_policy", "a policy that is not compiled")
    taken = torch.backends.cpu.get_cpu_capability()
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if taken != "AVX2" or not has_mkl:
        raise ConfigurationError(
            f"portable bits: an x86-64 processor with AVX2 is needed, and torch computes by {taken}"
        )


def _require_sound(trainer: Trainer) -> None:
    """Refuse settings with which Lightning would fail, or spoil the weights, in the first step."""
    logs_every = trainer.log_every_n_steps  # type: ignore[attr-defined]
    require(logs_every >= 0, f"log_every_n_steps={logs_every}", "0 (never) or more")
    require_counts(trainer, "accumulate_grad_batches", "check_val_every_n_epoch")
    reload = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    require(not reload, f"reload_dataloaders_every_n_epochs={reload}", "0")
    overfit = trainer.overfit_batches  # type: ignore[attr-defined]
    require(not overfit, f"overfit_batches={overfit}: no round comes again", "0")
    clip = trainer.gradient_clip_val
    sound = clip is None or 0 <= clip < math.inf
    require(sound, f"gradient_clip_val={clip}", "a finite number of 0 or more")


def parts_of_round(trainer: Trainer) -> int:
    """Return the batches of each round, as which the Trainer's module wants it.

    Raises:
        ConfigurationError: if that is no number of batches.
    """
    module = trainer.lightning_module
    parts = getattr(module, "parts_per_round", 1)
    counts = isinstance(parts, Integral) and int(parts) >= 1
    told = f"{type(module).__name__}.parts_per_round={parts!r}"
    require(counts, told, "a whole number of 1 or more")
    return int(parts)


def parts_of_epoch(trainer: Trainer, rounds: int) -> int:
    """Return the batches of each epoch of a Trainer.

    Raises:
        ConfigurationError: for epochs that are empty, end within a step, have no end, or are more
            than there are frames for.
    """
    parts_per_round, limit = parts_of_round(trainer), trainer.limit_train_batches
    parts = rounds * parts_per_round
    if parts > sys.maxsize:
        raise ConfigurationError(
            f"{rounds} rounds of {parts_per_round} minibatches are more than {sys.maxsize} steps: "
            "lower total_frames, epochs or minibatches"
        )
    in_epoch = min(parts, limit) if isinstance(limit, int) else int(parts * limit)
    if in_epoch < 1:
        raise ConfigurationError(f"limit_train_batches={limit:g}: no part of the run is left")
    several = trainer.accumulate_grad_batches
    require(
        in_epoch % several == 0 or trainer.fast_dev_run,  # type: ignore[attr-defined]
        f"limit_train_batches={limit:g} with accumulate_grad_batches={several}: {in_epoch} parts",
        f"a multiple of {several}",
    )
    epochs, steps = trainer.max_epochs or 0, trainer.max_steps
    if epochs == -1 and steps == -1:
        raise ConfigurationError(
            f"max_epochs=-1 (Lightning's own where max_time is given alone): {ONE_EPOCH}"
        )
    # A module that steps by itself may step several times a batch.
    counts = epochs == -1 and trainer.lightning_module.automatic_optimization
    if counts and steps * trainer.accumulate_grad_batches > parts:
        most = parts // trainer.accumulate_grad_batches
        raise ConfigurationError(f"max_steps={steps}, but the run has {most}: {ONE_EPOCH}")
    if epochs * in_epoch > parts:
        raise ConfigurationError(f"max_epochs={epochs}: {ONE_EPOCH}")
    return in_epoch


def evaluation_interval(data: HTSDataModule, trainer: Trainer) -> float | None:
    """Return the Trainer's interval between two evaluations, in whole rounds; None is its own.

    Args:
        data: whose ``evaluation_frames`` asks for evaluations; it knows the batches of an epoch.
        trainer: whose ``val_check_interval`` may ask for them too, and is not changed.

    Raises:
        ConfigurationError: if both say when to evaluate, or the Trainer's does not fit.
    """
    # None where Lightning was given a time.
    given: int | float | None = getattr(trainer, "val_check_interval", None)
    frames, in_epoch = data.evaluation_frames, data.parts_per_epoch
    if given is None and trainer.world_size > 1 and trainer.limit_val_batches:
        raise ConfigurationError(
            "val_check_interval is a time, which does not pass after the same batch on all ranks: "
            "give a number of batches, or data.evaluation_frames"
        )
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
    batches = min(parts, in_epoch)
    return batches if batches > 1 else 1 / in_epoch  # callbacks take 1 for 1.0, the whole epoch


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


def steps_of_run(trainer: Trainer, setting: str) -> int:
    """Return how many steps of the optimiser the run has, from its first to its last round.

    Raises:
        ConfigurationError: if the run has no end, as of data of the user's own.
    """
    steps = trainer.estimated_stepping_batches
    require(steps != math.inf, f"{setting} in a run without end", "an HTSDataModule")
    return max(1, int(steps))  # max_steps=0 trains nothing


def warn_of_one_epoch(trainer: Trainer) -> None:
    """Warn of a schedule, or of early stopping, that would act at the end of the run alone."""
    if (trainer.max_epochs or 1) > 1:
        return
    automatic = trainer.lightning_module.automatic_optimization
    for schedule in trainer.lr_scheduler_configs if automatic else ():
        if schedule.interval == "epoch":
            rank_zero_warn(
                f"the schedule {type(schedule.scheduler).__name__} steps once an epoch, and an "
                "epoch is the whole run, so the learning rate stays what it is: give "
                '{"scheduler": ..., "interval": "step"}',
                stacklevel=2,
            )
    if trainer.fast_dev_run or _is_evaluated_before_its_end(trainer):  # type: ignore[attr-defined]
        return
    limit = trainer.limit_val_batches
    remedy = "give data.evaluation_frames" if limit else f"leave limit_val_batches={limit} out"
    for stops in trainer.early_stopping_callbacks:
        rank_zero_warn(
            f"{type(stops).__name__}(monitor={stops.monitor!r}) looks after evaluations, and "
            f"there is none before the end of the run, so it stops nothing: {remedy}",
            stacklevel=2,
        )


def _is_evaluated_before_its_end(trainer: Trainer) -> bool:
    every: float | None = trainer.val_check_batch  # None where the Trainer was given a time
    return (
        trainer.enable_validation
        and (trainer.check_val_every_n_epoch or 1) == 1
        and (every is None or every < trainer.num_training_batches)
    )


def _require_divided_rounds(trainer: Trainer) -> None:
    """Refuse a module whose rounds would not end with a step of its optimiser."""
    module, parts_per_round = trainer.lightning_module, parts_of_round(trainer)
    several = trainer.accumulate_grad_batches
    if parts_per_round % several:
        raise ConfigurationError(
            f"accumulate_grad_batches={several} does not divide the {parts_per_round} parts of a "
            "round: gradients of two rounds would mix; let it divide "
            f"{type(module).__name__}.parts_per_round, or set 1"
        )
    if getattr(module, "publishes_weights", False) and not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__}: automatic_optimization=False; a Learner's round ends with "
            "the Trainer's own step: leave it True, or derive from LightningModule itself"
        )


def _require_kept_statistics(data: HTSDataModule, trainer: Trainer) -> None:
    """Refuse statistics that the module does not keep."""
    module = trainer.lightning_module
    for setting, attribute, keeper in (
        ("normalize_observation", "prepare_policy", "RoundModule"),
        ("normalize_reward", "reward_scale", "Learner"),
    ):
        if getattr(data, setting) and not hasattr(module, attribute):
            raise ConfigurationError(
                f"{setting}=true: a {type(module).__name__} keeps no statistics; a "
                f"hts_torchrl.{keeper} does"
            )
    if not data.normalize_reward and getattr(module, "reward_scale", None) is not None:
        raise ConfigurationError(
            "normalize_reward=false, but the learner was trained with scaled rewards and has their "
            "statistics: set true, or learner.reward_scale = None"
        )


def _require_collection(data: HTSDataModule, trainer: Trainer) -> None:
    """Refuse data of any age, and rollout nodes, where they cannot be used or were never tried."""
    setting, ranks, nodes = f"collection={data.collection}", trainer.world_size, data.pool.num_nodes
    if nodes:
        require(ranks == 1, f"backend=ray on {ranks} ranks", "1")
    if data.collection == "rounds":
        return
    if not getattr(trainer.lightning_module, "corrects_any_lag", False):
        raise ConfigurationError(f"{setting} needs a learner for data of any age: model=Impala")
    require(ranks == 1, f"{setting} on {ranks} ranks", "1")
    if nodes:
        raise ConfigurationError(
            f"backend=ray with {setting}: rollout nodes play rounds; leave one of the two out"
        )
    for name in ("policy_device", "cudagraph_policy"):
        if value := getattr(data, name):
            raise ConfigurationError(
                f"{setting}: its actors compute on the CPU; leave {name}={value} out"
            )
    if data.pool.compile_arguments is not None:
        raise ConfigurationError(
            f"{setting} compiles no policy: leave compile_policy out, or give collection=rounds"
        )
    if data.normalize_reward:
        raise ConfigurationError(
            f"{setting}: its batches have no discounted returns, by which normalize_reward "
            "scales; leave it out, or give collection=rounds"
        )
