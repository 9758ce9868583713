"""What a checkpoint holds of the data module, and how a run goes on from it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn

from hts_torchrl.collectors.round_source import RoundSource
from hts_torchrl.compat.lightning import FitLoop
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.portable import is_portable
from hts_torchrl.settings import loadable
from hts_torchrl.training.ranks import warn_of_other_weights
from hts_torchrl.training.run_settings import (
    Changes,
    changes,
    described,
    plain,
    refuse,
    told,
)
from hts_torchrl.training.trainer_limits import parts_of_round

if TYPE_CHECKING:
    from hts_torchrl.training.datamodule import HTSDataModule

_log = logging.getLogger(__name__)
_DECIDE_BITS = (
    *("env", "frames_per_batch", "num_envs", "delay", "seed", "inference_batch_size"),
    *("collection", "policy_device", "normalize_observation", "normalize_reward"),
    "compile_policy",
)
_CUT_OFF = (
    "the checkpoint was saved in the middle of a round, whose start it does not hold: resume from "
    "an earlier one (DurableCheckpointIO keeps it as NAME.ckpt.previous)"
)

_NOT_KEPT = ("first_env", "reward_discount", "backend", "num_collectors", "backend_options")
"""Set by the data module; and where workers were: a file names no cluster that is to be joined."""
_OWN = (
    *("collection", "resume_envs", "policy_device", "cudagraph_policy"),
    *("normalize_observation", "normalize_reward"),
    *("evaluation_episodes", "evaluation_frames", "evaluation_greedy"),
)


def _plain_settings(data: HTSDataModule) -> dict[str, Any]:
    """Return all settings of a data module as plain data, in the words of a config file."""
    compiles = data.pool.compile_arguments
    settings = {name: each for name, each in vars(data.pool).items() if name not in _NOT_KEPT}
    settings |= {
        "env": described(data.env),
        "inference_batch_size": data.pool.batch_size,
        "compile_policy": False if compiles is None else plain(compiles) or True,
        **{name: getattr(data, name) for name in _OWN},
    }
    return {name: loadable(each) for name, each in settings.items()}


def deciding_bits(settings: dict[str, Any]) -> dict[str, Any]:
    """Return those of all settings that decide bits, and so stay the same when a run goes on."""
    deciding = {name: settings[name] for name in _DECIDE_BITS}
    env = deciding["env"]
    if env["class_path"] == "AtariEnvs":  # of its arguments, one decides no bit
        arguments = {n: value for n, value in env["init_args"].items() if n != "num_threads"}
        deciding["env"] = {**env, "init_args": arguments}
    return deciding


class DataState:
    """The collector's state and the run's settings, as a checkpoint holds them."""

    def __init__(self, data: HTSDataModule) -> None:
        self._data = data
        self.settings = _plain_settings(data)
        self._updates_before = 0
        self.first_round = 0
        self.loaded: dict[str, Any] = {}
        """For the next training."""
        self.final: dict[str, Any] = {}
        """At the end of the last one."""

    def begin(self, collector: RoundSource, updates: int, ranks: int) -> None:
        """Hand what was loaded to a new collector of this rank; frames are those of all ranks."""
        state = {"frames": 0, **self.loaded, "policy_version": updates}
        state["frames"] //= ranks
        collector.load_state_dict(state)
        self.loaded, self.final = {}, {}  # a further training begins anew
        self.first_round = int(state.get("round", 0))
        self._updates_before = updates - self.first_round

    def of(
        self, collector: RoundSource, trainer: Trainer, updates: int, *, cut_off: bool
    ) -> dict[str, Any]:
        """Return the state at the start of the next round to be learned; all ranks must call it.

        ``cut_off`` tells that weights have moved, or may have, in a round that has not ended.
        """
        round_index = updates - self._updates_before
        state = dict(collector.state_at(round_index, envs=self._data.resume_envs))
        state["frames"] *= trainer.world_size
        if cut_off:
            state["cut_off"] = True
        if trainer.world_size > 1 and "games" in state:
            ranks: list[Any] = [None] * trainer.world_size
            torch.distributed.all_gather_object(ranks, state["games"])
            state["games"] = {
                name: torch.cat([games[name] for games in ranks]) for name in state["games"]
            }
            warn_of_other_weights(trainer)
        state["settings"] = self.run_settings(trainer)
        return state

    def run_settings(self, trainer: Trainer) -> dict[str, Any]:
        """Return the settings of a run as plain data: of the data module, and of the Trainer."""
        algorithm = getattr(trainer.gradient_clip_algorithm, "value", "norm")
        of_trainer = {
            "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val or None,
            "gradient_clip_algorithm": str(algorithm),
            "world_size": trainer.world_size,
        }
        return {
            "data": self.settings,
            "trainer": of_trainer,
            "portable": is_portable(),
            "device": trainer.strategy.root_device.type,
        }

    def changes_from(self, state: dict[str, Any], trainer: Trainer) -> Changes:
        """Return what decides bits and is not as in a state that was saved.

        Raises:
            ConfigurationError: for a setting with which no run can go on, accepted or not.
        """
        own = self.run_settings(trainer)
        if getattr(trainer.lightning_module, "gradient_chunks", 1) > 1:
            del own["trainer"]["world_size"]  # with chunks it decides nothing
        own["data"] = deciding_bits(own["data"])
        saved = state.get("settings") or {"data": {}, "trainer": {}}
        if saved["data"]:  # older ones have no such setting
            saved = {**saved, "data": {"compile_policy": False, **saved["data"]}}
        differing = {
            f"{part}.{name}": each
            for part in ("data", "trainer")
            for name, each in changes(saved[part], own[part]).items()
        }
        was, now = bool(saved.get("portable")), is_portable()
        if saved["data"] and was != now:
            differing["portable"] = (was, now)
        was, now = saved.get("device", own["device"]), own["device"]  # older ones have none
        if was != now:
            differing["trainer.accelerator"] = (was, now)
        for name in ("data.normalize_observation", "data.normalize_reward"):
            if name in differing:
                was, now = differing[name]
                raise ConfigurationError(
                    f"{name}={now!r}, the checkpoint has {was!r}: the weights were "
                    "learned with that scale; keep it, or begin a new run"
                )
        return differing

    def load(self, state: dict[str, Any], trainer: Trainer | None) -> None:
        """Keep the state for the next training; refuse what ``fit`` cannot go on with.

        An evaluation of a checkpoint begins no training: it can only be saved again.
        """
        state = dict(state)
        if trainer is not None and (trainer.evaluating or trainer.predicting):
            self.final = state
            return
        if not self._data.resume_envs:
            state.pop("games", None)
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            # A learner that is restored before has asked, and told of both.
            asked = getattr(trainer.lightning_module, "resumption", None)
            differing = self.changes_from(state, trainer) if asked is None else asked.data_changes
            if not self._data.accept_changes:
                refuse(differing)
            if differing:
                state = self._changed(state, differing, trainer)
            self._refuse_end(state, trainer)
            if state.pop("cut_off", False):
                raise ConfigurationError(_CUT_OFF)
        self.loaded = state
        self.first_round = int(state.get("round", 0))

    def _changed(
        self, state: dict[str, Any], differing: Changes, trainer: Trainer
    ) -> dict[str, Any]:
        """Return the state as a run with other settings goes on with it."""
        update = getattr(trainer.lightning_module, "updates", int(state["policy_version"]))
        new_games = "data.seed" in differing or any(n.startswith("data.env") for n in differing)
        if new_games:
            state.pop("games", None)
        if trainer.is_global_zero:
            games = "; new games begin" if new_games else ""
            _log.warning("%s%s", told(differing, update), games)
        pool = self._data.pool
        if not pool.schedule.starts_before_update():
            state = {name: value for name, value in state.items() if "acting_" not in name}
        before, now = state["settings"]["data"]["frames_per_batch"], pool.frames_per_batch
        state["round"] = -(-state["round"] * before // now)
        state["frames"] = state["round"] * now
        return state

    def _refuse_end(self, state: dict[str, Any], trainer: Trainer) -> None:
        """Refuse an end that lies before what has been done, and more games than there are."""
        pool, round_index = self._data.pool, int(state.get("round", 0))
        total, done = pool.total_frames, round_index * pool.frames_per_batch
        if not pool.schedule.exists(round_index - 1):
            raise ConfigurationError(
                f"data.total_frames={total}, but the checkpoint's run has done {done}"
            )
        wanted = pool.num_envs
        if "games" in state and (games := len(state["games"]["seeds"])) < wanted:
            raise ConfigurationError(
                f"the checkpoint has the games of {games} environments, but data.num_envs={wanted} "
                "are wanted: give the same number, or data.resume_envs=false for new games"
            )
        if not pool.schedule.exists(round_index) and trainer.is_global_zero:
            _log.warning(
                "the checkpoint's run is finished (%d of %d frames): nothing is trained; a larger "
                "data.total_frames extends it",
                *(done, total),
            )


def state_in(checkpoint: dict[str, Any], data: HTSDataModule) -> dict[str, Any]:
    """Return what a checkpoint has of a data module of the same class.

    Raises:
        ConfigurationError: if it has nothing of one.
    """
    name = type(data).__qualname__
    if name not in checkpoint:
        raise ConfigurationError(
            f"the checkpoint has no state of the data module {name}; Lightning keeps it by the "
            "name of its class: give one of the class that the run had"
        )
    state: dict[str, Any] = checkpoint[name]
    return state


def lost_averages(trainer: Trainer, checkpoint: dict[str, Any]) -> Changes:
    """Return, as a change, that a run would go on from averages as if they were its weights."""
    averages = any(isinstance(each, WeightAveraging) for each in trainer.callbacks)  # type: ignore[attr-defined]
    if averages or "current_model_state" not in checkpoint:
        return {}
    return {"trainer.callbacks": ("averages of a WeightAveraging", "no WeightAveraging")}


def place_loops(trainer: Trainer, checkpoint: dict[str, Any], parts_before: int) -> None:
    """Let the Trainer's counts say where the run is now: in the middle of an epoch.

    A finished run has more to do if its end has moved; and a round may have other parts, or the run
    other rounds, than before.

    Args:
        trainer: of the training that goes on.
        checkpoint: whose counts are changed in place, before the Trainer takes them.
        parts_before: of each round, in the training that saved it.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    loop = FitLoop.of(checkpoint)
    if loop is None:
        return
    before = state_in(checkpoint, data)["round"] * parts_before
    done = data.first_round * parts_of_round(trainer)
    if data.schedule.exists(data.first_round) and (done != before or loop.is_finished):
        loop.move(done - before, done=done, epoch_length=data.parts_per_epoch)
    elif loop.is_finished and not trainer.limit_val_batches:
        loop.end()
