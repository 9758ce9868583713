"""Ranks of a run: all of them must train the same, and compute by the same versions."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.training.run_settings import changes, class_name, plain
from hts_torchrl.workers.rollout_node import NodeKind

_log = logging.getLogger(__name__)
_PROCESSOR = "processor"
_OF_EACH_RANK = (
    *("num_actors", "envs_per_executor", "step_barrier", "start_method", "timeout_s"),
    *("recover", "debug", "policy_device", "cudagraph_policy"),
)
"""Settings of the data module that may suit the machine of a rank."""
_OF_TRAINER = (
    *("max_epochs", "max_steps", "limit_train_batches", "limit_val_batches"),
    *("val_check_interval", "check_val_every_n_epoch", "log_every_n_steps"),
)
"""What decides when ranks wait for each other, beyond what a checkpoint keeps of the Trainer."""


def require_alike(trainer: Trainer, settings: Mapping[str, Any]) -> None:
    """Refuse ranks that were started with different things, and warn of other processors.

    Otherwise each would step its own weights in its own way, or they would wait for each other at
    different places. All ranks call this, and all of them refuse.

    Args:
        trainer: of this rank.
        settings: of the run, as a checkpoint keeps them.

    Raises:
        ConfigurationError: naming the first rank that differs from rank 0, and in what.
    """
    if _are_several(trainer):
        _compare(trainer, _given(trainer, settings))


def require_same_start(trainer: Trainer, updates: int) -> None:
    """Refuse ranks that have loaded different checkpoints: their nodes may have no common folder.

    Args:
        trainer: of this rank, when it has loaded one, or none.
        updates: that its policy has had.

    Raises:
        ConfigurationError: as in :func:`require_alike`.
    """
    if _are_several(trainer):
        _compare(trainer, {"updates in its checkpoint": updates, "steps": trainer.global_step})


def warn_of_other_weights(trainer: Trainer) -> None:
    """Warn where ranks no longer have the same weights; all ranks call this.

    Nothing else would tell: each averages its gradients with those of the others, and goes on.

    Args:
        trainer: whose module is about to be saved.
    """
    digest = hashlib.sha256()
    for parameter in trainer.lightning_module.parameters():
        if parameter.requires_grad:
            values = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(values.numpy().tobytes())
    ranks: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(ranks, digest.hexdigest())
    for rank, other in enumerate(ranks):
        if other != ranks[0]:
            rank_zero_warn(
                f"rank {rank} no longer has the weights of rank 0, and each goes on with its own: "
                "what steps them must be the same on all ranks, as a schedule's monitor is with "
                "log(..., sync_dist=True); processors of two kinds may differ, too",
                stacklevel=2,
            )
            return


def _are_several(trainer: Trainer) -> bool:
    """Return whether there are others to compare with; not where a data module is set up alone."""
    is_connected = torch.distributed.is_available() and torch.distributed.is_initialized()
    return trainer.world_size > 1 and is_connected


def _given(trainer: Trainer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank was started with, by the names that flags have."""
    module, kind = trainer.lightning_module, NodeKind.of_this_process()
    of_data = {name: v for name, v in settings["data"].items() if name not in _OF_EACH_RANK}
    of_trainer = {name: getattr(trainer, name, None) for name in _OF_TRAINER}
    saving = [type(each).__name__ for each in trainer.checkpoint_callbacks]  # all ranks save
    of_trainer["callbacks"] = ", ".join(saving) or "none that saves"
    arguments = plain(getattr(module, "hparams", {}))
    return {
        "hts_torchrl": kind.hts_torchrl,
        "torch": kind.torch,
        _PROCESSOR: kind.cpu,
        "portable": settings["portable"],
        "model": {"class_path": class_name(module), "init_args": arguments},
        **{f"data.{name}": value for name, value in of_data.items()},
        **{f"trainer.{n}": value for n, value in {**settings["trainer"], **of_trainer}.items()},
    }


def _compare(trainer: Trainer, own: dict[str, Any]) -> None:
    ranks: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(ranks, own)
    for rank, given in enumerate(ranks):
        for name, (first, value) in changes(ranks[0], given).items():
            if name != _PROCESSOR:
                raise ConfigurationError(
                    f"rank {rank} has {name}={value!r}, and rank 0 has {first!r}: start all ranks "
                    "by the same command, with the same files and versions"
                )
            if trainer.is_global_zero:
                _log.warning(
                    "rank %d computes on %s, and rank 0 on %s: the last bits of a pass may differ "
                    "between the two, and with them those of runs that place ranks otherwise",
                    *(rank, value, first),
                )
