"""The data module: rounds for training, episodes for evaluation."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from dataclasses import replace
from typing import Any, Self, get_args

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerStatus
from tensordict import TensorDictBase

from hts_torchrl.collectors.asynchronous import AsynchronousCollector
from hts_torchrl.collectors.handing_out import on_device
from hts_torchrl.collectors.hts import HTSCollector
from hts_torchrl.collectors.round_source import RoundSource
from hts_torchrl.compat.lightning import leaving_at_sigterm, monitoring_alike
from hts_torchrl.config import MOST_ENVS, PRECISIONS, Collection, CollectorSettings, Precision
from hts_torchrl.envs.group import EnvFactory
from hts_torchrl.envs.make_group import env_spec_of
from hts_torchrl.errors import ConfigurationError, require, require_counts
from hts_torchrl.policy.as_policy import as_policy
from hts_torchrl.settings import plain_value, takes_settings
from hts_torchrl.specs import EnvSpec
from hts_torchrl.training.callbacks.round_end import (
    StopAfterRound,
    UnswappedAverages,
    WeightPublisher,
    place_callbacks,
)
from hts_torchrl.training.callbacks.stop_together import StopTogether
from hts_torchrl.training.data_state import DataState, deciding_bits
from hts_torchrl.training.evaluation import Evaluation, EvaluationLoader
from hts_torchrl.training.extended_hooks import require_extended
from hts_torchrl.training.ranks import require_alike, require_same_start
from hts_torchrl.training.round_slice import RoundLoader, RoundSlice
from hts_torchrl.training.run_settings import Changes, for_loggers
from hts_torchrl.training.trainer_limits import (
    evaluation_interval,
    parts_of_epoch,
    parts_of_round,
    require_fitting,
)

_THREADS = "OMP_NUM_THREADS"
_HOOKS = {"setup", "teardown", "on_exception", "state_dict", "load_state_dict"}
"""Lightning's, which a subclass extends and may not replace."""


class _NoCollectorError(ConfigurationError, AttributeError):
    """There is no collector now, and ``hasattr`` says so."""


