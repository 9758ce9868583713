"""A run that goes on from a checkpoint: from which start of a round, and with what changed."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

import torch
from lightning.pytorch import Trainer

from hts_torchrl.compat.lightning import FitLoop
from hts_torchrl.compat.torch import set_last_rates
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.training import run_settings
from hts_torchrl.training.data_state import place_loops
from hts_torchrl.training.extended_hooks import is_of_the_user

_log = logging.getLogger(__name__)


class RoundStart:
    """The Trainer between two rounds: what a checkpoint of a round that was cut off holds of it.

    A round that is cut off is learned again from its start, and the Trainer must not have counted
    any of its parts by then. Optimisers are copied only if they step before the round's last part:
    else they have not moved.

    Args:
        trainer: between two of its batches.
        copy_optimizers: whether a round has several steps.
    """

    def __init__(self, trainer: Trainer, *, copy_optimizers: bool) -> None:
        self._global_step = trainer.global_step
        self._loop = trainer.fit_loop.state_dict()
        self._moving: dict[str, Any] = {}
        if copy_optimizers:
            states = [trainer.strategy.optimizer_state(each) for each in trainer.optimizers]
            schedules = [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]
            self._moving = copy.deepcopy({"optimizer_states": states, "lr_schedulers": schedules})

    def put_into(self, checkpoint: dict[str, Any]) -> None:
        """Replace what has moved since; a checkpoint of weights alone has no more than counts."""
        checkpoint["global_step"] = self._global_step
        FitLoop.replace(checkpoint, self._loop)
        checkpoint.update({k: v for k, v in self._moving.items() if k in checkpoint})


class Resumption:
    """What ``fit`` does with a checkpoint beyond loading it.

    One for each ``fit`` that goes on, in this order::

        made when the checkpoint is read      settings are compared
        place_loops()                         before the Trainer takes its counts and optimisers
        set_rates(...)                        when optimisers and schedules are there

    Args:
        trainer: of the ``fit``.
        checkpoint: whose settings are compared, and whose counts are changed in place.
        learner: what a checkpoint of the learner that goes on would have under ``learner``.

    Raises:
        ConfigurationError: for settings that decide bits and differ, unless that is accepted.
    """

    def __init__(
        self, trainer: Trainer, checkpoint: dict[str, Any], learner: dict[str, Any]
    ) -> None:
        self._trainer = trainer
        self._checkpoint = checkpoint
        self._saved: dict[str, Any] = checkpoint.get("learner") or {}
        datamodule: Any = getattr(trainer, "datamodule", None)
        self._has_rounds = hasattr(datamodule, "schedule")
        changes: run_settings.Changes = {}
        if self._saved:
            names = ("class_path", "init_args")
            before, now = (
                {"model": {name: source.get(name, {}) for name in names}}
                for source in (self._saved, learner)
            )
            changes = run_settings.changes(before, now)
            if self._saved.get("policy") != learner["policy"]:
                changes["model.policy"] = (self._saved.get("policy"), learner["policy"])
        data: run_settings.Changes = {}
        if hasattr(datamodule, "changes_from"):
            data = datamodule.changes_from(datamodule.state_in(checkpoint))
        if not getattr(datamodule, "accept_changes", False):
            run_settings.refuse(changes | data)
        if "model.optimizer" in changes:
            was, now = changes["model.optimizer"]
            raise ConfigurationError(
                f"model.optimizer={now!r}, the checkpoint has {was!r}: no optimiser can go on with "
                "another's state; keep it, or begin a new run"
            )
        self._changed = set(changes)
        self._settings: list[list[dict[str, Any]]] = []
        """Of each optimiser's groups, as the learner has made them."""
        if changes and trainer.is_global_zero:
            _log.warning("%s", run_settings.told(changes, checkpoint["updates"]))

    def place_loops(self) -> None:
        """Let the Trainer's counts say where the run is now, and note the optimisers' own settings.

        Those of the checkpoint will replace them.
        """
        self._settings = [
            [{k: v for k, v in group.items() if k != "params"} for group in each.param_groups]
            for each in self._trainer.optimizers
        ]
        if self._has_rounds and "parts_per_round" in self._saved:
            place_loops(self._trainer, self._checkpoint, self._saved["parts_per_round"])

    def set_rates(self, *, decay_steps: int | None) -> None:
        """Give optimisers and schedules the learner's own settings, where those have changed.

        Args:
            decay_steps: steps in which the rate falls to 0; None if it does not fall.
        """
        before = self._saved.get("decay_steps")
        end_moved = bool(decay_steps and before and decay_steps != before)
        if end_moved and self._trainer.is_global_zero:
            _log.warning(
                "learning_rate_decay: the rate falls to 0 at step %d, not %d: from update %d on it "
                "is another than in either run that was never stopped",
                *(decay_steps, before, self._checkpoint["updates"]),
            )
        if not end_moved and not self._optimizers_differ():
            return
        for optimizer, settings in zip(self._trainer.optimizers, self._settings, strict=True):
            for group, own in zip(optimizer.param_groups, settings, strict=True):
                group.update({"initial_lr": own["lr"], **own, "lr": _rate(group, own)})
        for each in self._trainer.lr_scheduler_configs:
            if isinstance(each.scheduler, torch.optim.lr_scheduler.LambdaLR):
                if not before:
                    each.scheduler.last_epoch = self._trainer.global_step
                _set_base_rates(each.scheduler)

    def _optimizers_differ(self) -> bool:
        """Return whether a setting is another that optimisers hold, or may, as it is the user's."""
        classes = type(self._trainer.lightning_module).__mro__
        ours = inspect.signature(next(each for each in classes if not is_of_the_user(each)))
        changed = (name.removeprefix("model.") for name in self._changed - {"model"})
        return any(name in _OF_OPTIMIZERS or name not in ours.parameters for name in changed)


_OF_OPTIMIZERS = ("learning_rate", "learning_rate_decay", "epsilon", "optimizer_kwargs")
"""Settings of the learner that its optimisers hold."""


def _rate(group: dict[str, Any], own: dict[str, Any]) -> Any:  # noqa: ANN401 - or a tensor
    """Return a group's rate: under a schedule, the share of the new one to which that has come."""
    start, before = own.get("initial_lr"), group.get("initial_lr")
    return group["lr"] * start / before if start is not None and before else own["lr"]


def _set_base_rates(scheduler: torch.optim.lr_scheduler.LambdaLR) -> None:
    scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]
    rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    set_last_rates(scheduler, [rate * decay(scheduler.last_epoch) for rate, decay in rates])
