"""Rounds under Lightning: begun, ended, published, saved and taken up again.

Shapes: N environments, T steps of a round; B samples of it.
"""

from __future__ import annotations

import contextlib
import copy
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from typing import Any, ClassVar, Self

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.optim import Optimizer

from hts_torchrl.allocator import keep_freed_memory
from hts_torchrl.collectors.round_source import RoundSource
from hts_torchrl.compat.lightning import (
    FitLoop,
    class_alone,
    requeue_signals,
    set_logged_steps,
)
from hts_torchrl.deferred_interrupt import DeferredInterrupt
from hts_torchrl.errors import ConfigurationError, ProtocolError
from hts_torchrl.learner.delayed_gradient import DelayedGradient, DelayedWeights
from hts_torchrl.learner.finite import likely_causes, require_finite_gradients
from hts_torchrl.learner.gradient_chunks import GradientChunks
from hts_torchrl.learner.optimizers import COMPUTES_AGAIN
from hts_torchrl.learner.policy_module import PolicyModule
from hts_torchrl.learner.restored import load_from_checkpoint
from hts_torchrl.learner.resumption import (
    Resumption,
    describe,
    leave_loadable,
    require_same_network,
    require_saved,
)
from hts_torchrl.learner.seeded_draws import SeededDraws
from hts_torchrl.policy.forward import probabilistic_module
from hts_torchrl.policy.limits import require_called
from hts_torchrl.policy.normalization import NormalizedPolicy, RunningStatistics
from hts_torchrl.rng import update_seed
from hts_torchrl.schedule import DELAYS
from hts_torchrl.training.evaluation import Evaluation
from hts_torchrl.training.extended_hooks import (
    is_of_the_user,
    of_one_optimizer,
    refuse_replaced_hooks,
)
from hts_torchrl.training.round_slice import RoundSlice
from hts_torchrl.training.run_settings import for_loggers
from hts_torchrl.training.trainer_limits import warn_of_one_epoch

_WHOLE = -1
"""In the place of a part's index: what is drawn beside the parts of a round."""


class RoundState(Enum):
    """How far the learner is in a round: LEARNED and STEPPING for each step, then MOVED, ENDED."""

    ENDED = "no round is being learned from"
    LEARNED = "a loss was computed since the last step"
    STEPPING = "the optimiser was given its gradient"
    MOVED = "the optimiser has made its last step on the round"


class RoundStart:
    """All as it was before a round: what a checkpoint of a round that is cut off holds.

    Such a round is learned again from its start, and the Trainer must not have counted any of its
    parts by then::

        note_trainer(trainer, ...)      between two of its batches
        note_module(module)             with it
        put_into(checkpoint, ...)       of a checkpoint that is saved before the round ends
    """

    def __init__(self) -> None:
        self.has_optimizers = False
        """Whether it has what moves with the steps of optimisers."""
        self._loop: dict[str, Any] = {}
        self._entries: dict[str, Any] = {}
        """Of a checkpoint."""
        self._not_trained: dict[str, Any] = {}
        """What its weights have of the module, without those that the policy learns by."""

    def note_trainer(self, trainer: Trainer, *, copy_optimizers: bool) -> None:
        """Keep the counts, and with ``copy_optimizers`` what steps before a round's last part."""
        self.has_optimizers = copy_optimizers
        self._loop = trainer.fit_loop.state_dict()
        self._entries = {"global_step": trainer.global_step}
        if copy_optimizers:
            states = [trainer.strategy.optimizer_state(each) for each in trainer.optimizers]
            schedules = [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]
            moving = {"optimizer_states": states, "lr_schedulers": schedules}
            self._entries |= copy.deepcopy(moving)

    def note_module(self, module: nn.Module) -> None:
        """Keep what is saved of a module with a ``policy``, but for what of that is trained.

        A frozen part of the policy may be an average, which a user moves with each step.
        """
        named = module.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in named if not parameter.requires_grad}
        self._not_trained = {
            name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for name, value in module.state_dict().items()
            if name in frozen or not name.startswith("policy.")
        }

    def put_into(self, checkpoint: dict[str, Any], policy: Mapping[str, Tensor]) -> None:
        """Replace what has moved since; a checkpoint of weights alone has no more than counts.

        ``policy`` has its weights at the start of the round, by name.
        """
        # WeightAveraging keeps its averages under state_dict.
        current = checkpoint.get("current_model_state", checkpoint["state_dict"])
        current.update({f"policy.{name}": weights for name, weights in policy.items()})
        current.update({k: v for k, v in self._not_trained.items() if k in current})
        checkpoint.update({k: v for k, v in self._entries.items() if k in checkpoint})
        FitLoop.replace(checkpoint, self._loop)