@takes_settings(CollectorSettings, besides=("first_env", "reward_discount"))
class HTSDataModule(LightningDataModule):
    """Collects rounds while the learner learns, and evaluates in separate environments.

    One epoch of the Trainer is the whole run: use ``Trainer(max_epochs=1)``. The collector is built
    when training begins and closed at its end, also after an exception.

    The module that learns is a :class:`Learner`, or any LightningModule with a ``policy`` and a
    ``training_step(part, index)`` for a :class:`RoundSlice`. The weights of such a policy are
    published after each round; a ``validation_step(evaluation, index)`` is given an
    :class:`Evaluation` to play.

    Args:
        env: factory of the environments, such as ``AtariEnvs`` or ``GymEnvs``; in a program also
            anything that :class:`HTSCollector` accepts as ``create_env_fn``.
        total_frames: steps of the whole run. This, ``num_envs`` and ``frames_per_batch`` are totals
            over all ranks, and each rank has an equal share.
        collection: ``rounds`` is this package's method; ``actors`` (IMPALA) and ``server`` (SEED
            RL) are asynchronous baselines for the learner ``Impala``, on the CPU and one rank.
            ``num_actors``, ``delay``, ``step_barrier``, ``recover`` and ``timeout_s`` have no
            effect on them: nobody looks for a worker that hangs.
        policy_device: device of the actors; None is the learner's.
        cudagraph_policy: replay each pass of an actor on a GPU as one CUDA graph, with the bits of
            a plain pass.
        normalize_observation: normalise float observations, and images for this package's networks,
            to mean 0 and variance 1, by running statistics of all finished rounds that are frozen
            in evaluation. A ``RoundModule`` does not learn from rounds of the first weights,
            which only give statistics.
        normalize_reward: divide the rewards that are learned from by the running standard deviation
            of discounted returns; scores are not changed.
        resume_envs: save the running games in checkpoints and continue them, so that a resumed run
            has the bits of one that was never stopped; False starts new games.
        accept_changes: resume from a checkpoint even if settings that affect the bits differ; the
            log says which, and from which update on.
        evaluation_episodes: games of each evaluation.
        evaluation_frames: steps between evaluations; if they divide the run, its end is evaluated
            too. None evaluates only at the end.
        evaluation_greedy: play greedy actions instead of sampled ones.
    """

    def __init__(  # noqa: PLR0913 - flags of the command line, keyword only
        self,
        env: EnvFactory,
        *,
        total_frames: int,
        collection: Collection = "rounds",
        policy_device: str | None = None,
        cudagraph_policy: bool = False,
        normalize_observation: bool = False,
        normalize_reward: bool = False,
        resume_envs: bool = True,
        accept_changes: bool = False,
        evaluation_episodes: int = 10,
        evaluation_frames: int | None = None,
        evaluation_greedy: bool = False,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        super().__init__()
        total_frames = plain_value("total_frames", total_frames, "int")
        if total_frames < 1:
            raise ConfigurationError(
                f"total_frames={total_frames}; the Trainer needs an end: give a positive count"
            )
        # Refused here rather than when training begins.
        self.pool = CollectorSettings(total_frames=total_frames, **settings)
        self.schedule, self.seed = self.pool.schedule, self.pool.seed
        self.env = env
        self.collection = collection
        self.policy_device, self.cudagraph_policy = policy_device, cudagraph_policy
        self.normalize_observation, self.normalize_reward = normalize_observation, normalize_reward
        self.resume_envs = resume_envs
        self.accept_changes = accept_changes
        self.evaluation_episodes = evaluation_episodes
        self.evaluation_frames = evaluation_frames
        self.evaluation_greedy = evaluation_greedy
        self._refuse_settings()
        self._collector: RoundSource | None = None
        self._publisher: WeightPublisher | None = None
        """For a module that does not publish its weights itself."""
        self._share = self.pool
        """This rank's part of it, from ``setup`` on."""
        self.parts_per_epoch = 0
        """Batches of the Trainer in each of its epochs, from ``setup`` on."""
        self._has_threads = _THREADS in os.environ
        """Whether the user has chosen those of workers, before Lightning has set any."""
        self._at_end = contextlib.ExitStack()
        """Puts back what a fit sets otherwise in the Trainer: its interval, its least epochs."""
        self._moved: TensorDictBase | None = None
        """The running round on a learner's GPU, for all of its parts."""
        self._state = DataState(self)
        self.save_hyperparameters({})  # saves none, and lets loggers ask for hparams_initial

    @property
    def hparams_initial(self) -> Any:  # noqa: ANN401 - Lightning's own dictionary
        """What loggers are told: settings that decide bits, under ``data``, and a subclass's own.

        Others may change when a run goes on, and MLflow refuses to be told another value.
        """
        told = for_loggers(super().hparams_initial)
        of_module = getattr(getattr(self.trainer, "lightning_module", None), "hparams", {})
        if "data" not in of_module:  # Lightning refuses two values of a name
            told["data"] = deciding_bits(self._state.settings)
        return told

    @classmethod
    def load_from_checkpoint(cls, *arguments: Any, **settings: Any) -> Self:  # noqa: ANN401
        """Do what Lightning does, for a subclass that saves its hyperparameters.

        Args:
            arguments: Lightning's.
            settings: Lightning's; those of the class count more than the checkpoint's.

        Raises:
            ConfigurationError: if an environment factory is missing, which no checkpoint has.
        """
        try:
            loaded: Self = super().load_from_checkpoint(*arguments, **settings)
        except TypeError as error:
            raise ConfigurationError(
                f"{cls.__name__}.load_from_checkpoint: {error}; a checkpoint has no environment "
                "factory: make the data module as before, and fit(learner, data, ckpt_path=...)"
            ) from error
        return loaded

    def _refuse_settings(self) -> None:
        for name, own in inspect.signature(HTSDataModule).parameters.items():
            if hasattr(self, name):
                value = plain_value(name, getattr(self, name), str(own.annotation))
                setattr(self, name, value)
        require_counts(self, "evaluation_episodes", "evaluation_frames")
        if self.evaluation_episodes > MOST_ENVS:
            raise ConfigurationError(
                f"evaluation_episodes={self.evaluation_episodes}; at most {MOST_ENVS} is possible"
            )
        form, known = self.collection, get_args(Collection)
        require(form in known, f"collection={form!r}", f"one of {', '.join(known)}")

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: settings and the state of the last run, but no Trainer."""
        of_a_fit = {"trainer": None, "_collector": None, "_publisher": None, "_moved": None}
        return {**vars(self), **of_a_fit, "_at_end": contextlib.ExitStack()}

    def __str__(self) -> str:
        """Return what ``repr`` does: Lightning would start a collector to ask how long it is."""
        return repr(self)

    @functools.cached_property
    def env_spec(self) -> EnvSpec:
        """Observations and actions of the environments; makes one to ask it."""
        with torch.device("cpu"):  # the Trainer asks where tensors are made on the learner's GPU
            return env_spec_of(self.env)

    @property
    def collector(self) -> RoundSource:
        """The collector of the running training.

        Raises:
            ConfigurationError: outside of training.
        """
        if self._collector is None:
            raise _NoCollectorError("the collector exists during training only")
        return self._collector

    @property
    def first_round(self) -> int:
        """The round with which a run that was loaded goes on."""
        return self._state.first_round

    @property
    def _trainer(self) -> Trainer:
        if self.trainer is None:
            raise ConfigurationError(
                f"no Trainer has this {type(self).__name__} yet: call trainer.fit(learner, "
                "datamodule), or take rounds from a hts_torchrl.HTSCollector"
            )
        return self.trainer

    @property
    def _precision(self) -> Precision:
        return self._trainer.precision  # type: ignore[return-value]

    def setup(self, stage: str) -> None:
        """Ask for an evaluation every ``evaluation_frames``, in the Trainer's own count.

        Raises:
            ConfigurationError: if actors cannot compute in the Trainer's precision, or its epochs
                are more than the frames will do for; or a subclass has replaced a hook.
        """
        require_extended(type(self), _HOOKS, "the data module")
        trainer, precision = self._trainer, self._precision
        require(precision in PRECISIONS, f"precision={precision}", " or ".join(PRECISIONS))
        if stage != "fit":
            # EarlyStopping looks at it in the Trainer's first stage, which may be this one.
            if self.evaluation_frames and getattr(trainer, "val_check_interval", None) == 1.0:
                self._replace_interval(0.5)
            return
        if trainer.strategy.launcher is not None and not self._has_threads:
            os.environ.pop(_THREADS, None)  # Lightning's, for learners; a worker has one
        require_fitting(self, trainer)
        require_alike(trainer, self._state.run_settings(trainer))
        self._share = self.pool.of_rank(trainer.global_rank, trainer.world_size)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if trainer.world_size > 1 and not any(isinstance(e, StopTogether) for e in callbacks):
            callbacks.append(StopTogether())
        if trainer.world_size > 1:
            self._at_end.enter_context(monitoring_alike(trainer))
        own = getattr(trainer.lightning_module, "publishes_weights", False)
        self._publisher = None if own else WeightPublisher()
        min_epochs = trainer.min_epochs
        self._at_end.callback(setattr, trainer.fit_loop, "min_epochs", min_epochs)
        averages = any(isinstance(each, WeightAveraging) for each in callbacks)
        unswapped = UnswappedAverages() if averages else None
        added = [StopAfterRound(min_epochs), unswapped, self._publisher]
        place_callbacks(trainer, *filter(None, added))
        assert self.schedule.num_rounds is not None
        self.parts_per_epoch = parts_of_epoch(trainer, self.schedule.num_rounds)
        if (interval := evaluation_interval(self, trainer)) is not None:
            self._replace_interval(interval)

    @property
    def _updates(self) -> int:
        """Updates that the policy has had."""
        counting = self._publisher or self._trainer.lightning_module
        return int(getattr(counting, "updates", 0))

    def train_dataloader(self) -> RoundLoader:
        """Build the collector around the learner's policy and start its processes.

        Raises:
            ConfigurationError: if a subclass has replaced ``setup``, or no ``fit`` is running.
        """
        require_extended(type(self), _HOOKS, "the data module")
        if self._trainer.state.status != TrainerStatus.RUNNING:  # nobody would stop the workers
            raise ConfigurationError(
                f"{type(self).__name__}.train_dataloader() starts workers for a running fit: call "
                "trainer.fit(learner, datamodule), or take rounds from a hts_torchrl.HTSCollector"
            )
        self._close()
        require_same_start(self._trainer, self._updates)
        collector = _collector_of(self, self._share, self._trainer, self._precision)
        if self._publisher is not None:
            self._publisher.updates = int(self._state.loaded.get("policy_version", 0))
        self._state.begin(collector, self._updates, self._trainer.world_size)
        self._collector = collector  # not before: what could not be loaded has no state to save
        collector.start()
        learner: Any = self._trainer.lightning_module
        before_round = (lambda: None) if self._publisher else learner.before_round
        waiting = functools.partial(leaving_at_sigterm, learner)
        return RoundLoader(collector, parts_of_round(self._trainer), before_round, waiting)

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
        batch: Any,  # noqa: ANN401 - of a loader of the user's own, anything
        device: torch.device,
        dataloader_idx: int,
    ) -> Any:  # noqa: ANN401
        """Move a round once, with its first part; an evaluation has nothing to move."""
        if not isinstance(batch, RoundSlice | Evaluation):  # or a module's example_input_array
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        if isinstance(batch, Evaluation) or device.type == "cpu":
            return batch
        if batch.is_first:
            self._moved = on_device(batch.round, device)
        return replace(batch, round=self._moved)

    def state_dict(self) -> dict[str, Any]:
        """Return the collector's state at the start of the round that is to be learned next.

        On several ranks all must call this: rank 0, which writes the checkpoint, gets the games of
        all.
        """
        if self._collector is None:
            return self._state.final or self._state.loaded
        counting = self._publisher or self._trainer.lightning_module
        cut_off = bool(getattr(counting, "cut_off", False))
        return self._state.of(self._collector, self._trainer, self._updates, cut_off=cut_off)

    def changes_from(self, state_dict: dict[str, Any]) -> Changes:
        """Return what decides bits and is not as in a checkpoint, whose state of this module it is.

        A checkpoint of before there were settings in them has none that differ.
        """
        return self._state.changes_from(state_dict, self._trainer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for the collector that will be built.

        Raises:
            ConfigurationError: if ``fit`` would go on with other settings that decide bits, beyond
                its end, or with more games than there are.
        """
        self._state.load(state_dict, self.trainer)

    def teardown(self, stage: str) -> None:  # noqa: ARG002
        """Stop all workers; what they had come to can still be saved."""
        self._at_end.close()
        self._state.final = self.state_dict()
        place_callbacks(self._trainer)
        self._close()

    def on_exception(self, exception: BaseException) -> None:  # noqa: ARG002
        """Stop all workers: Lightning calls no teardown after an exception."""
        self._at_end.close()
        self._state.loaded = {}  # of a run that could not go on
        leave_round = getattr(self._trainer.lightning_module, "leave_round", None)
        if leave_round is not None:
            leave_round()
        self._close()

    def _replace_interval(self, interval: float) -> None:
        trainer = self._trainer
        self._at_end.callback(setattr, trainer, "val_check_interval", trainer.val_check_interval)
        trainer.val_check_interval = interval

    def _close(self) -> None:
        self._moved = None
        if self._collector is not None:
            self._collector.shutdown()
            self._collector = None


def _collector_of(
    data: HTSDataModule, share: CollectorSettings, trainer: Trainer, precision: Precision
) -> RoundSource:
    """Return a collector of a rank's share of a run, around the policy that learns."""
    learner = trainer.lightning_module
    policy: Any = getattr(learner, "policy", None)
    if not isinstance(policy, torch.nn.Module):
        raise ConfigurationError(
            f"{type(learner).__name__} has no policy: make one, an nn.Module such as "
            "make_actor_critic('mlp', data.env_spec), and keep it as self.policy"
        )
    if data.collection != "rounds":
        policy, form = as_policy(policy, data.env_spec), data.collection
        return AsynchronousCollector(
            data.env, policy, form=form, settings=data.pool, precision=precision
        )
    gamma = getattr(learner, "gamma", 0.99)
    return HTSCollector(
        data.env,
        policy,
        precision=precision,
        policy_device=data.policy_device or str(trainer.strategy.root_device),
        cudagraph_policy=data.cudagraph_policy,
        clone=False,  # no learner keeps a round
        all_outputs=getattr(learner, "reads_all_outputs", True),
        # Returns are discounted, and summed up, for the statistics of rewards alone.
        **vars(share) | {"reward_discount": float(gamma) if data.normalize_reward else None},
    )
