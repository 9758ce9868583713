"""Short trainings that leave nothing behind, for those who measure or compare."""

from __future__ import annotations

import copy
import logging
from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything

from hts_torchrl.config import Precision
from hts_torchrl.learner import Learner
from hts_torchrl.training.datamodule import HTSDataModule

IN_THIS_PROCESS: dict[str, Any] = {
    "num_actors": 0,
    **dict.fromkeys(("backend", "num_collectors", "backend_options")),
}
"""Settings of a data module that starts no process, on a Ray cluster neither."""


def data_of_short_fit(data: HTSDataModule, rounds: int, **changes: Any) -> HTSDataModule:  # noqa: ANN401
    """Return a data module of the same rounds, so many of them, that never evaluates."""
    devices = ("policy_device", "cudagraph_policy")
    own = ("collection", *devices, "normalize_observation", "normalize_reward")
    settings = vars(data.pool) | {name: getattr(data, name) for name in own}
    settings["total_frames"] = data.schedule.frames_per_round * rounds
    del settings["first_env"], settings["reward_discount"]  # no arguments of the constructor
    return HTSDataModule(data.env, **settings | changes)


def short_fit(
    learner: Learner,
    data: HTSDataModule,
    trainer: Trainer,
    *callbacks: Callback,
    precision: Precision | None = None,
) -> Learner:
    """Train a copy of a learner, without logs, checkpoints and evaluations; returns the copy.

    Lightning says nothing of it but warnings.

    Args:
        learner: which stays as it is.
        data: what it learns from.
        trainer: gives device, precision, gradient clipping and accumulation.
        callbacks: who watch, and may end it.
        precision: instead of the trainer's.
    """
    seed_everything(data.seed, verbose=False)
    learner, device = copy.deepcopy(learner), trainer.strategy.root_device
    log = logging.getLogger("lightning.pytorch")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        Trainer(
            accelerator=device.type, max_epochs=1,
            devices=1 if device.index is None else [device.index],  # the same GPU, not the first
            limit_val_batches=0, precision=precision or trainer.precision, logger=False,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=list(callbacks),
        ).fit(learner, datamodule=data)  # fmt: skip
    finally:
        log.setLevel(before)
    return learner