class RoundModule(PolicyModule):
    """A policy that is trained on rounds: handles what happens between two of them.

    A subclass implements ``training_step`` and ``configure_optimizers``, and has only its own
    settings; :class:`Learner` also has the usual ones. The data module's loader and the Trainer
    call it, ``parts_per_round`` times for each round::

        before_round()                      # the last round is finished
        with learning_from(part): ...       # in training_step; the first part begins the round
        optimizer_step(...)                 # after the last part: on_round_end(), updates += 1
        on_train_batch_end(...)             # after the last part: publishes the newest weights

    For ``validate``, ``test`` and ``predict`` it plays episodes; ``module(observation)`` returns
    greedy actions.

    Args:
        policy: an actor-critic; None builds ``network`` for the data module's environment.
        network: ``nature``, ``nips``, ``impala``, ``seed``, ``mlp`` or ``module.Class`` of a trunk;
            ``+lstm`` or ``+gru`` after it adds a memory, as ``lstm`` and ``gru`` alone do.
        squash: pass continuous actions through tanh into their bounds.

    Raises:
        ConfigurationError: for a policy under ``torch.compile``, or with code that only a call of
            the policy would run, because its modules are called one by one.
    """

    publishes_weights = True
    """Here, and not by the data module."""
    corrects_any_lag = False
    """Whether it can learn from data that is any number of updates old."""
    reads_all_outputs = False
    """Whether its rounds hold all ``out_keys`` of the policy, or action, log-probability and value.
    A class sets it, as ``reads_all_outputs = True``."""
    part: RoundSlice
    """What is being learned from."""
    lag: int
    """Updates by which the weights that collected the round trail the newest."""
    decay_steps: int | None = None
    """Steps of the optimiser in which the learning rate falls to 0, if it does."""

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401
        """Let several optimisers of a subclass be refused by its name."""
        super().__init_subclass__(**kwargs)
        if is_of_the_user(cls):
            cls.configure_optimizers = of_one_optimizer(cls.configure_optimizers)  # type: ignore[method-assign]

    def __init__(
        self, policy: nn.Module | None = None, *, network: str = "mlp", squash: bool = False
    ) -> None:
        super().__init__(policy, network=network, squash=squash)
        self.seed = 0
        """The data module's, which decides what is sampled for an update."""
        self.chunks = GradientChunks(1)
        """The parts of a round whose statistics are merged, and those that this rank has."""
        self._interrupt = DeferredInterrupt()
        self._round_state = RoundState.ENDED
        self._round_start = RoundStart()
        self._at_end = contextlib.ExitStack()
        """What is to be undone when ``fit`` ends, also by an exception."""
        self.resumption: Resumption | None = None
        """What the Trainer has yet to take up of the run that this one goes on with."""

    load_from_checkpoint: ClassVar[Callable[..., Self]] = class_alone(load_from_checkpoint)  # type: ignore[assignment]

    @property
    def hparams_initial(self) -> Any:  # noqa: ANN401 - Lightning's own dictionary
        """What loggers are told."""
        return for_loggers(super().hparams_initial)

    @property
    def parts_per_round(self) -> int:
        """Calls of ``training_step`` for each round."""
        return 1

    @property
    def settings_without_bits(self) -> Collection[str]:
        """Settings that decide no bit, and so may be others when a run goes on."""
        return ()

    @property
    def delayed(self) -> DelayedGradient:
        """The newest parameters, which are in place, and those that collected the round."""
        return self._weights.parameters

    @property
    def cut_off(self) -> bool:
        """Whether a checkpoint of now would lack the round's start, as optimisers have moved."""
        return self._round_state is RoundState.MOVED and not self._round_start.has_optimizers

    @property
    def _collector(self) -> RoundSource | None:
        return getattr(getattr(self.trainer, "datamodule", None), "collector", None)

    # A round, in the order of its calls

    def before_round(self) -> None:
        """Take note of where the run is: all of the last round is done, nothing of the next."""
        self._interrupt.release()
        if not self._weights.published:  # the first round begins with what callbacks have left
            self._weights.note_published()
        self.seeded_draws.begin_round(update_seed(self.seed, self.updates, _WHOLE), self.device)
        # Lightning's count of logged steps is one off after many a resume; it is this one.
        set_logged_steps(self.trainer, self.trainer.global_step)
        steps = self.parts_per_round // self.trainer.accumulate_grad_batches
        self._round_start.note_trainer(self.trainer, copy_optimizers=steps > 1)
        self._round_start.note_module(self)

    @contextlib.contextmanager
    def learning_from(self, part: RoundSlice) -> Iterator[None]:
        """Compute a loss of a part of a round; the first part begins the round.

        What is sampled meanwhile from torch's global generators (by a Dropout, or for an entropy
        without closed form) depends only on the run's seed, the update and the part.

        Args:
            part: the argument of ``training_step``.

        Raises:
            ConfigurationError: if the policy draws from other generators, the optimiser computes
                the loss several times a step, an iterator ends meanwhile, or that is no part of a
                Trainer's round.
            ProtocolError: if the round is older than the learner can correct.
        """
        if not (isinstance(part, RoundSlice) and hasattr(self, "_weights")):
            name = type(self).__name__
            raise ConfigurationError(
                f"{name} learns from rounds of trainer.fit(learner, datamodule=HTSDataModule(...)) "
                "alone: in a loop of your own, or with Fabric, give an HTSCollector's batches to a "
                "loss of TorchRL"
            )
        if self._round_state is not RoundState.LEARNED and part is getattr(self, "part", None):
            name = type(self.trainer.optimizers[0]).__name__
            raise ConfigurationError(f"optimizer {name}: {COMPUTES_AGAIN}")
        self.part = part
        seed = update_seed(self.seed, self.updates, part.index, self.global_rank)
        with self.seeded_draws.seeded(seed, self.actor_critic, part.round, self.device):
            self._take_unfrozen()
            if part.is_first:
                self._begin_round(part.round)
            self._round_state = RoundState.LEARNED
            try:
                yield
            except StopIteration as error:  # which Lightning takes for the end of the run
                name = type(self).__name__
                raise ConfigurationError(
                    f"{name}.training_step: an iterator that it reads has come to its end"
                ) from error

    def _take_unfrozen(self) -> None:
        """Take what a callback has unfrozen, perhaps between two parts; refuse what cannot move."""
        if not (unfrozen := self._weights.add_unfrozen()):
            return
        groups = (group for each in self.trainer.optimizers for group in each.param_groups)
        optimized = {id(parameter) for group in groups for parameter in group["params"]}
        if lacking := [name for name, each in unfrozen.items() if id(each) not in optimized]:
            raise ConfigurationError(
                f"the policy's {lacking[0]} is trained from now on, but no optimizer has it: "
                "freeze it in on_fit_start and not before, or let configure_optimizers give the "
                "optimizer self.parameters(), which leaves a frozen one as it is"
            )

    def _begin_round(self, batch: TensorDictBase) -> None:
        version = int(batch["collector", "policy_version"].flatten()[0])
        self.lag = self.updates - version
        if self.lag not in DELAYS and not self.corrects_any_lag:
            raise ProtocolError(
                f"the round was collected {self.lag} updates ago (policy_version {version}, "
                f"updates {self.updates}); {DELAYS[0]} or {DELAYS[1]} is possible"
            )
        lacks = self.normalizes and self._weights.lack_statistics(version)
        own = (each for each in self.children() if isinstance(each, RunningStatistics))
        self._gives_statistics_only = lacks or any(not each.count for each in own)
        self._weights.begin_round()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Stop a run whose gradients are not finite; learn nothing from a round without statistics.

        What the first weights collected was not normalised yet. Its gradients would lead away from
        what the same weights mean once statistics scale their inputs.

        Raises:
            ConfigurationError: if ``training_step`` has not used ``learning_from``.
        """
        if self._round_state is not RoundState.LEARNED:
            raise ConfigurationError(
                f"{type(self).__name__}.training_step: a part of a round is learned from within "
                "`with self.learning_from(part):`, also one of which it returns None"
            )
        batch, causes = self.part.round, likely_causes(self.actor_critic)
        first_env = self.global_rank * batch.shape[0]
        require_finite_gradients(self, optimizer, batch, causes, first_env=first_env)
        align_gradients(optimizer)
        self._round_state = RoundState.STEPPING
        if self._gives_statistics_only:
            optimizer.zero_grad()
        if self.part.is_last:
            self._interrupt.hold()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Step, and end the round after its last part: before a callback saves a checkpoint."""
        super().optimizer_step(*args, **kwargs)
        if self.part.is_last:
            self._round_state = RoundState.MOVED
            self.on_round_end()
            self.update_statistics()
            self._round_state = RoundState.ENDED
            self._weights.end_round(broadcast=self.trainer.world_size > 1)
            self.updates += 1

    def update_statistics(self) -> None:
        """Take note of all that the round holds, after its last step of the optimiser."""
        if isinstance(self.policy, NormalizedPolicy):
            self.policy.normalizer.update(*self.chunks.of(self.part.round))

    def on_round_end(self) -> None:
        """Called after the last step of the optimizer on a round; does nothing by default."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:  # noqa: ANN401
        """Step a schedule; what it monitors is rank 0's on all ranks, or their rates would part."""
        if metric is not None:
            metric = self.trainer.strategy.broadcast(metric)
        super().lr_scheduler_step(scheduler, metric)

    def on_train_batch_end(self, outputs: Any, batch: RoundSlice, batch_idx: int) -> None:  # noqa: ANN401, ARG002
        """Publish the weights after the last part of a round.

        Raises:
            ConfigurationError: if a subclass has left out the step that ends the round, or a
                callback has changed how many parts there are, or after how many there is a step.
        """
        if (several := self.trainer.accumulate_grad_batches) != self._accumulates:
            raise ConfigurationError(
                f"accumulate_grad_batches={several}, but the run began with {self._accumulates}, "
                "which decides the steps on a round: leave it as it is within a run"
            )
        if (parts := self.parts_per_round) != batch.count:
            raise ConfigurationError(
                f"{type(self).__name__}.parts_per_round={parts} (of PPO and PQN epochs times "
                f"minibatches), but the run began with {batch.count}: leave it as it is within a "
                "run, and return None for a part that is to change nothing"
            )
        if batch.is_last and self._round_state is not RoundState.ENDED:
            raise ConfigurationError(
                f"{type(self).__name__}.optimizer_step: a round ends with a step after its last "
                "part, so super().optimizer_step(...) must be called there"
            )
        if batch.is_last and self._collector is not None:
            self._collector.update_policy_weights_(self.actor_critic)
        if batch.is_last:
            self._weights.note_published()
            self.seeded_draws.end_round()

    def validation_step(self, evaluation: Evaluation, index: int) -> None:
        """Play an evaluation, as Ctrl-C may end it."""
        self._interrupt.release()
        super().validation_step(evaluation, index)

    # A run: what happens at its start, and at its end

    def on_fit_start(self) -> None:
        """Take the behaviour weights of the first round.

        Raises:
            ConfigurationError: if a subclass has replaced ``configure_model``, or the policy has
                code that only a call of it would run.
        """
        refuse_replaced_hooks(self)
        require_called(self.actor_critic, learns=True)  # hooks may have come since it was given
        keep_freed_memory()
        if self.resumption is not None:
            self.resumption.place_loops()
        self._accumulates = getattr(self._trainer, "accumulate_grad_batches", 1)
        require_saved(self)
        self._weights = DelayedWeights(self.actor_critic)
        probabilistic_module(self.actor_critic)  # which refuses a policy that has none
        self._round_state = RoundState.ENDED

    def on_train_start(self) -> None:
        """Take up a run that goes on: its acting weights, and rates that are others now."""
        warn_of_one_epoch(self.trainer)
        if self._collector is not None and self._collector.acting_weights is not None:
            self._weights.set_behaviour(self._collector.acting_weights)
        data = getattr(self.trainer, "datamodule", None)
        self.seed = int(getattr(data, "seed", 0))
        debug = bool(getattr(getattr(data, "pool", None), "debug", False))
        self.seeded_draws = SeededDraws(inspects=True, watches=debug)
        self._interrupt = DeferredInterrupt([signal.SIGINT, *requeue_signals(self.trainer)])
        if self.resumption is not None:
            self.resumption.set_rates(decay_steps=self.decay_steps)
            self.resumption = None

    def on_fit_end(self) -> None:
        """Let an interrupt through that was put off, and undo what ``fit`` has set."""
        self._interrupt.release()
        self.leave_round()

    def leave_round(self) -> None:
        """Undo what ``fit`` has set; the data module calls it after an exception."""
        self.resumption = None  # of a run that could not go on, or had nothing to do
        self.seeded_draws.end_round()
        # on_train_batch_start may end an epoch within a round, too.
        if hasattr(self, "_weights") and self.delayed.holds_behaviour:
            self.put_newest_back()
        self._at_end.close()

    def put_newest_back(self) -> None:
        """Put the newest weights in the place of those that collected the round."""
        self.delayed.restore_newest()

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep settings and updates; and before a round that was cut off, all as it was then."""
        checkpoint["updates"] = self.updates
        checkpoint["learner"] = describe(self)
        if self._round_state is not RoundState.ENDED:
            self._round_start.put_into(checkpoint, self._weights.newest())
        leave_loadable(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting updates.

        Raises:
            ConfigurationError: if the checkpoint is of no learner or of another network, or ``fit``
                would go on with other settings that decide bits, or from weights alone.
        """
        if not checkpoint.keys() >= {"learner", "updates"}:
            raise ConfigurationError(
                "the checkpoint is of no learner of hts_torchrl (it has no settings of one), and "
                f"a {type(self).__name__} cannot resume from it: give one that fit has written"
            )
        if self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            own = describe(self)
            for name in self.settings_without_bits:
                own["init_args"].pop(name, None)
            self.resumption = Resumption(self.trainer, checkpoint, own)
        if self.policy is not None:
            require_same_network(self, checkpoint["state_dict"])
        self.updates = checkpoint["updates"]


def align_gradients(optimizer: Optimizer) -> None:
    """Put gradients into the order of their weights' memory, by which fused steps go on the CPU."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.grad is not None and p.grad.stride() != p.stride():
            p.grad = torch.empty_like(p).copy_(p.grad)
