"""What a checkpoint holds of a learner, and how a run goes on from it."""

from __future__ import annotations

import inspect
import io
import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torchrl.data import ReplayBuffer

from hts_torchrl.compat.torch import set_base_rates, set_last_rates
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.settings import loadable
from hts_torchrl.training import run_settings
from hts_torchrl.training.data_state import lost_averages, place_loops, state_in
from hts_torchrl.training.extended_hooks import is_of_the_user

_log = logging.getLogger(__name__)
_SEEDED = "draw from the global generators, which are seeded for each round"
_NOT_SAVED: dict[type, str] = {
    Optimizer: "make its parameters a group of the optimizer that configure_optimizers returns",
    ReplayBuffer: "keep what lasts for several rounds in buffers of the module (register_buffer)",
    **dict.fromkeys((torch.Generator, np.random.Generator, random.Random), _SEEDED),
}
"""What a learner may keep as an attribute, and what to do in its place."""


def describe(module: Any) -> dict[str, Any]:  # noqa: ANN401 - a RoundModule, which imports this
    """Return class, hyperparameters and policy of a learner as plain data."""
    hparams = module.hparams.items()
    given = {k: v for k, v in hparams if k != "policy" and not k.startswith("_")}
    return {
        "class_path": run_settings.class_name(module),
        "init_args": run_settings.plain(given),
        "policy": module.policy_name,
        "policy_arguments": module.policy_arguments,
        "parts_per_round": module.parts_per_round,
        "spec": module.spec_json,
        "normalize_observation": module.normalizes,
        "decay_steps": module.decay_steps,
    }


def require_same_network(module: Any, weights: Mapping[str, Tensor]) -> None:  # noqa: ANN401
    """Refuse weights of other shapes than a learner's; of other names too, if it is strict.

    A lazy layer takes the shapes that they have.
    """
    own, saved = (
        {
            name: "of a lazy layer" if is_lazy(value) else tuple(value.shape)
            for name, value in state.items()
            if isinstance(value, Tensor)
        }
        for state in (module.state_dict(), weights)
    )
    lazy = [name for name in own.keys() & saved.keys() if isinstance(own[name], str)]
    own |= {name: saved[name] for name in lazy}
    names = {*own, *saved} if module.strict_loading else own.keys() & saved.keys()
    for name in sorted(name for name in names if own.get(name) != saved.get(name)):
        difference = f"its {name} has shape {saved.get(name)}, but {own.get(name)} is needed"
        if name not in saved:
            difference = f"it has no {name}"
        elif name not in own:
            difference = f"it has {name}, which this one does not have"
        raise ConfigurationError(f"the checkpoint is of another network: {difference}")


def leave_loadable(checkpoint: dict[str, Any]) -> None:
    """Leave plain values of settings, optimisers and schedules alone, which load without code."""
    arguments = ("hyper_parameters", "datamodule_hyper_parameters")
    for part in ("learner", *arguments, "optimizer_states", "lr_schedulers"):
        if part in checkpoint:
            checkpoint[part] = loadable(checkpoint[part])
    # Some may be objects, with which nothing would load the file; "learner" has their types.
    for given in (checkpoint.get(part, {}) for part in arguments):
        for name in [name for name, value in given.items() if not _is_loaded(value)]:
            del given[name]


def require_saved(module: Any) -> None:  # noqa: ANN401
    """Refuse what a learner has beside its policy without a shape; warn of what is not saved."""
    name = type(module).__name__
    for own, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ConfigurationError(
                f"{name}'s {own} has no shape yet, but is kept as it is when the first round "
                "begins: call its module once in configure_model, after super()"
            )
    saving = next(each for each in type(module).__mro__ if "on_save_checkpoint" in vars(each))
    if is_of_the_user(saving):
        return
    for own, value in vars(module).items():
        for kind, remedy in _NOT_SAVED.items():
            if isinstance(value, kind):
                rank_zero_warn(
                    f"{name}.{own} is of type {type(value).__name__}, whose state is in no "
                    f"checkpoint, so a resumed run may have other bits: {remedy}"
                )


def _is_loaded(value: object) -> bool:
    """Return whether ``torch.load`` takes a value from a file without running code of it."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:
        return False
    return True


class Resumption:
    """What ``fit`` does with a checkpoint beyond loading it.

    One for each ``fit`` that goes on, in this order::

        made when the checkpoint is read      settings are compared
        place_loops()                         before the Trainer takes its counts and optimisers
        set_rates(...)                        when optimisers and schedules are there

    Args:
        trainer: of the ``fit``.
        checkpoint: whose settings are compared, and whose counts are changed in place.
        learner: what :func:`describe` returns of the one that goes on.

    Raises:
        ConfigurationError: for weights alone, and for settings that decide bits and differ, unless
            that is accepted.
    """

    def __init__(
        self, trainer: Trainer, checkpoint: dict[str, Any], learner: dict[str, Any]
    ) -> None:
        if "optimizer_states" not in checkpoint:
            raise ConfigurationError(
                "the checkpoint has weights alone, as ModelCheckpoint(save_weights_only=True) "
                "writes it, and no run can resume from it; load_from_checkpoint(...) gives a "
                "learner with them, which begins a new run"
            )
        self._trainer = trainer
        self._checkpoint = checkpoint
        self._saved: dict[str, Any] = checkpoint["learner"]
        datamodule: Any = getattr(trainer, "datamodule", None)
        self._has_rounds = hasattr(datamodule, "schedule")
        changes = run_settings.changes({"model": self._saved}, {"model": learner})
        if self._saved.get("policy") != learner["policy"]:
            changes["model.policy"] = (self._saved.get("policy"), learner["policy"])
        before, now = (each.get("policy_arguments", {}) for each in (self._saved, learner))
        of_policy = run_settings.changes(before, now)
        changes |= {f"model.policy.{name}": each for name, each in of_policy.items()}
        self.data_changes: run_settings.Changes = {}
        """What the data module would be asked for again when it takes its state."""
        if self._has_rounds:
            self.data_changes = datamodule.changes_from(state_in(checkpoint, datamodule))
            self.data_changes |= lost_averages(trainer, checkpoint)
        if not getattr(datamodule, "accept_changes", False):
            run_settings.refuse(changes | self.data_changes)
        if "model.optimizer" in changes:
            was, now = changes["model.optimizer"]
            raise ConfigurationError(
                f"model.optimizer={now!r}, the checkpoint has {was!r}: no optimiser can continue "
                "with another's state; keep it, or begin a new run"
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
        if self._has_rounds:
            place_loops(self._trainer, self._checkpoint, self._saved["parts_per_round"])

    def set_rates(self, *, decay_steps: int | None) -> None:
        """Give optimisers and schedules the learner's own settings, where those have changed."""
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
        is_new = not self._checkpoint.get("lr_schedulers")
        for scheduler in (each.scheduler for each in self._trainer.lr_scheduler_configs):
            set_base_rates(scheduler)
            if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
                if is_new:
                    scheduler.last_epoch = self._trainer.global_step
                rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
                now = [rate * decay(scheduler.last_epoch) for rate, decay in rates]
                set_last_rates(scheduler, now)

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
