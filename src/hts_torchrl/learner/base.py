"""What all learners share: a LightningModule that turns a finished round into one update."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch import distributions as d
from torch.optim import Optimizer

from hts_torchrl.allocator import keep_freed_memory
from hts_torchrl.config import EnvSpec, Key
from hts_torchrl.delayed import DelayedGradient
from hts_torchrl.draws import update_seed
from hts_torchrl.errors import ConfigurationError, ProtocolError
from hts_torchrl.evaluation import EpisodeScores, Evaluation
from hts_torchrl.inference import one_thread
from hts_torchrl.learner.finite import require_finite_gradients
from hts_torchrl.learner.modes import evaluating, layers_of_two_modes
from hts_torchrl.learner.restored import restored
from hts_torchrl.learner.resumption import Resumption, learner_settings
from hts_torchrl.learner.round_start import RoundStart
from hts_torchrl.learner.shield import Shield
from hts_torchrl.models import make_actor_critic
from hts_torchrl.objectives.returns import gae_targets
from hts_torchrl.policy import evaluate, probabilistic_module
from hts_torchrl.policy_file import spec_as_json
from hts_torchrl.policy_probe import OTHERS, described, drawing_modules, noting_draws
from hts_torchrl.round_part import RoundPart
from hts_torchrl.run_settings import class_name
from hts_torchrl.sampling import borrowed_generators, mode


def require(condition: bool, setting: str, wanted: str) -> None:
    """Raise a ``ConfigurationError`` that names the setting unless ``condition`` holds."""
    if not condition:
        raise ConfigurationError(f"{setting}; {wanted} is needed")


# More than any machine has cores; the OpenMP runtime crashes when it cannot start them.
_MOST_THREADS = 1024


class Learner(LightningModule):
    """What A2C and PPO share: targets, the delay, the optimiser, publishing of weights.

    The Trainer does the rest (backward, clipping, accumulation, precision, schedules)::

        part 0:    targets of the round, under the weights that collected it
        each part: loss -> backward -> (the Trainer's) optimiser step
        last part: the newest weights are published for the round after the next

    A round's weights trail the newest by one update (``policy_version``), or by none.
    """

    parts_per_round = 1
    corrects_any_lag = False
    """Whether it can learn from data that is any number of updates old."""
    reads_all_outputs = False
    """Whether its rounds hold all ``out_keys`` of the policy, or the three that are needed."""

    def __init__(  # noqa: PLR0913
        self,
        policy: nn.Module | None,
        *,
        network: str,
        squash: bool,
        optimizer: Literal["adam", "rmsprop"],
        learning_rate: float,
        learning_rate_decay: bool,
        epsilon: float,
        gamma: float,
        gae_lambda: float,
        unroll: int | None,
        value_coef: float,
        entropy_coef: float,
        num_threads: int | None,
    ) -> None:
        super().__init__()
        require(optimizer in ("adam", "rmsprop"), f"optimizer={optimizer!r}", "adam or rmsprop")
        for name, number in (
            ("learning_rate", learning_rate),
            ("epsilon", epsilon),
            ("value_coef", value_coef),
            ("entropy_coef", entropy_coef),
        ):
            require(0 <= number < math.inf, f"{name}={number}", "a finite number of 0 or more")
        require(0 <= gamma <= 1, f"gamma={gamma}", "0 to 1")
        require(0 <= gae_lambda <= 1, f"gae_lambda={gae_lambda}", "0 to 1")
        require(unroll is None or unroll > 0, f"unroll={unroll}", "None, or 1 or more,")
        threads_work = num_threads is None or 0 < num_threads <= _MOST_THREADS
        require(threads_work, f"num_threads={num_threads}", f"None, or 1 to {_MOST_THREADS},")
        self.policy = policy
        self.updates = 0
        self._seed = 0
        self._is_inspected = True
        self._watches_draws = False
        self._layers_of_two_modes: list[nn.Module] = []
        self._round_open = False
        self._round_start: RoundStart | None = None
        self._resumption: Resumption | None = None
        self._spec: dict[str, Any] | None = None
        self.policy_name = None if policy is None else class_name(policy)
        """Class of a policy of the user's own."""
        self.decay_steps: int | None = None
        """Steps of the optimiser in which the learning rate falls to 0, if it does."""
        self._shield = Shield()
        self.network, self.squash = network, squash
        self.optimizer_name: Literal["adam", "rmsprop"] = optimizer
        self.learning_rate, self.learning_rate_decay = learning_rate, learning_rate_decay
        self.epsilon = epsilon
        self.gamma, self.gae_lambda, self.unroll = gamma, gae_lambda, unroll
        self.value_coef, self.entropy_coef = value_coef, entropy_coef
        self.num_threads = num_threads

    # Building

    @classmethod
    def load_from_checkpoint(  # type: ignore[override] # Lightning's is no plain class method
        cls,
        checkpoint_path: str | Path,
        map_location: Any = "cpu",  # noqa: ANN401 - as in torch.load
        **settings: Any,  # noqa: ANN401
    ) -> Self:
        """Return a learner with the settings and weights of a checkpoint; nothing in it is run.

        Args:
            checkpoint_path: of the file.
            map_location: where its tensors go.
            settings: arguments of the class that count more than the checkpoint's; ``policy``, the
                module to load into, is needed for one that is none of this package.

        Raises:
            ConfigurationError: if that is no checkpoint of such a learner, or its policy is not
                given.

        Example:
            >>> learner = PPO.load_from_checkpoint("best.ckpt")     # doctest: +SKIP
            >>> trainer.validate(learner, datamodule)               # doctest: +SKIP
        """
        return restored(cls, Path(checkpoint_path), map_location, settings)

    def configure_model(self) -> None:
        """Build the policy for the data module's environment, unless it was given."""
        if self.policy is None:
            datamodule = getattr(self.trainer, "datamodule", None)
            if datamodule is None:
                raise ConfigurationError("give fit a datamodule=HTSDataModule(...), or a policy")
            self.build_policy(datamodule.env_spec)

    def build_policy(self, spec: EnvSpec) -> None:
        """Build ``network`` for an environment."""
        self._spec = spec_as_json(spec)
        with one_thread():  # the bits of an orthogonal initialisation depend on their number
            self.policy = make_actor_critic(self.network, spec, squash=self.squash)

    def configure_optimizers(self) -> Any:  # noqa: ANN401 - Lightning accepts many forms
        """Return Adam or RMSprop, with linear decay to zero over the run if wanted."""
        assert self.policy is not None
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        if not parameters:
            raise ConfigurationError("the policy has no parameter that requires a gradient")
        optimizer: Optimizer
        if self.optimizer_name == "adam":
            optimizer = torch.optim.Adam(parameters, self.learning_rate, eps=self.epsilon)
        else:
            optimizer = torch.optim.RMSprop(
                parameters, self.learning_rate, alpha=0.99, eps=self.epsilon
            )
        if not self.learning_rate_decay:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise ConfigurationError("learning_rate_decay needs an end: set total_frames")
        self.decay_steps = int(steps)
        decay = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(0.0, 1 - step / steps)
        )
        return [optimizer], [{"scheduler": decay, "interval": "step"}]

    def on_fit_start(self) -> None:
        """Take the behaviour weights of the first round, and the learner's threads."""
        assert self.policy is not None
        keep_freed_memory()
        if self._resumption is not None:
            self._resumption.place_loops()
        self._delayed = DelayedGradient(self._trained().values())
        self._statistics = DelayedGradient(self._kept_buffers().values())
        self._round_open = False
        head = probabilistic_module(self.policy)
        self._log_prob_key: Key = head.log_prob_key
        self._action_key: Key = head.dist_sample_keys[0]
        self._threads = torch.get_num_threads()
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)

    def on_train_start(self) -> None:
        """Take the weights with which a resumed run acts, one update behind those it learns."""
        acting = getattr(self._collector, "acting_weights", None)
        if acting is not None:
            self._delayed.set_behaviour(acting[name] for name in self._trained())
            self._statistics.set_behaviour(acting[name] for name in self._kept_buffers())
        if self._resumption is not None:
            self._resumption.set_rates()
            self._resumption = None
        data = getattr(self.trainer, "datamodule", None)
        self._seed = int(getattr(data, "seed", 0))
        self._is_inspected = False
        self._watches_draws = bool(getattr(getattr(data, "crew", None), "debug", False))

    def _trained(self) -> dict[str, Tensor]:
        """Return the policy's parameters that are trained."""
        return {name: p for name, p in self.actor_critic.named_parameters() if p.requires_grad}

    def _kept_buffers(self) -> dict[str, Tensor]:
        """Return what else belongs to the weights, such as the statistics of a BatchNorm."""
        kept = self.actor_critic.state_dict()
        return {name: buffer for name, buffer in self.actor_critic.named_buffers() if name in kept}

    def on_fit_end(self) -> None:
        """Give the threads back."""
        self._shield.lower()
        torch.set_num_threads(self._threads)

    # A round

    def before_round(self) -> None:
        """Take note of where the run is: all of the last round is done, nothing of the next."""
        self._shield.lower()
        # Lightning's count of logged steps is one off after many a resume; it is this one.
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = self.trainer.global_step
        steps = self.parts_per_round // self.trainer.accumulate_grad_batches
        self._round_start = RoundStart(self.trainer, copy_optimizers=steps > 1)

    def training_step(self, part: RoundPart, _: int) -> Tensor:
        """Return the loss of one part of a round.

        What is drawn meanwhile from torch's global generators (by a Dropout, or for an entropy
        without closed form) is decided by the run's seed, the update and the part.
        """
        self._part = part
        with borrowed_generators(self.device) as seed:
            watched = self._watches_draws or not self._is_inspected
            if not self._is_inspected:
                self._inspect(part.round)
            seed(update_seed(self._seed, self.updates, part.index, self.global_rank))
            if part.is_first:
                self._begin_round(part.round)
            samples = self._taken(self._rows(part))
            self._before_forward(part)
            return self._watched_loss(samples) if watched else self._loss_of(samples)

    def _inspect(self, batch: TensorDictBase) -> None:
        """Look once, with the first observations, for layers that act differently in learning."""
        few = {key: rows.flatten(0, 1)[:_FEW] for key, rows in self._observations(batch).items()}
        self._layers_of_two_modes = layers_of_two_modes(self.actor_critic, few)
        self._is_inspected = True

    def _watched_loss(self, samples: TensorDictBase) -> Tensor:
        """Return the loss, unless a generator was drawn from that nobody seeds."""
        with noting_draws(OTHERS) as drawn:
            loss = self._loss_of(samples)
        few = self._observations(samples[:_FEW])
        for generator in drawn:
            # Run again, and a copy, because another thread may have drawn.
            names = drawing_modules(
                copy.deepcopy(self.actor_critic),
                lambda policy: evaluate(policy, few, len(samples[:_FEW])),
                generator,
            )
            if names:
                raise ConfigurationError(
                    f"the policy draws from {generator} in train mode, in "
                    f"{described(self.actor_critic, names)}: no checkpoint holds its state, and a "
                    "resumed run would differ; torch's generator is seeded for each update"
                )
        return loss

    def _loss_of(self, samples: TensorDictBase) -> Tensor:
        result = evaluate(self.actor_critic, self._observations(samples), samples.shape[0])
        if result.value is None:
            raise ConfigurationError(NO_VALUE)
        return self._loss(samples, result.distribution, result.value.float().squeeze(-1))

    def _taken(self, rows: Tensor | slice) -> TensorDictBase:
        """Return a part of the round's samples: a view of a slice, a copy of chosen rows."""
        if isinstance(rows, slice):
            return self._samples[rows]
        # index_select copies whole rows; indexing copies pixel by pixel, 8 times slower.
        return self._samples.apply(lambda t: t.index_select(0, rows), batch_size=[len(rows)])

    def _begin_round(self, batch: TensorDictBase) -> None:
        """Compute the round's targets under the weights that collected it."""
        versions = batch["collector", "policy_version"]
        self.lag = self.updates - int(versions.flatten()[0])
        if self.lag not in (0, 1):
            raise ProtocolError(
                f"the round was collected {self.lag} updates ago (policy_version "
                f"{int(versions.flatten()[0])}, updates {self.updates}); 0 or 1 is possible"
            )
        self._open_round()
        if "state_value" not in batch.keys():  # noqa: SIM118 - a TensorDict is no dict
            raise ConfigurationError(NO_VALUE)
        after = batch["next"]
        targets = gae_targets(
            reward=after["reward"],
            value=batch["state_value"],
            next_value=self._next_value(batch),
            done=after["done"],
            terminated=after["terminated"],
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            unroll=self.unroll,
        )
        self._samples = TensorDict(
            {
                **self._observations(batch),
                "action": batch[self._action_key],
                "behaviour_log_prob": batch[self._log_prob_key],
                "behaviour_value": batch["state_value"].squeeze(-1),
                "advantage": self._scale(targets.advantage.squeeze(-1)),
                "returns": targets.returns.squeeze(-1),
            },
            batch.shape,
        ).reshape(-1)

    def _open_round(self) -> None:
        """Keep the newest weights: those of a round that is cut off, and the next behaviour."""
        self._delayed.begin_round()
        self._statistics.begin_round()
        self._round_open = True

    def _next_value(self, batch: TensorDictBase) -> Tensor:
        """Shift the stored values by a step; evaluate what no actor saw: the true final ones."""
        after = batch["next"]
        next_value: Tensor = batch["state_value"].roll(-1, 1)
        unseen = after["truncated"].squeeze(-1).clone()
        unseen[:, -1] = True
        unseen &= ~after["terminated"].squeeze(-1)
        if unseen.any():
            if self.lag:
                self._delayed.load_behaviour()
                self._statistics.load_behaviour()
            next_value[unseen] = self._value_of(after.select(*self._observation_keys)[unseen])
            if self.lag:
                self._delayed.restore_newest()
                self._statistics.restore_newest()
        return next_value

    def _value_of(self, final: TensorDictBase) -> Tensor:
        """Return float32 values ``[B, 1]`` of observations that no actor saw, as an actor would."""
        policy = self.actor_critic
        with torch.no_grad(), evaluating(self._layers_of_two_modes):
            result = evaluate(policy, self._observations(final), final.shape[0])
        if result.value is None:
            raise ConfigurationError(NO_VALUE)
        return result.value.float()

    @property
    def actor_critic(self) -> nn.Module:
        """The policy, which exists from ``configure_model`` on."""
        if self.policy is None:
            raise ProtocolError("the policy is built when training or evaluation begins")
        return self.policy

    @property
    def _observation_keys(self) -> list[Key]:
        return list(self.actor_critic.in_keys)  # type: ignore[arg-type]

    def _observations(self, source: TensorDictBase) -> dict[Key, Tensor]:
        return {key: source[key] for key in self._observation_keys}

    def _scale(self, advantage: Tensor) -> Tensor:
        return advantage

    @abstractmethod
    def _rows(self, part: RoundPart) -> Tensor | slice:
        """Return the samples of a part."""

    @abstractmethod
    def _before_forward(self, part: RoundPart) -> None:
        """Put the weights into place at which the gradient is taken."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Stop a run whose gradients are not finite."""
        batch, seen = self._part.round, self._observation_keys
        after = [("next", *((key,) if isinstance(key, str) else key)) for key in seen]
        require_finite_gradients(
            self.actor_critic,
            optimizer,
            batch,
            [("next", "reward"), *after, *seen, "state_value", self._log_prob_key],
            first_env=self.global_rank * batch.shape[0],
        )
        if self._part.is_last:
            self._shield.raise_()

    @abstractmethod
    def _loss(self, samples: TensorDictBase, distribution: d.Distribution, value: Tensor) -> Tensor:
        """Return the loss of B samples."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Step, and close the round after its last part: before a callback saves a checkpoint."""
        super().optimizer_step(*args, **kwargs)
        if self._part.is_last:
            self._end_round()

    def _end_round(self) -> None:
        self._round_open = False
        self._delayed.end_round()
        self._statistics.end_round()
        if self.trainer.world_size > 1:  # all act with those of rank 0, which it saves
            for buffer in self._statistics.parameters:
                torch.distributed.broadcast(buffer, 0)
        self.updates += 1

    def on_train_batch_end(self, outputs: Any, batch: RoundPart, batch_idx: int) -> None:  # noqa: ANN401, ARG002
        """Publish the weights after the last part of a round."""
        if batch.is_last and self._collector is not None:
            self._collector.update_policy_weights_(self.policy)

    @property
    def _collector(self) -> Any:  # noqa: ANN401 - the learner's floor does not know the collector
        return getattr(getattr(self.trainer, "datamodule", None), "collector", None)

    def log_losses(self, losses: dict[str, Tensor], group: str = "loss") -> None:
        """Log losses, or another group of figures, when the Trainer's loggers will take them."""
        if self.trainer.fit_loop.epoch_loop._should_accumulate():
            return
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if (self.trainer.global_step + 1) % every == 0:
            self.log_dict({f"{group}/{name}": value.detach() for name, value in losses.items()})

    # Evaluation

    def validation_step(self, evaluation: Evaluation, _: int) -> None:
        """Play the evaluation's episodes and log the raw scores, ``eval/score`` and more."""
        self._shield.lower()
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
        return replace(evaluation, device=str(self.device)).run(self.actor_critic)

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

    def forward(self, observation: Tensor | TensorDictBase) -> Tensor:
        """Return the greedy actions for B observations: the likeliest category, or the mean.

        Args:
            observation: ``[B, *shape]`` of the policy's one observation, or a TensorDict ``[B]``
                with all keys that the policy reads.

        Returns:
            Actions ``[B, *shape]`` in the form that the environment takes.

        Raises:
            ConfigurationError: for a tensor, if the policy reads several observations.
        """
        keys = self._observation_keys
        if isinstance(observation, TensorDictBase):
            given = self._observations(observation)
        elif len(keys) == 1:
            given = {keys[0]: observation}
        else:
            raise ConfigurationError(f"the policy reads {keys}: give a TensorDict with these")
        rows = next(iter(given.values())).shape[0]
        with torch.no_grad(), evaluating([self.actor_critic]):
            return mode(evaluate(self.actor_critic, given, rows).distribution)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep settings and updates; and before a round that was cut off, all as it was then."""
        checkpoint["updates"] = self.updates
        checkpoint["learner"] = learner_settings(self) | {
            "policy": self.policy_name,
            "parts_per_round": self.parts_per_round,
            "decay_steps": self.decay_steps,
            "spec": self._spec,
        }
        if self._round_open:
            names = [*self._trained(), *self._kept_buffers()]
            newest = [*self._delayed.newest, *self._statistics.newest]
            # WeightAveraging keeps its averages under state_dict.
            current = checkpoint.get("current_model_state", checkpoint["state_dict"])
            for name, weights in zip(names, newest, strict=True):
                current[f"policy.{name}"] = weights.clone()
            if self._round_start is not None:
                self._round_start.put_into(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting updates.

        Raises:
            ConfigurationError: if the checkpoint is of another network, or ``fit`` would go on with
                other settings that decide bits.
        """
        if self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self._resumption = Resumption(self, checkpoint)
        own = {name: tuple(value.shape) for name, value in self.state_dict().items()}
        saved = {name: tuple(value.shape) for name, value in checkpoint["state_dict"].items()}
        differing = sorted(name for name in own | saved if own.get(name) != saved.get(name))
        if self.policy is not None and differing:
            name = differing[0]
            raise ConfigurationError(
                f"the checkpoint is of another network: its {name} has shape {saved.get(name)}, "
                f"but {own.get(name)} is needed"
            )
        self.updates = checkpoint["updates"]


_FEW = 64
"""Rows on which a policy is looked at."""
NO_VALUE = (
    "the policy has no value ('state_value'): an actor-critic is needed, such as network='mlp', "
    "hts_torchrl.ActorCritic or torchrl's ActorValueOperator"
)
