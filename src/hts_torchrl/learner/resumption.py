"""A run that goes on from a checkpoint: what it changes, and how the Trainer takes that up."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from hts_torchrl import run_settings
from hts_torchrl.errors import ConfigurationError

if TYPE_CHECKING:
    from hts_torchrl.learner.base import Learner

_log = logging.getLogger(__name__)


def learner_settings(learner: Learner) -> dict[str, Any]:
    """Return class and hyperparameters of a learner as plain data."""
    hyperparameters = {
        name: value
        for name, value in learner.hparams.items()
        if name != "policy" and not name.startswith("_")
    }
    return {
        "class_path": run_settings.class_name(learner),
        "init_args": run_settings.plain(hyperparameters),
    }


class Resumption:
    """What ``fit`` does with a checkpoint beyond loading it.

    One for each ``fit`` that goes on, in this order::

        made when the checkpoint is read      settings are compared
        place_loops()                         before the Trainer takes its counts
        set_rates()                           when optimisers and schedules are there

    Args:
        learner: attached to its Trainer.
        checkpoint: whose settings are compared, and whose counts are changed in place.

    Raises:
        ConfigurationError: for settings that decide bits and differ, unless that is accepted.
    """

    def __init__(self, learner: Learner, checkpoint: dict[str, Any]) -> None:
        self._learner = learner
        self._checkpoint = checkpoint
        self._saved: dict[str, Any] = checkpoint.get("learner") or {}
        datamodule: Any = getattr(learner.trainer, "datamodule", None)
        self._datamodule = datamodule
        saved = {"model": {name: self._saved.get(name, {}) for name in ("class_path", "init_args")}}
        changes: run_settings.Changes = {}
        if self._saved:
            changes = run_settings.changes(saved, {"model": learner_settings(learner)})
            if self._saved.get("policy") != learner.policy_name:
                changes["model.policy"] = (self._saved.get("policy"), learner.policy_name)
        data: run_settings.Changes = {}
        if hasattr(datamodule, "changes_from"):
            data = datamodule.changes_from(checkpoint.get(type(datamodule).__qualname__, {}))
        if not getattr(datamodule, "accept_changes", False):
            run_settings.refuse(changes | data)
        if "model.optimizer" in changes:
            was, now = changes["model.optimizer"]
            raise ConfigurationError(
                f"model.optimizer={now!r}, the checkpoint has {was!r}: no optimiser can go on with "
                "another's state; keep it, or begin a new run"
            )
        self._changed = set(changes)
        if changes and learner.trainer.is_global_zero:
            _log.warning("%s", run_settings.told(changes, checkpoint["updates"]))

    def place_loops(self) -> None:
        """Let the Trainer's counts say where the run is now: in the middle of its one epoch.

        A finished run has more to do if its end has moved; and a round may have other parts, or the
        run other rounds, than before.
        """
        schedule = getattr(self._datamodule, "schedule", None)
        loops = self._checkpoint.get("loops", {}).get("fit_loop")
        if schedule is None or loops is None or "parts_per_round" not in self._saved:
            return
        parts = self._learner.parts_per_round
        state = self._checkpoint[type(self._datamodule).__qualname__]
        before = state["round"] * self._saved["parts_per_round"]
        moved = self._datamodule.first_round * parts - before
        progress = loops["epoch_loop.batch_progress"]
        finished = progress["is_last_batch"] or loops["epoch_progress"]["current"]["processed"]
        if not schedule.exists(self._datamodule.first_round) or not (moved or finished):
            return
        progress["is_last_batch"] = False
        for counts in (progress["total"], progress["current"]):
            for name in counts:
                counts[name] += moved
        one_begun = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
        for counts in (loops["epoch_progress"]["total"], loops["epoch_progress"]["current"]):
            counts.update(one_begun)

    def set_rates(self) -> None:
        """Give optimisers and schedules the learner's own settings, where those have changed."""
        learner = self._learner
        decays = learner.decay_steps
        before = self._saved.get("decay_steps")
        if decays and before and decays != before and learner.trainer.is_global_zero:
            _log.warning(
                "learning_rate_decay: the rate falls to 0 at step %d, not %d: from update %d on it "
                "is another than in either run that was never stopped",
                *(decays, before, learner.updates),
            )
        changed = {f"model.{name}" for name in ("learning_rate", "learning_rate_decay", "epsilon")}
        if not (decays and before and decays != before) and not changed & self._changed:
            return
        for optimizer in learner.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] = learner.learning_rate
                group["eps"] = learner.epsilon
        for each in learner.trainer.lr_scheduler_configs:
            scheduler = each.scheduler
            if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
                if not before:
                    scheduler.last_epoch = learner.trainer.global_step
                scheduler.base_lrs = [learner.learning_rate] * len(scheduler.base_lrs)
                rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
                scheduler._last_lr = [rate * decay(scheduler.last_epoch) for rate, decay in rates]
                groups = scheduler.optimizer.param_groups
                for group, rate in zip(groups, scheduler._last_lr, strict=True):
                    group["lr"] = rate
