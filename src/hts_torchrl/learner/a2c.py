"""Advantage actor-critic, learning from the round before the running one.

Shapes: N environments, T steps of a round; B samples of it.
"""

from __future__ import annotations

from typing import Any, Literal

from tensordict import TensorDictBase
from torch import Tensor, nn

from hts_torchrl.errors import ConfigurationError, require
from hts_torchrl.learner.base import Learner
from hts_torchrl.objectives.a2c import mean_entropy, policy_gradient_loss, value_loss
from hts_torchrl.training.round_slice import RoundSlice


class A2C(Learner):
    """Advantage actor-critic with the one-step-delayed gradient (equation 3 of the paper).

    The delayed step has two forms: ``gradient`` takes the gradient at the weights that collected
    the round (the paper's); ``ratio`` takes it at the newest, with the newest critic's values, and
    weights each sample by the ratio of what either would have done. It costs one more pass a round.

    A round is one update. ``Trainer(accumulate_grad_batches=K)`` computes its gradient in K chunks
    of environments; ``Trainer(gradient_clip_val=0.5)`` clips it.

    Args:
        gae_lambda: 1 gives n-step returns.
        unroll: steps after which a return is bootstrapped; None is the whole round.
        delayed_step: ``gradient`` or ``ratio``.
    """

    def __init__(
        self,
        policy: nn.Module | None = None,
        *,
        gae_lambda: float = 1.0,
        unroll: int | None = None,
        delayed_step: Literal["gradient", "ratio"] = "gradient",
        **settings: Any,  # noqa: ANN401 - those of Learner
    ) -> None:
        super().__init__(policy, **settings)
        require(0 <= gae_lambda <= 1, f"gae_lambda={gae_lambda}", "0 to 1")
        require(unroll is None or unroll > 0, f"unroll={unroll}", "None, or 1 or more,")
        forms = ("gradient", "ratio")
        require(delayed_step in forms, f"delayed_step={delayed_step!r}", "gradient or ratio")
        self.gae_lambda, self.unroll = gae_lambda, unroll
        self.delayed_step = delayed_step

    @property
    def reweights(self) -> bool:
        """Whether the gradient is that of the newest weights, from data of those before."""
        return self.delayed_step == "ratio" and self.lag > 0

    @property
    def parts_per_round(self) -> int:
        """Chunks whose gradients the Trainer accumulates."""
        return self.trainer.accumulate_grad_batches

    def training_step(self, part: RoundSlice, _: int) -> Tensor:
        """Return the loss of one chunk, at the weights that ``delayed_step`` asks for."""
        with self.learning_from(part):
            if self.lag and not self.reweights:
                self.delayed.load_behaviour()
            if part.is_first:
                self.samples = self.samples_by_chunks(part.round, self.samples_to_learn)
            if self.gradient_chunks == 1:
                return self.loss(self.samples[self.chunk_of(part)])
            return self.loss_by_chunks(
                lambda index: self.loss(self.samples[self.rows_of_chunk(index)].clone())
            )

    def samples_to_learn(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the samples of a round, or of a chunk, with ``advantage`` and ``returns``.

        Args:
            batch: ``[N, T]``.
        """
        targets = self.gae(
            batch, gae_lambda=self.gae_lambda, unroll=self.unroll, newest=self.reweights
        )
        return self.samples_of(batch, advantage=targets.advantage, returns=targets.returns)

    def chunk_of(self, part: RoundSlice) -> slice:
        """Return which of the round's samples a part has: those of some environments.

        Raises:
            ConfigurationError: if the environments cannot be divided so.
        """
        num_envs = part.round.shape[0]
        if num_envs % part.count:
            raise ConfigurationError(
                f"accumulate_grad_batches={part.count} does not divide the {num_envs} environments"
            )
        chunk = self.num_samples(part.round) // part.count
        return slice(part.index * chunk, (part.index + 1) * chunk)

    def loss(self, samples: TensorDictBase) -> Tensor:
        """Return the loss of B samples, which have ``advantage`` and ``returns``."""
        policy, value = self.evaluate(samples)
        log_prob, advantage = policy.log_prob(samples["action"]), samples["advantage"]
        if self.reweights:
            advantage = advantage * (log_prob.detach() - samples["behaviour_log_prob"]).exp()
        losses = {
            "policy": policy_gradient_loss(log_prob, advantage),
            "value": value_loss(value, samples["returns"]),
            "entropy": mean_entropy(policy),
        }
        return self.weighted_sum(losses)

    def on_after_backward(self) -> None:
        """Put the newest weights back, from which the optimiser steps; the gradient stays."""
        if self.lag and not self.reweights:
            self.delayed.restore_newest()
