"""The data module: rounds for training, episodes for evaluation."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from hts_torchrl.collector import HTSCollector
from hts_torchrl.config import (
    MOST_ENVS,
    Collection,
    CrewConfig,
    EnvSpec,
    Precision,
    Recover,
    StartMethod,
)
from hts_torchrl.envs.group import EnvFactory
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.evaluation import Evaluation
from hts_torchrl.policy import as_policy
from hts_torchrl.round_part import RoundPart
from hts_torchrl.run_settings import Changes, changes, described, refuse, told
from hts_torchrl.schedule import Schedule
from hts_torchrl.trainer_limits import require_supported
from hts_torchrl.trajectories import TrajectoryCollector


class RoundLoader:
    """The parts of all rounds, in order: the Trainer's loader.

    It has a length: from a loader without one Lightning fetches a batch ahead, which would be a
    hidden second round of delay. Iterating again goes on where the last iteration stopped.

    Args:
        collector: of the rounds.
        parts_per_round: into how many parts each is divided.
        before_round: called before each round is asked for, when all of the last one is done.
    """

    def __init__(
        self,
        collector: HTSCollector | TrajectoryCollector,
        parts_per_round: int,
        before_round: Callable[[], None] = lambda: None,
    ) -> None:
        self._collector = collector
        self._parts_per_round = parts_per_round
        self._before_round = before_round
        self._parts = self._run()

    def __len__(self) -> int:
        """Return the parts in the whole run."""
        return len(self._collector) * self._parts_per_round

    def __iter__(self) -> Iterator[RoundPart]:
        """Return the one iterator there is."""
        return self._parts

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the data module keeps the collector's state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing; that it can be called tells the Trainer that the rounds go on."""

    def _run(self) -> Iterator[RoundPart]:
        rounds = iter(self._collector)
        while True:
            self._before_round()
            batch = next(rounds, None)
            if batch is None:
                break
            for index in range(self._parts_per_round):
                yield RoundPart(batch, index, self._parts_per_round)
        raise ConfigurationError(f"the run's frames are used up: {_ONE_EPOCH}")


_log = logging.getLogger(__name__)
_DECIDE_BITS = (
    *("env", "frames_per_batch", "num_envs", "delay", "seed", "inference_batch_size"),
    "collection",
)
PRECISIONS: tuple[Precision, ...] = ("32-true", "bf16-mixed")
"""The Trainer's, in which actors can compute, too."""
_ONE_EPOCH = "an epoch is the whole run, set Trainer(max_epochs=1)"


