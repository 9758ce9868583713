"""What all learners share: settings, targets, statistics and the gradient of a part of a round.

Shapes: N environments, T steps of a round; B samples of it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from hts_torchrl.compat.lightning import is_accumulating, log_figures
from hts_torchrl.errors import ConfigurationError, require
from hts_torchrl.learner.gradient_chunks import RUNNING, ComputedGradient, GradientChunks
from hts_torchrl.learner.optimizers import make_optimizer, require_arguments
from hts_torchrl.learner.policy_module import NO_VALUE, Steps
from hts_torchrl.learner.rounds import RoundModule
from hts_torchrl.objectives.returns import Targets, gae_targets
from hts_torchrl.policy.forward import is_composite, probabilistic_module
from hts_torchrl.policy.limits import require_unclamped
from hts_torchrl.policy.normalization import RunningStatistics
from hts_torchrl.settings import plain_value, show_inherited
from hts_torchrl.training.extended_hooks import is_of_the_user
from hts_torchrl.training.trainer_limits import steps_of_run

# More than any machine has cores; the OpenMP runtime crashes when it cannot start them.
_MOST_THREADS = 1024
_LAST: Steps = (slice(None), -1)


class Learner(RoundModule):
    """Turns each finished round into one update of the policy.

    A learner of your own only implements ``training_step``, like :class:`A2C` and :class:`PPO`::

        class PolicyGradient(Learner):
            def training_step(self, part, _):
                with self.learning_from(part):
                    targets = self.gae(part.round, gae_lambda=1.0)
                    samples = self.samples_of(part.round, **vars(targets))
                    policy, value = self.evaluate(samples)
                    gain = policy.log_prob(samples["action"]) * samples["advantage"]
                    return (value - samples["returns"]).square().mean() - gain.mean()

    Lightning's Trainer is the caller: see :class:`RoundModule`.

    The policy has the newest weights, and the gradient is taken there. With ``delay=1`` the
    weights that collected the round are one update older (``lag``); ``delayed`` puts those into
    the policy temporarily, as in :class:`A2C`.

    Args:
        policy: an actor-critic; None builds ``network`` for the data module's environment.
        network: ``nature``, ``nips``, ``impala``, ``seed``, ``mlp`` or ``module.Class`` of a trunk;
            ``+lstm`` or ``+gru`` after it adds a memory, as ``lstm`` and ``gru`` alone do.
        squash: pass continuous actions through tanh into their bounds.
        optimizer: ``rmsprop`` (smoothing 0.99), ``adam``, any other class of ``torch.optim`` by its
            name, or ``module.Class``. ``muon`` updates weight matrices, and AdamW the rest.
        optimizer_kwargs: further arguments of its class, such as ``{"weight_decay": 0.1}``.
        learning_rate: at the start.
        learning_rate_decay: linearly to zero over the run.
        epsilon: of the optimizer, if it has one.
        gamma: discount.
        value_coef: weight of the value loss.
        entropy_coef: weight of the entropy bonus.
        normalize_value: let the critic predict values with mean 0 and variance 1, by running
            statistics of all returns (van Hasselt et al., 2016, without their rescaled layer).
        num_threads: torch threads of the learner, which affect the last bits; None keeps
            torch's. PPO and PQN on the CPU compute the chunks of ``gradient_chunks`` side by side
            in them, which does not affect bits, unless the policy has a memory or an action of
            several parts.
        gradient_chunks: chunks of environments whose gradients are added in a fixed order, so that
            any number of ranks gives the same bits. It must divide ``num_envs``, and the number of
            ranks must divide it. With 1 the bits depend on the number of ranks.
    """

    lacks: ClassVar[tuple[str, ...]] = ()
    """Settings of its base classes that a learner does not have; those of its bases are added."""
    computes_side_by_side = False
    """Whether several threads may compute the losses of :meth:`loss_by_chunks` at the same time. A
    class sets it whose losses only read what they share, as ``computes_side_by_side = True``; a
    subclass of your own does not inherit it."""
    _captures = False
    """Whether a loss is captured, which may ask the GPU for nothing then."""

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401
        """Let a subclass show the settings that it inherits, but no threads."""
        super().__init_subclass__(**kwargs)
        if is_of_the_user(cls) and "computes_side_by_side" not in vars(cls):
            cls.computes_side_by_side = False  # its loss may keep something in the learner
        cls.lacks = tuple({name for each in cls.__mro__ for name in vars(each).get("lacks", ())})
        show_inherited(cls, besides=cls.lacks)

    def __init__(  # noqa: PLR0913 - flags of the command line, keyword only
        self,
        policy: nn.Module | None = None,
        *,
        network: str = "mlp",
        squash: bool = False,
        optimizer: str = "rmsprop",
        optimizer_kwargs: dict[str, Any] | None = None,
        learning_rate: float = 7e-4,
        learning_rate_decay: bool = False,
        epsilon: float = 1e-5,
        gamma: float = 0.99,
        value_coef: float = 0.5,
        entropy_coef: float = 0.01,
        normalize_value: bool = False,
        num_threads: int | None = 1,
        gradient_chunks: int = 1,
    ) -> None:
        super().__init__(policy, network=network, squash=squash)
        self.save_hyperparameters(ignore=["policy", *self.lacks])  # those of subclasses too
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = self.hparams.get(name, parameter.default)
            if value is not parameter.default:  # which may be `None` beside any annotation
                plain = plain_value(name, value, str(parameter.annotation))
                whole = isinstance(plain, int) and isinstance(value, float)
                require(not whole, f"{name}={value!r}", repr(plain))
        require_arguments(optimizer, optimizer_kwargs or {})
        self.optimizer_name, self.optimizer_kwargs = optimizer, dict(optimizer_kwargs or {})
        self.learning_rate, self.learning_rate_decay = learning_rate, learning_rate_decay
        self.epsilon, self.gamma = epsilon, gamma
        self.value_coef, self.entropy_coef = value_coef, entropy_coef
        self.num_threads = num_threads
        self.gradient_chunks = gradient_chunks
        for name in ("learning_rate", "epsilon", "value_coef", "entropy_coef"):
            number = getattr(self, name)
            require(0 <= number < math.inf, f"{name}={number}", "a finite number of 0 or more")
        require(0 <= gamma <= 1, f"gamma={gamma}", "0 to 1")
        threads_work = num_threads is None or 0 < num_threads <= _MOST_THREADS
        require(threads_work, f"num_threads={num_threads}", f"None, or 1 to {_MOST_THREADS},")
        self.chunks = GradientChunks(gradient_chunks)
        self.copies_samples = gradient_chunks > 1  # bits may depend on where an input lies
        self._gradient = ComputedGradient(self)
        """Of a training step that computes it itself."""
        self.reward_scale: RunningStatistics | None = None
        """Of discounted returns, where the data module normalises rewards."""
        self.value_scale = RunningStatistics() if normalize_value else None
        """Of returns, where the critic's values are normalised."""
        self._returns: dict[tuple[int, int], Tensor] = {}
        """Of the round, by chunk and part."""

    @property
    def computed_for(self) -> str | None:
        """The setting for which a training step computes the gradient, if there is one."""
        return f"gradient_chunks={self.gradient_chunks}" if self.gradient_chunks > 1 else None

    @property
    def settings_without_bits(self) -> Collection[str]:
        """Settings that decide no bit: threads, where each computes whole chunks."""
        return ("num_threads",) if self._may_compute_side_by_side() else ()

    def prepare_policy(self, datamodule: Any) -> None:  # noqa: ANN401 - may be of another class
        """Build the policy for a data module, and the statistics that it asks for."""
        super().prepare_policy(datamodule)
        if getattr(datamodule, "normalize_reward", False) and self.reward_scale is None:
            self.reward_scale = RunningStatistics()

    def configure_optimizers(self) -> Any:  # noqa: ANN401 - Lightning accepts many forms
        """Return ``optimizer``, with linear decay to zero over the run if wanted.

        Override it for another: whatever form Lightning accepts. A schedule needs ``"interval":
        "step"``, because the run is one epoch.

        Raises:
            ConfigurationError: if nothing can be trained, or a decay has no end.
        """
        optimizer = make_optimizer(
            self.optimizer_name,
            self,  # a subclass may train more than the policy
            learning_rate=self.learning_rate,
            epsilon=self.epsilon,
            arguments=self.optimizer_kwargs,
        )
        if not self.learning_rate_decay:
            return optimizer
        self.decay_steps = steps = steps_of_run(self.trainer, "learning_rate_decay")
        decay = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(0.0, 1 - step / steps)
        )
        return [optimizer], [{"scheduler": decay, "interval": "step"}]

    def on_fit_start(self) -> None:
        """Take the behaviour weights of the first round, this rank's chunks, and threads.

        Raises:
            ConfigurationError: also for a policy that clamps its actions (``safe=True``).
        """
        super().on_fit_start()
        require_unclamped(probabilistic_module(self.actor_critic))
        if self.computed_for:
            self.chunks = self._gradient.begin()
        self._returns = {}
        threads = torch.get_num_threads()
        self._at_end.callback(torch.set_num_threads, threads)
        threads = threads if self.num_threads is None else self.num_threads
        self._gradient.threads = threads if self._may_compute_side_by_side() else 1
        torch.set_num_threads(1 if self._gradient.threads > 1 else threads)

    def _may_compute_side_by_side(self) -> bool:
        if not self.computes_side_by_side or self.gradient_chunks == 1:
            return False
        on_cpu = self.trainer.strategy.root_device.type == "cpu"
        # Sequences and parts of actions need modes of TorchRL that are of the process.
        alone = self.remembers or is_composite(probabilistic_module(self.actor_critic))
        return on_cpu and not alone

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Compute the gradient, or put that of all chunks into place.

        Raises:
            ConfigurationError: if the training step returns another loss than that of the chunks,
                or layers mix them.
        """
        if self.computed_for:
            self._gradient.put_into_place(loss, self._weights)
        else:
            super().backward(loss, *args, **kwargs)

    def samples_by_chunks(
        self, batch: TensorDictBase, samples_to_learn: Callable[[TensorDictBase], TensorDictBase]
    ) -> TensorDictBase:
        """Return the samples of this rank's chunks, one chunk after another.

        Args:
            batch: the round ``[N, T]``.
            samples_to_learn: gives B samples of a chunk; with one chunk that is the round.
        """
        if self.gradient_chunks == 1:
            return samples_to_learn(batch)
        samples = []
        for chunk, rows in zip(self.chunks.own, self.chunks.of(batch), strict=True):
            self._gradient.begin_chunk(chunk)
            samples.append(samples_to_learn(rows))
        if len(found := {len(each) for each in samples}) > 1:
            raise ConfigurationError(
                f"gradient_chunks={self.gradient_chunks}: {type(self).__name__} makes "
                f"{min(found)} samples of one chunk and {max(found)} of another: make as many of "
                "each, or leave the setting out"
            )
        with torch.autocast(self.device.type, enabled=False):  # in bfloat16 it joins no float16
            return torch.cat(samples)

    def loss_by_chunks(self, loss_of: Callable[[int], Tensor]) -> Tensor:
        """Return the loss of a part of a round: with several chunks, the mean over all of them.

        Args:
            loss_of: gives the loss of this rank's chunk of an index, 0 and up.

        Returns:
            A scalar. Of several chunks it has no gradient: that is computed here, and
            ``backward`` puts it into place.
        """
        if not self.computed_for:
            return loss_of(0)
        return self._gradient.mean(lambda index: self._gradient.of(partial(loss_of, index)))

    def log_losses(self, losses: dict[str, Tensor], group: str = "loss") -> None:
        """Log losses, or another group of metrics, when the Trainer logs.

        ``Trainer.callback_metrics`` has them after each step; with several chunks, their means.
        """
        if is_accumulating(self.trainer):
            return
        figures = {f"{group}/{name}": value.detach().clone() for name, value in losses.items()}
        if (of_chunk := RUNNING.figures) is None:
            log_figures(self, figures)
        else:
            of_chunk |= figures

    def gae(
        self,
        batch: TensorDictBase,
        *,
        gae_lambda: float,
        unroll: int | None = None,
        value: Tensor | None = None,
    ) -> Targets:
        """Return advantages and returns, with values of the weights that collected the round.

        Args:
            batch: the round ``[N, T]``.
            gae_lambda: decay of the advantage; 1 gives n-step returns.
            unroll: steps after which the sum is bootstrapped; None is T.
            value: values of the round's observations by the current weights, ``[N, T, 1]``; these
                weights then compute the values of final observations too.

        Returns:
            Two tensors, float32 ``[N, T]``.

        Raises:
            ConfigurationError: if the round has no values, ``unroll`` does not divide T, or other
                threads would see what is exchanged or kept for it.
        """
        if "state_value" not in batch.keys():  # noqa: SIM118 - a TensorDict is no dict
            raise ConfigurationError(NO_VALUE)
        of_behaviour = value is None
        in_thread = self._gradient.threads > 1 and RUNNING.figures is not None
        if in_thread and ((of_behaviour and self.lag) or self.value_scale is not None):
            raise ConfigurationError(
                f"computes_side_by_side=True: a loss of {type(self).__name__} calls gae(), which "
                "exchanges weights or keeps returns while other threads compute theirs; call it "
                "before loss_by_chunks(...), or leave computes_side_by_side out"
            )
        value = batch["state_value"] if value is None else value
        next_value = self._next_value(batch["next"], value, of_behaviour=of_behaviour)
        targets = gae_targets(
            reward=self.rewards(batch),
            value=self._unscaled(value),
            next_value=self._unscaled(next_value),
            done=batch["next", "done"],
            terminated=batch["next", "terminated"],
            gamma=self.gamma,
            gae_lambda=gae_lambda,
            unroll=unroll,
        )
        returns = targets.returns.squeeze(-1)
        if self.value_scale is not None:
            self._returns[RUNNING.index, self.part.index] = returns
            returns = self.value_scale.normalized(returns)
        return Targets(targets.advantage.squeeze(-1), returns)

    def rewards(self, batch: TensorDictBase) -> Tensor:
        """Return what is learned from, float32 ``[N, T, 1]``: rewards, normalised if wanted."""
        reward: Tensor = batch["next", "reward"]
        return reward if self.reward_scale is None else self.reward_scale.scaled(reward)

    def _unscaled(self, value: Tensor) -> Tensor:
        return value if self.value_scale is None else self.value_scale.restored(value)

    def update_statistics(self) -> None:
        """Take note of all that the round holds, after its last step of the optimiser."""
        super().update_statistics()
        if self.reward_scale is not None:
            sums = (chunk["next", "discounted_return"] for chunk in self.chunks.of(self.part.round))
            self.reward_scale.update(*(each.flatten() for each in sums))
        if self.value_scale is not None:
            if not (self._returns or self.value_scale.count):
                raise ConfigurationError(
                    f"normalize_value=true: {type(self).__name__} asks gae() for no returns, whose "
                    "statistics are needed; leave it out"
                )
            if self._returns:  # a subclass may leave a whole round out
                self.value_scale.update(*(returns.flatten() for returns in self._returns.values()))
            self._returns = {}

    def weighted_sum(self, losses: dict[str, Tensor]) -> Tensor:
        """Log the parts of an actor-critic's loss, and return their sum by the coefficients.

        Args:
            losses: ``policy``, ``value``, ``entropy``, scalars; others are logged alone.
        """
        self.log_losses(losses)
        return (
            losses["policy"]
            + self.value_coef * losses["value"]
            - self.entropy_coef * losses["entropy"]
        )

    def _next_value(self, after: TensorDictBase, value: Tensor, *, of_behaviour: bool) -> Tensor:
        """Shift the values by a step; evaluate what no actor saw: the true final ones."""
        next_value = value.roll(-1, 1)
        if self._captures:  # those of ended episodes too: a graph has one shape
            last = self.values_where(after, _LAST)  # which may be NaN there
            next_value[_LAST] = last.masked_fill(after["terminated"][_LAST], 0)
            return next_value
        unseen = after["truncated"].squeeze(-1).clone()
        unseen[:, -1] = True
        unseen &= ~after["terminated"].squeeze(-1)
        if unseen.any():
            behaviour = self._weights.behaviour() if self.lag and of_behaviour else None
            with behaviour or nullcontext():
                next_value[unseen] = self.values_where(after, unseen)
        return next_value
