"""A policy under Lightning, trained by rounds: begun, ended, published, saved and taken up again.

Shapes: N environments, T steps of a round; B observations, which have a shape of their own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch import distributions as d
from torch.optim import Optimizer
from torchrl.modules import Delta, TanhDelta

from hts_torchrl.allocator import keep_freed_memory
from hts_torchrl.collectors.round_source import RoundSource
from hts_torchrl.compat.lightning import must_leave, requeue_signals, set_logged_steps
from hts_torchrl.compat.torch import compiles_calls, uncompiled
from hts_torchrl.errors import ConfigurationError, ProtocolError
from hts_torchrl.learner.deferred_interrupt import DeferredInterrupt
from hts_torchrl.learner.delayed_gradient import DelayedGradient, DelayedWeights
from hts_torchrl.learner.finite import require_finite_gradients
from hts_torchrl.learner.hooks import of_one_optimizer, refuse_replaced_hooks
from hts_torchrl.learner.modes import SeededDraws
from hts_torchrl.learner.optimizers import COMPUTES_AGAIN
from hts_torchrl.learner.resumption import Resumption, RoundStart
from hts_torchrl.models import make_actor_critic
from hts_torchrl.policy.as_policy import initialise
from hts_torchrl.policy.composite import is_composite
from hts_torchrl.policy.forward import (
    evaluate,
    evaluating,
    inputs_of,
    path_of,
    probabilistic_module,
)
from hts_torchrl.policy.inference import one_thread
from hts_torchrl.policy.limits import require_called
from hts_torchrl.policy.memory import memory_keys
from hts_torchrl.policy.normalization import NormalizedPolicy
from hts_torchrl.policy.projection import Projection
from hts_torchrl.policy.sampling import mode
from hts_torchrl.policy.sequence import evaluate_sequences
from hts_torchrl.policy.spec_json import spec_as_json
from hts_torchrl.rng import update_seed
from hts_torchrl.schedule import DELAYS
from hts_torchrl.settings import loadable
from hts_torchrl.specs import IS_INIT, EnvSpec, Key
from hts_torchrl.training.evaluation import EpisodeScores, Evaluation
from hts_torchrl.training.extended_hooks import is_of_the_user
from hts_torchrl.training.round_slice import RoundSlice
from hts_torchrl.training.run_settings import class_name, plain
from hts_torchrl.training.trainer_limits import warn_of_schedules

NO_VALUE = (
    "the policy has no value ('state_value'): an actor-critic is needed, such as network='mlp', "
    "hts_torchrl.ActorCritic or torchrl's ActorValueOperator"
)
_FEW = 64
"""Rows on which a policy is examined."""


class RoundModule(LightningModule):
    """A policy that is trained by rounds: what happens between two of them.

    A subclass writes ``training_step`` and ``configure_optimizers``, and has settings of its own
    only; :class:`Learner` has the usual ones besides. The data module's loader and the Trainer call
    it, ``parts_per_round`` times for each round::

        before_round()                      # all of the last round is done
        with learning_from(part): ...       # in training_step; the first part begins the round
        optimizer_step(...)                 # after the last part: on_round_end(), updates += 1
        on_train_batch_end(...)             # after the last part: publishes the newest weights

    For ``validate``, ``test`` and ``predict`` it plays episodes; ``module(observation)`` gives
    greedy actions.

    Args:
        policy: an actor-critic; None builds ``network`` for the data module's environment.
        network: ``nature``, ``nips``, ``impala``, ``seed``, ``mlp`` or ``module.Class`` of a trunk;
            ``+lstm`` or ``+gru`` after it adds a memory, as ``lstm`` and ``gru`` alone do.
        squash: pass continuous actions through tanh into their bounds.

    Raises:
        ConfigurationError: for a policy under ``torch.compile``, or with code that only a call of
            it would run: its modules are called one by one.
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

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401
        """Let several optimisers of a subclass be refused by its name."""
        super().__init_subclass__(**kwargs)
        if is_of_the_user(cls):
            cls.configure_optimizers = of_one_optimizer(cls.configure_optimizers)  # type: ignore[method-assign]

    def __init__(
        self, policy: nn.Module | None = None, *, network: str = "mlp", squash: bool = False
    ) -> None:
        super().__init__()
        if policy is not None and (uncompiled(policy) is not policy or compiles_calls(policy)):
            raise ConfigurationError(
                "a learner calls the modules of its policy one by one, so torch.compile(policy) "
                "would do nothing, nor would policy.compile(); compile modules within it, or set "
                "compile_policy for its actors"
            )
        if policy is not None:
            require_called(policy, learns=True)
        self.policy = policy
        self.policy_name = None if policy is None else class_name(policy)
        """Class of a policy of the user's own."""
        self.network, self.squash = network, squash
        self.updates = 0
        """Updates that the policy has had."""
        self.spec_json: dict[str, Any] | None = None
        """The spec that the policy was built for, as a checkpoint holds it."""
        self.seed = 0
        """The data module's, which decides what is drawn for an update."""
        self._draws = SeededDraws(inspects=False, watches=False)
        self._interrupt = DeferredInterrupt()
        self._round_open = False
        self._unscaled_version: int | None = None
        """Version of the weights, of this ``fit``, that had no statistics of observations."""
        self._lacks_statistics = False
        """Whether nothing was known to normalise by when the round was collected."""
        self._is_first_round = True
        """Of this ``fit``."""
        self._learns = False
        """Whether ``learning_from`` was given a part since the last step of the optimiser."""
        self._stepped_on: RoundSlice | None = None
        """The part whose gradient an optimiser has been given."""
        self._round_start: RoundStart | None = None
        self._beside_policy: dict[str, Any] = {}
        """What else a checkpoint has of the learner, at the start of the round."""
        self.resumption: Resumption | None = None
        """What the Trainer has yet to take up of the run that this one goes on with."""

    # The policy

    def configure_model(self) -> None:
        """Build the policy for the data module's environment, unless it was given.

        What a subclass builds behind ``super()`` is there too where a checkpoint is loaded without
        a Trainer.

        Raises:
            ConfigurationError: if there is neither a policy nor a data module, or a subclass has
                replaced a hook that is needed.
        """
        refuse_replaced_hooks(self)
        datamodule = getattr(self._trainer, "datamodule", None)
        if self.policy is None and datamodule is None:
            raise ConfigurationError("give fit a datamodule=HTSDataModule(...), or a policy")
        if datamodule is not None:
            self.prepare_policy(datamodule)

    def prepare_policy(self, datamodule: Any) -> None:  # noqa: ANN401 - may be of another class
        """Build the policy for a data module, unless it was given, and normalise if that asks to.

        Raises:
            ConfigurationError: if there is nothing to normalise, or no network for the environment.
        """
        if self.policy is None:
            self.build_policy(datamodule.env_spec)
        elif isinstance(self.policy, TensorDictModuleBase):
            initialise(self.policy, datamodule.env_spec)  # its weights are copied early
        if getattr(datamodule, "normalize_observation", False):
            self.normalize_observations(datamodule.env_spec)

    def build_policy(self, spec: EnvSpec) -> None:
        """Build ``network`` for an environment."""
        self.spec_json = spec_as_json(spec)
        with one_thread():  # the bits of an orthogonal initialisation depend on their number
            self.policy = self.make_policy(spec)

    def make_policy(self, spec: EnvSpec) -> nn.Module:
        """Return a new policy of ``network``; its weights are drawn from torch's generator."""
        return make_actor_critic(self.network, spec, squash=self.squash)

    def normalize_observations(self, spec: EnvSpec) -> None:
        """Put normalised observations before the policy, if they are not yet there."""
        if not isinstance(self.policy, NormalizedPolicy):
            self.policy = NormalizedPolicy(self.actor_critic, spec)

    @property
    def normalizes(self) -> bool:
        """Whether observations are normalised before the policy reads them."""
        return isinstance(self.policy, NormalizedPolicy)

    @property
    def actor_critic(self) -> nn.Module:
        """The policy, which exists from ``configure_model`` on."""
        if self.policy is None:
            raise ProtocolError("the policy is built when training or evaluation begins")
        return self.policy

    @property
    def observation_keys(self) -> list[Key]:
        """What the policy reads: observations, and what it remembers."""
        return inputs_of(self.actor_critic)

    @functools.cached_property
    def remembers(self) -> bool:
        """Whether the policy has a memory, and so learns from sequences."""
        return bool(memory_keys(self.actor_critic))

    def observations(self, source: TensorDictBase) -> dict[Key, Tensor]:
        """Return of a TensorDict what the policy reads, by key."""
        return {key: source[key] for key in self.observation_keys}

    def evaluate(self, samples: TensorDictBase) -> tuple[d.Distribution, Tensor]:
        """Run actor and critic once, with gradient; nothing is sampled.

        Args:
            samples: TensorDict ``[B]`` with all keys that the policy reads; sequences ``[N, T]`` of
                a policy with a memory, with ``is_init`` ``[N, T, 1]``.

        Returns:
            Distributions of actions, and the values of the observations, float32: ``[B]``, or
            ``[N, T]``. An action has one log-probability, also where its numbers have one each.

        Raises:
            ConfigurationError: if the policy has no critic, or values of another shape; or if its
                distributions leave nothing to chance.
        """
        inputs = self.observations(samples)
        if samples.ndim == 2:
            result = evaluate_sequences(self.actor_critic, inputs, samples[IS_INIT])
        else:
            result = evaluate(self.actor_critic, inputs, samples.shape[0])
        if result.value is None:
            raise ConfigurationError(NO_VALUE)
        found, wanted = tuple(result.value.shape), (*samples.shape, 1)
        if found != wanted:
            raise ConfigurationError(
                f"the policy's 'state_value' has shape {found}, but {wanted} is needed: one number "
                "for each observation, in a last dimension, as torchrl's ValueOperator gives it"
            )
        dist = result.distribution
        if isinstance(dist, Delta | TanhDelta):
            raise ConfigurationError(
                f"the policy draws from a {type(dist).__name__}, which has one action alone: its "
                "log-probability is infinite, and no gradient comes of it; a distribution with "
                "chance, such as torchrl's TanhNormal, is needed"
            )
        # torch's Normal by itself counts the numbers of an action apart.
        apart = len(dist.batch_shape) - samples.ndim
        if apart > 0:
            dist = d.Independent(dist, apart)
        return dist, result.value.float().squeeze(-1)

    # A round

    @property
    def parts_per_round(self) -> int:
        """Calls of ``training_step`` for each round."""
        return 1

    @property
    def delayed(self) -> DelayedGradient:
        """The newest parameters, which are in place, and those that collected the round."""
        return self._weights.parameters

    @property
    def _collector(self) -> RoundSource | None:
        return getattr(getattr(self.trainer, "datamodule", None), "collector", None)

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
        self._weights = DelayedWeights(self.actor_critic)
        self._round_open = self._learns = False
        self._stepped_on = self._unscaled_version = None
        self._is_first_round = True
        self._head = probabilistic_module(self.actor_critic)
        self._writes_parts = is_composite(self._head)

    def leave_round(self) -> None:
        """Put the newest weights back; the data module calls it after an exception."""
        if hasattr(self, "_weights") and self.delayed.holds_behaviour:
            self.put_newest_back()

    def put_newest_back(self) -> None:
        """Put the newest weights in the place of those that collected the round."""
        self.delayed.restore_newest()

    def on_train_start(self) -> None:
        """Take the weights with which a resumed run acts, one update behind those it learns."""
        warn_of_schedules(self.trainer)
        if self._collector is not None and self._collector.acting_weights is not None:
            self._weights.set_behaviour(self._collector.acting_weights)
        data = getattr(self.trainer, "datamodule", None)
        self.seed = int(getattr(data, "seed", 0))
        debug = bool(getattr(getattr(data, "pool", None), "debug", False))
        self._draws = SeededDraws(inspects=True, watches=debug)
        self._interrupt = DeferredInterrupt([signal.SIGINT, *requeue_signals(self.trainer)])

    def on_fit_end(self) -> None:
        """Let an interrupt through that was put off."""
        self._interrupt.release()

    def before_round(self) -> None:
        """Take note of where the run is: all of the last round is done, nothing of the next."""
        self._interrupt.release()
        # Lightning's count of logged steps is one off after many a resume; it is this one.
        set_logged_steps(self.trainer, self.trainer.global_step)
        steps = self.parts_per_round // self.trainer.accumulate_grad_batches
        self._round_start = RoundStart(self.trainer, copy_optimizers=steps > 1)

    @contextlib.contextmanager
    def learning_from(self, part: RoundSlice) -> Iterator[None]:
        """Compute a loss of a part of a round; the first part begins the round.

        What is drawn meanwhile from torch's global generators (by a Dropout, or for an entropy
        without closed form) is decided by the run's seed, the update and the part.

        Args:
            part: as ``training_step`` is given it.

        Raises:
            ConfigurationError: if the policy draws from other generators, or the optimiser computes
                the loss several times a step.
            ProtocolError: if the round is older than the learner can correct.
        """
        if part is self._stepped_on:
            name = type(self.trainer.optimizers[0]).__name__
            raise ConfigurationError(f"optimizer {name}: {COMPUTES_AGAIN}")
        self.part, self._learns = part, True
        seed = update_seed(self.seed, self.updates, part.index, self.global_rank)
        few = partial(self._few_observations, part.round)
        with self._draws.seeded(seed, self.actor_critic, few, self.device):
            if part.is_first:
                self._begin_round(part.round)
            self._weights.add_unfrozen()  # a callback may unfreeze between two parts
            yield

    def _few_observations(self, batch: TensorDictBase) -> dict[Key, Tensor]:
        return {key: rows.flatten(0, 1)[:_FEW] for key, rows in self.observations(batch).items()}

    def _begin_round(self, batch: TensorDictBase) -> None:
        version = int(batch["collector", "policy_version"].flatten()[0])
        self.lag = self.updates - version
        if self.lag not in DELAYS and not self.corrects_any_lag:
            raise ProtocolError(
                f"the round was collected {self.lag} updates ago (policy_version {version}, "
                f"updates {self.updates}); {DELAYS[0]} or {DELAYS[1]} is possible"
            )
        if self._is_first_round and self.normalizes and not self._weights.have_statistics:
            self._unscaled_version = version
        self._is_first_round = False
        self._lacks_statistics = self._has_no_statistics(version)
        self._weights.begin_round()
        self._beside_policy = self._copies_beside_policy()
        self._round_open = True

    def _copies_beside_policy(self) -> dict[str, Any]:
        kept: dict[str, Any] = {
            **dict(self.named_parameters(recurse=False, remove_duplicate=False)),
            **dict(self.named_buffers(recurse=False, remove_duplicate=False)),
        }
        for name, module in self._modules.items():
            if name != "policy" and module is not None:
                kept |= module.state_dict(prefix=f"{name}.")
        return {
            name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for name, value in kept.items()
        }

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Stop a run whose gradients are not finite; learn nothing from a round without statistics.

        What the first weights collected was not normalised yet. Its gradients would lead away from
        what the same weights mean once statistics scale their inputs.

        Raises:
            ConfigurationError: if ``training_step`` has not used ``learning_from``.
        """
        if not self._learns:
            raise ConfigurationError(
                f"{type(self).__name__}.training_step: a part of a round is learned from within "
                "`with self.learning_from(part):`, also one of which it returns None"
            )
        require_finite_gradients(
            self,
            optimizer,
            self.part.round,
            self._likely_causes(),
            first_env=self.global_rank * self.part.round.shape[0],
        )
        self._stepped_on = self.part
        if self._lacks_statistics:
            optimizer.zero_grad()
        if self.part.is_last:
            self._interrupt.hold()

    def _has_no_statistics(self, version: int) -> bool:
        """Return whether weights of that version collected by nothing that could normalise."""
        return version == self._unscaled_version

    def _likely_causes(self) -> Iterator[Key]:
        """Yield what in a round may have made a gradient infinite or NaN."""
        yield ("next", "reward")
        yield from (("next", *path_of(key)) for key in self.observation_keys)
        yield from self.observation_keys
        yield "state_value"
        yield from self._head.log_prob_keys

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Step, and end the round after its last part: before a callback saves a checkpoint."""
        super().optimizer_step(*args, **kwargs)
        self._stepped_on, self._learns = None, False
        if self.part.is_last:
            self.on_round_end()
            self.update_statistics()
            self._round_open = False
            self._weights.end_round(broadcast=self.trainer.world_size > 1)
            self.updates += 1

    def update_statistics(self) -> None:
        """Take note of all that the round holds, after its last step of the optimiser."""
        if isinstance(self.policy, NormalizedPolicy):
            self.policy.normalizer.update(*self.chunks_of_round())

    def chunks_of_round(self) -> list[TensorDictBase]:
        """Return the round in the parts whose statistics are merged: here in one, ``[N, T]``."""
        return [self.part.round]

    def on_round_end(self) -> None:
        """Called after the last step of the optimiser on a round; does nothing by itself."""

    def on_train_batch_end(self, outputs: Any, batch: RoundSlice, batch_idx: int) -> None:  # noqa: ANN401, ARG002
        """Publish the weights after the last part of a round.

        Raises:
            ConfigurationError: if a subclass has left out the step that ends the round.
        """
        if batch.is_last and self._round_open:
            raise ConfigurationError(
                f"{type(self).__name__}.optimizer_step: a round ends with a step after its last "
                "part, so super().optimizer_step(...) must be called there"
            )
        if batch.is_last and self._collector is not None:
            self._collector.update_policy_weights_(self.actor_critic)

    # Answers, and evaluation

    def forward(self, observation: Tensor | TensorDictBase) -> Tensor | TensorDictBase:
        """Return the greedy actions for B observations: the likeliest category, or the mean.

        Args:
            observation: ``[B, *shape]`` of the policy's one observation, or a TensorDict ``[B]``
                with all keys that the policy reads.

        Returns:
            Actions ``[B, *shape]`` in the form that the environment takes; of a policy that writes
            their parts a TensorDict ``[B]`` of these.

        Raises:
            ConfigurationError: for a tensor, if the policy reads several observations.
        """
        keys = self.observation_keys
        if isinstance(observation, TensorDictBase):
            given = self.observations(observation)
        elif len(keys) == 1:
            given = {keys[0]: observation}
        else:
            raise ConfigurationError(f"the policy reads {keys}: give a TensorDict with these")
        rows = next(iter(given.values())).shape[0]
        with torch.no_grad(), evaluating(self.actor_critic):
            action = mode(evaluate(self.actor_critic, given, rows).distribution)
        head = probabilistic_module(self.actor_critic)
        project = Projection(head, self.device)
        if isinstance(action, TensorDictBase):
            return action.update(project(dict(action.items(True, True))))
        (key,) = head.dist_sample_keys
        return project({key: action})[key]

    def validation_step(self, evaluation: Evaluation, _: int) -> None:
        """Play the evaluation's episodes and log the raw scores, ``eval/score`` and more."""
        self._interrupt.release()
        self._log_scores(evaluation, "eval")

    def test_step(self, evaluation: Evaluation, _: int) -> None:  # noqa: PT019 - no test of ours
        """Play the evaluation's episodes and log the raw scores, ``test/score`` and more."""
        self._log_scores(evaluation, "test")

    def predict_step(self, evaluation: Evaluation, _: int) -> dict[str, Tensor]:
        """Play the evaluation's episodes; return each one's raw score and its length in steps.

        Returns:
            ``score``, float64 ``[episodes]``, and ``length``, int64 ``[episodes]``.
        """
        result = self._play(evaluation)
        return {
            "score": torch.from_numpy(result.scores),
            "length": torch.from_numpy(result.lengths),
        }

    def _play(self, evaluation: Evaluation) -> EpisodeScores:
        on_device = replace(evaluation, device=str(self.device))
        return on_device.run(self.actor_critic, after_step=self._obey_sigterm)

    def _obey_sigterm(self) -> None:
        if must_leave(self):
            raise SIGTERMException

    def _log_scores(self, evaluation: Evaluation, group: str) -> None:
        result = self._play(evaluation)
        self.log_dict(
            {
                f"{group}/score": float(result.scores.mean()),
                f"{group}/score_std": float(result.scores.std()),
                f"{group}/episode_length": float(result.lengths.mean()),
                f"{group}/updates": float(self.updates),
            },
            batch_size=len(result.scores),
            sync_dist=True,
        )

    # Checkpoints

    def _description(self) -> dict[str, Any]:
        """Return class, hyperparameters and policy as plain data."""
        given = {k: v for k, v in self.hparams.items() if k != "policy" and not k.startswith("_")}
        return {
            "class_path": class_name(self),
            "init_args": plain(given),
            "policy": self.policy_name,
            "parts_per_round": self.parts_per_round,
            "spec": self.spec_json,
            "normalize_observation": self.normalizes,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep settings and updates; and before a round that was cut off, all as it was then."""
        # Modules are there once more, as objects: the policy where a subclass saves its
        # hyperparameters, and others that are arguments of its constructor.
        given = checkpoint.get("hyper_parameters", {})
        for name in [name for name, value in given.items() if isinstance(value, nn.Module)]:
            del given[name]
        checkpoint["updates"] = self.updates
        checkpoint["learner"] = self._description()
        if self._round_open:
            # WeightAveraging keeps its averages under state_dict.
            current = checkpoint.get("current_model_state", checkpoint["state_dict"])
            for name, weights in self._weights.newest().items():
                current[f"policy.{name}"] = weights
            current.update({k: v for k, v in self._beside_policy.items() if k in current})
            if self._round_start is not None:
                self._round_start.put_into(checkpoint)
        for part in ("learner", "hyper_parameters", "optimizer_states", "lr_schedulers"):
            if part in checkpoint:
                checkpoint[part] = loadable(checkpoint[part])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting updates.

        Raises:
            ConfigurationError: if the checkpoint is of another network, or ``fit`` would go on with
                other settings that decide bits, or from weights alone.
        """
        if self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            if "optimizer_states" not in checkpoint:
                raise ConfigurationError(
                    "the checkpoint has weights alone, as ModelCheckpoint(save_weights_only=True) "
                    "writes it, and no run can go on from it; load_from_checkpoint(...) gives a "
                    "learner with them, which begins a new run"
                )
            self.resumption = Resumption(self.trainer, checkpoint, self._description())
        own = {name: tuple(value.shape) for name, value in self.state_dict().items()}
        saved = {name: tuple(value.shape) for name, value in checkpoint["state_dict"].items()}
        names = {*own, *saved} if self.strict_loading else own.keys() & saved.keys()
        differing = sorted(name for name in names if own.get(name) != saved.get(name))
        if self.policy is not None and differing:
            name = differing[0]
            raise ConfigurationError(
                f"the checkpoint is of another network: its {name} has shape {saved.get(name)}, "
                f"but {own.get(name)} is needed"
            )
        self.updates = checkpoint["updates"]