class EvaluationLoader:
    """One evaluation, as the Trainer's validation loader (a plain list would be many loaders)."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation

    def __len__(self) -> int:
        """Return 1."""
        return 1

    def __iter__(self) -> Iterator[Evaluation]:
        """Yield the evaluation."""
        yield self._evaluation


def _require_sound(trainer: Trainer) -> None:
    """Refuse settings with which Lightning would fail, or spoil the weights, in the first step.

    Raises:
        ConfigurationError: naming the setting.
    """
    for name in ("log_every_n_steps", "accumulate_grad_batches", "check_val_every_n_epoch"):
        count = getattr(trainer, name)
        if count is not None and count < 1:
            raise ConfigurationError(f"{name}={count}; 1 or more is needed")
    if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        count = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        raise ConfigurationError(f"reload_dataloaders_every_n_epochs={count}; 0 is needed")
    clip = trainer.gradient_clip_val
    if clip is not None and not 0 <= clip < math.inf:
        raise ConfigurationError(
            f"gradient_clip_val={clip}; a finite number of 0 or more is needed"
        )


class HTSDataModule(LightningDataModule):
    """Collects rounds while the learner learns, and evaluates on environments of their own.

    One epoch of the Trainer is the whole run: use ``Trainer(max_epochs=1)``. The collector is built
    when training begins and closed at its end, also after an exception.

    Args:
        env: factory of the environments, such as ``AtariEnvs`` or ``GymEnvs``.
        frames_per_batch: environment steps in a round, ``num_envs * alpha``.
        total_frames: steps of each rank in the whole run.
        num_envs: environments of each rank.
        num_actors: actor processes; 0 runs everything in this process.
        envs_per_executor: environments that one executor process steps in lock step.
        delay: 1 collects the next round during the update; 0 only after it.
        seed: decides every environment and every action.
        inference_batch_size: rows of every forward pass; None is ``min(8, num_envs)``.
        collection: ``rounds`` is this project's; ``actors`` (IMPALA) and ``server`` (SEED RL) are
            baselines that nobody waits for, with a learner for data of any age (``Impala``), on the
            CPU and one rank; ``num_actors``, ``delay`` and ``step_barrier`` say nothing to them.
        step_barrier: hold every environment at every step until all are there: a baseline.
        start_method: how processes start.
        timeout_s: seconds without a sign of life from an executor after which the run is given up.
        recover: ``fail`` ends the run when a worker was killed by a signal; ``replay`` starts the
            workers anew and repeats the round, with the same bits.
        debug: check that every cell of a round is written once; no bit changes by it.
        resume_envs: keep the running games in checkpoints, and go on with those of a checkpoint, so
            that the resumed run has the bits of one that was never stopped; else new games begin.
        accept_changes: go on from a checkpoint with other settings that decide bits, which is
            refused else; the log tells which, and from which update on.
        evaluation_episodes: games of each evaluation.
        evaluation_frames: steps between evaluations; None evaluates at the end only.
        evaluation_greedy: play the likeliest action instead of a drawn one.
    """

    def __init__(  # noqa: PLR0913 - flags of the command line, keyword only
        self,
        env: EnvFactory,
        *,
        frames_per_batch: int,
        total_frames: int,
        num_envs: int = 16,
        num_actors: int = 1,
        envs_per_executor: int = 1,
        delay: int = 1,
        seed: int = 0,
        inference_batch_size: int | None = None,
        collection: Collection = "rounds",
        step_barrier: bool = False,
        start_method: StartMethod = "forkserver",
        timeout_s: float = 120.0,
        recover: Recover = "fail",
        debug: bool = False,
        resume_envs: bool = True,
        accept_changes: bool = False,
        evaluation_episodes: int = 10,
        evaluation_frames: int | None = None,
        evaluation_greedy: bool = False,
    ) -> None:
        super().__init__()
        if total_frames < 1:
            raise ConfigurationError(
                f"total_frames={total_frames}; the Trainer needs an end: give a positive count"
            )
        self.schedule = Schedule.from_frames(
            frames_per_batch, total_frames=total_frames, num_envs=num_envs, delay=delay
        )
        self.crew = CrewConfig(  # refused here rather than when training begins
            num_envs=num_envs,
            num_actors=num_actors,
            envs_per_executor=envs_per_executor,
            inference_batch_size=inference_batch_size,
            step_barrier=step_barrier,
            start_method=start_method,
            timeout_s=timeout_s,
            recover=recover,
            debug=debug,
        )
        for name, count in (
            ("evaluation_episodes", evaluation_episodes),
            ("evaluation_frames", evaluation_frames),
        ):
            if count is not None and count < 1:
                raise ConfigurationError(f"{name}={count}; 1 or more is needed")
        if evaluation_episodes > MOST_ENVS:
            raise ConfigurationError(
                f"evaluation_episodes={evaluation_episodes}; at most {MOST_ENVS} is possible"
            )
        if collection not in get_args(Collection):
            known = ", ".join(get_args(Collection))
            raise ConfigurationError(f"collection={collection!r}; one of {known} is needed")
        self.env = env
        self.collection = collection
        self.seed = seed
        self.resume_envs = resume_envs
        self.accept_changes = accept_changes
        self.evaluation_episodes = evaluation_episodes
        self.evaluation_frames = evaluation_frames
        self.evaluation_greedy = evaluation_greedy
        self._settings: dict[str, Any] = {
            "frames_per_batch": frames_per_batch,
            "total_frames": total_frames,
            "num_envs": num_envs,
            "num_actors": num_actors,
            "envs_per_executor": envs_per_executor,
            "delay": delay,
            "seed": seed,
            "inference_batch_size": inference_batch_size,
            "step_barrier": step_barrier,
            "start_method": start_method,
            "timeout_s": timeout_s,
            "recover": recover,
            "debug": debug,
        }
        self._collector: HTSCollector | TrajectoryCollector | None = None
        self._loaded_state: dict[str, Any] = {}
        self._final_state: dict[str, Any] = {}
        self._updates_before = 0
        self.first_round = 0
        """The round with which a run that was loaded goes on."""
        self._env_spec: EnvSpec | None = None

    def for_trial(self, rounds: int, **changes: Any) -> HTSDataModule:  # noqa: ANN401
        """Return a module of the same rounds, so many of them, that never evaluates.

        Args:
            rounds: of the whole run.
            changes: settings of the constructor that are to differ.
        """
        frames = {"total_frames": self.schedule.frames_per_round * rounds}
        settings = {"collection": self.collection, **self._settings, **frames, **changes}
        return HTSDataModule(self.env, **settings)

    @property
    def env_spec(self) -> EnvSpec:
        """Observations and actions of the environments; makes one to ask it."""
        if self._env_spec is None:
            group = make_group(self.env, [0])
            self._env_spec = group.spec
            group.close()
        return self._env_spec

    @property
    def collector(self) -> HTSCollector | TrajectoryCollector:
        """The collector of the running training.

        Raises:
            ConfigurationError: outside of training.
        """
        if self._collector is None:
            raise ConfigurationError("the collector exists during training only")
        return self._collector

    @property
    def _precision(self) -> Precision:
        assert self.trainer is not None
        return self.trainer.precision  # type: ignore[return-value]

    def setup(self, stage: str) -> None:
        """Ask for an evaluation every ``evaluation_frames``, in the Trainer's own count.

        Raises:
            ConfigurationError: if actors cannot compute in the Trainer's precision, or its epochs
                are more than the frames will do for.
        """
        assert self.trainer is not None
        if self.trainer.precision not in PRECISIONS:
            raise ConfigurationError(
                f"precision={self.trainer.precision}; {' or '.join(PRECISIONS)} is needed"
            )
        if stage != "fit":
            return
        require_supported(self.trainer)
        _require_sound(self.trainer)
        self._refuse_collection()
        assert self.schedule.num_rounds is not None
        parts = self.schedule.num_rounds * self._parts_per_round
        if parts > sys.maxsize:
            raise ConfigurationError(
                f"{self.schedule.num_rounds} rounds of {self._parts_per_round} minibatches are "
                f"more than {sys.maxsize} steps: lower total_frames, epochs or minibatches"
            )
        limit = self.trainer.limit_train_batches
        in_epoch = min(parts, limit) if isinstance(limit, int) else int(parts * limit)
        if in_epoch < 1:
            raise ConfigurationError(f"limit_train_batches={limit:g}: no part of the run is left")
        if (self.trainer.max_epochs or 0) * in_epoch > parts:
            raise ConfigurationError(f"max_epochs={self.trainer.max_epochs}: {_ONE_EPOCH}")
        self._set_interval(in_epoch)

    def _set_interval(self, in_epoch: int) -> None:
        """Turn evaluation_frames into the Trainer's count of batches."""
        assert self.trainer is not None
        # None where Lightning was given a time.
        interval = getattr(self.trainer, "val_check_interval", None)
        if self.evaluation_frames is None:
            if isinstance(interval, int) and not 1 <= interval <= in_epoch:
                raise ConfigurationError(
                    f"val_check_interval={interval}; 1 to {in_epoch} (parts of the run) is needed"
                )
            return
        if interval != 1 or isinstance(interval, int):
            given = "a time" if interval is None else interval
            raise ConfigurationError(
                f"val_check_interval={given} and evaluation_frames={self.evaluation_frames}: both "
                "say when to evaluate; give one of them"
            )
        rounds = max(1, round(self.evaluation_frames / self.schedule.frames_per_round))
        parts = rounds * self._parts_per_round
        self.trainer.val_check_interval = max(1, min(parts, in_epoch))

    def _refuse_collection(self) -> None:
        """Refuse data of any age where the learner, or the Trainer, cannot use it."""
        assert self.trainer is not None
        if self.collection == "rounds":
            return
        setting = f"collection={self.collection}"
        if not getattr(self.trainer.lightning_module, "corrects_any_lag", False):
            raise ConfigurationError(f"{setting} needs a learner for data of any age: model=Impala")
        if self.trainer.world_size > 1:
            raise ConfigurationError(f"{setting} on {self.trainer.world_size} ranks; 1 is needed")

    @property
    def _parts_per_round(self) -> int:
        assert self.trainer is not None
        return getattr(self.trainer.lightning_module, "parts_per_round", 1)

    def train_dataloader(self) -> RoundLoader:
        """Build the collector around the learner's policy and start its processes."""
        assert self.trainer is not None
        self._close()
        # A learner that has trained before goes on counting its updates.
        learner = self.trainer.lightning_module
        updates = getattr(learner, "updates", 0)
        state = {"frames": 0, **self._loaded_state, "policy_version": updates}
        collector = self._make_collector()
        collector.load_state_dict(state)  # type: ignore[arg-type]
        self._collector = collector  # not before: what could not be loaded has no state to save
        self._loaded_state = {}  # a further training begins anew
        self._updates_before = updates - int(state.get("round", 0))
        self._collector.start()
        before_round = getattr(learner, "before_round", lambda: None)
        return RoundLoader(self._collector, self._parts_per_round, before_round)

    def _make_collector(self) -> HTSCollector | TrajectoryCollector:
        assert self.trainer is not None
        policy: Any = self.trainer.lightning_module.policy
        if self.collection == "rounds":
            collector = HTSCollector(
                self.env,
                policy,
                precision=self._precision,
                policy_device=str(self.trainer.strategy.root_device),
                first_env=self.trainer.global_rank * self.schedule.num_envs,
                clone=False,  # no learner keeps a round
                **self._settings,
            )
            if not getattr(self.trainer.lightning_module, "reads_all_outputs", True):
                collector._leave_out_extras()
            return collector
        return TrajectoryCollector(
            self.env,
            as_policy(policy, self.env_spec),
            form=self.collection,
            schedule=self.schedule,
            crew=self.crew,
            seed=self.seed,
            precision=self._precision,
        )

    def val_dataloader(self) -> EvaluationLoader:
        """Return a loader of one evaluation; :meth:`Learner.validation_step` plays it."""
        return EvaluationLoader(self.evaluation(precision=self._precision))

    test_dataloader = predict_dataloader = val_dataloader

    def evaluation(self, *, precision: Precision) -> Evaluation:
        """Return what an evaluation plays."""
        return Evaluation(
            self.env,
            self.evaluation_episodes,
            self.seed,
            greedy=self.evaluation_greedy,
            precision=precision,
        )

    def transfer_batch_to_device(
        self,
        batch: RoundPart | Evaluation,
        device: torch.device,
        dataloader_idx: int,  # noqa: ARG002
    ) -> RoundPart | Evaluation:
        """Move a round once, with its first part; an evaluation has nothing to move."""
        if isinstance(batch, RoundPart) and batch.is_first and device.type != "cpu":
            return replace(batch, round=batch.round.to(device))
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the collector's state at the start of the round that is to be learned next.

        On several ranks all must call this: rank 0, which writes the checkpoint, gets the games of
        all.
        """
        if self._collector is None:
            return self._final_state or self._loaded_state
        assert self.trainer is not None
        updates = getattr(self.trainer.lightning_module, "updates", None)
        round_index = self._collector.rounds if updates is None else updates - self._updates_before
        state = dict(self._collector.state_at(round_index, envs=self.resume_envs))
        if self.trainer.world_size > 1 and "games" in state:
            ranks: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(ranks, state["games"])
            state["games"] = {
                name: torch.cat([games[name] for games in ranks]) for name in state["games"]
            }
        state["settings"] = self.settings
        return state

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of data and Trainer as plain data, in the words of a config file."""
        assert self.trainer is not None
        clip = self.trainer.gradient_clip_val or None
        data = {
            **self._settings,
            "env": described(self.env),
            "inference_batch_size": self.crew.batch_size,
            "collection": self.collection,
            "resume_envs": self.resume_envs,
            "evaluation_episodes": self.evaluation_episodes,
            "evaluation_frames": self.evaluation_frames,
            "evaluation_greedy": self.evaluation_greedy,
        }
        trainer = {
            "precision": str(self.trainer.precision),
            "accumulate_grad_batches": self.trainer.accumulate_grad_batches,
            "gradient_clip_val": clip,
            "gradient_clip_algorithm": str(
                getattr(self.trainer.gradient_clip_algorithm, "value", "norm")
            ),
            "world_size": self.trainer.world_size,
        }
        return {"data": data, "trainer": trainer}

    def changes_from(self, state_dict: dict[str, Any]) -> Changes:
        """Return what decides bits and is not as in a checkpoint, whose state of this module it is.

        A checkpoint of before there were settings in them has none that differ.
        """
        saved = state_dict.get("settings") or {"data": {}, "trainer": {}}
        own = self.settings
        data = changes(saved["data"], {name: own["data"][name] for name in _DECIDE_BITS})
        trainer = changes(saved["trainer"], own["trainer"])
        return {f"data.{name}": each for name, each in data.items()} | {
            f"trainer.{name}": each for name, each in trainer.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for the collector that will be built.

        Raises:
            ConfigurationError: if ``fit`` would go on with other settings that decide bits, beyond
                its end, or with more games than there are.
        """
        state = dict(state_dict)
        if not self.resume_envs:
            state.pop("games", None)
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            differing = self.changes_from(state)
            if not self.accept_changes:
                refuse(differing)
            if differing:
                state = self._changed(state, differing)
            self._refuse_end(state)
        self._loaded_state = state
        self.first_round = int(state.get("round", 0))

    def _changed(self, state: dict[str, Any], differing: Changes) -> dict[str, Any]:
        """Return the state as this module goes on with it, where settings are others."""
        assert self.trainer is not None
        update = getattr(self.trainer.lightning_module, "updates", int(state["policy_version"]))
        new_games = "data.seed" in differing or any(n.startswith("data.env") for n in differing)
        if new_games:
            state.pop("games", None)
        if self.trainer.is_global_zero:
            games = "; new games begin" if new_games else ""
            _log.warning("%s%s", told(differing, update), games)
        if not self.schedule.starts_before_update():
            state = {name: value for name, value in state.items() if "acting_" not in name}
        before, now = state["settings"]["data"]["frames_per_batch"], self.schedule.frames_per_round
        state["round"] = -(-state["round"] * before // now)
        state["frames"] = state["round"] * now
        return state

    def _refuse_end(self, state: dict[str, Any]) -> None:
        """Refuse an end that lies before what has been done, and more games than there are."""
        assert self.trainer is not None
        total, wanted = self._settings["total_frames"], self.schedule.num_envs
        done = int(state.get("round", 0)) * self.schedule.frames_per_round
        if self.schedule.num_rounds is not None and not self.schedule.exists(
            int(state.get("round", 0)) - 1
        ):
            raise ConfigurationError(
                f"data.total_frames={total}, but the checkpoint's run has done {done}"
            )
        games = len(state["games"]["seeds"]) if "games" in state else None
        wanted *= self.trainer.world_size
        if games is not None and games < wanted:
            raise ConfigurationError(
                f"the checkpoint has the games of {games} environments, but {wanted} are wanted "
                f"(data.num_envs={self.schedule.num_envs}, ranks={self.trainer.world_size}): give "
                "the same number, or data.resume_envs=false for new games"
            )
        if not self.schedule.exists(int(state.get("round", 0))) and self.trainer.is_global_zero:
            _log.warning(
                "the checkpoint's run is finished (%d of %d frames): nothing is trained; a larger "
                "data.total_frames extends it",
                *(done, total),
            )

    def teardown(self, stage: str) -> None:
        """Stop all workers; what they had come to can still be saved."""
        if stage == "fit" and self.evaluation_frames is not None:
            assert self.trainer is not None
            self.trainer.val_check_interval = 1.0  # as it was: for the Trainer's next run
        self._final_state = self.state_dict()
        self._close()

    def on_exception(self, exception: BaseException) -> None:  # noqa: ARG002
        """Stop all workers: Lightning calls no teardown after an exception."""
        self._close()

    def _close(self) -> None:
        if self._collector is not None:
            self._collector.shutdown()
            self._collector = None
