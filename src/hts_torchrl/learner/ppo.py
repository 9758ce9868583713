"""Proximal policy optimisation, one round late.

Shapes: N environments, T steps of a round; B samples of it.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from hts_torchrl.errors import ConfigurationError, require
from hts_torchrl.learner.base import Learner
from hts_torchrl.objectives.a2c import mean_entropy, value_loss
from hts_torchrl.objectives.ppo import clipped_ratio_loss, clipped_value_loss
from hts_torchrl.training.round_slice import RoundSlice


class PPO(Learner):
    """Proximal policy optimisation, learning from the round before the running one.

    A round is ``epochs * minibatches`` steps of the Trainer. The delayed step has two forms:
    ``displacement`` runs the epochs from the behaviour weights, where the ratio starts at 1, and
    adds the way they went to the newest weights; ``ratio`` starts at the newest weights and takes
    the ratio against the stored behaviour log-probabilities (the paper's code).

    Args:
        optimizer: ``adam``, ``rmsprop`` (smoothing 0.99), any other class of ``torch.optim`` by its
            name, or ``module.Class``. ``muon`` moves weight matrices, and AdamW the rest.
        learning_rate: at the start.
        gae_lambda: decay of the advantage.
        unroll: steps after which the advantage is bootstrapped; None is the whole round.
        epochs: passes over a round.
        minibatches: parts of each pass.
        clip: bound on the ratio's distance from 1.
        clip_value: bound the value's change by ``clip`` too.
        delayed_step: ``displacement`` or ``ratio``, which took more steps to a score in most tasks.
    """

    def __init__(  # noqa: PLR0913 - flags of the command line, keyword only
        self,
        policy: nn.Module | None = None,
        *,
        optimizer: str = "adam",
        learning_rate: float = 2.5e-4,
        gae_lambda: float = 0.95,
        unroll: int | None = None,
        epochs: int = 4,
        minibatches: int = 4,
        clip: float = 0.1,
        clip_value: bool = True,
        delayed_step: Literal["ratio", "displacement"] = "displacement",
        **settings: Any,  # noqa: ANN401 - those of Learner
    ) -> None:
        super().__init__(policy, optimizer=optimizer, learning_rate=learning_rate, **settings)
        require(0 <= gae_lambda <= 1, f"gae_lambda={gae_lambda}", "0 to 1")
        require(unroll is None or unroll > 0, f"unroll={unroll}", "None, or 1 or more,")
        require(epochs > 0, f"epochs={epochs}", "1 or more")
        require(minibatches > 0, f"minibatches={minibatches}", "1 or more")
        require(0 < clip < math.inf, f"clip={clip}", "a finite number of more than 0")
        forms = ("ratio", "displacement")
        require(delayed_step in forms, f"delayed_step={delayed_step!r}", "ratio or displacement")
        self.gae_lambda, self.unroll = gae_lambda, unroll
        self.epochs, self.minibatches = epochs, minibatches
        self.clip, self.clip_value = clip, clip_value
        self.delayed_step = delayed_step

    @property
    def parts_per_round(self) -> int:
        """Minibatches of all epochs: gradient computations on each round."""
        parts = self.epochs * self.minibatches
        if parts % self.trainer.accumulate_grad_batches:
            raise ConfigurationError(
                f"accumulate_grad_batches={self.trainer.accumulate_grad_batches} does not divide "
                f"the {parts} minibatches of a round: gradients of two rounds would mix"
            )
        return parts

    def training_step(self, part: RoundSlice, _: int) -> Tensor:
        """Return the loss of one minibatch.

        The weights in place are the newest, or what the steps on this round have made of them; with
        ``displacement``, what those steps have made of the weights that collected the round.
        """
        with self.learning_from(part):
            if part.is_first:
                if self.displaces:
                    self.delayed.load_behaviour()
                self.samples = self.normalised_samples(part.round)
            rows = self.minibatch_of(part)
            # index_select copies whole rows; indexing copies pixel by pixel, 8 times slower.
            samples = self.samples.apply(
                lambda entry: entry.index_select(0, rows),
                batch_size=[len(rows), *self.samples.shape[1:]],
            )
            return self.loss(samples)

    def normalised_samples(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the round's samples; advantages are normalised over the whole round."""
        targets = self.gae(batch, gae_lambda=self.gae_lambda, unroll=self.unroll)
        advantage = targets.advantage
        return self.samples_of(
            batch,
            behaviour_value=batch["state_value"].squeeze(-1),
            advantage=(advantage - advantage.mean()) / (advantage.std() + 1e-8),
            returns=targets.returns,
        )

    def minibatch_of(self, part: RoundSlice) -> Tensor:
        """Return which of the round's samples a part has, int64 ``[B]``: a new order each epoch.

        Of a policy with a memory these are environments, each with its whole sequence.

        Raises:
            ConfigurationError: if the samples cannot be divided so.
        """
        count = self.num_samples(part.round)
        if count % self.minibatches:
            whole = "environments of a round, whose sequences stay whole"
            what = whole if self.remembers else "frames of a round"
            raise ConfigurationError(
                f"minibatches={self.minibatches} does not divide the {count} {what}"
            )
        epoch, minibatch = divmod(part.index, self.minibatches)
        if minibatch == 0:
            entropy = (self.seed % 2**64, self.updates, epoch)  # the same on all ranks
            seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(count, generator=generator).to(self.device)
            self._minibatches = order.chunk(self.minibatches)
        return self._minibatches[minibatch]

    def loss(self, samples: TensorDictBase) -> Tensor:
        """Return the loss of B samples, which have what :meth:`normalised_samples` adds."""
        policy, value = self.evaluate(samples)
        ratio = clipped_ratio_loss(
            policy.log_prob(samples["action"]),
            samples["behaviour_log_prob"],
            samples["advantage"],
            self.clip,
        )
        losses = {
            "policy": ratio.loss,
            "value": (
                clipped_value_loss(value, samples["behaviour_value"], samples["returns"], self.clip)
                if self.clip_value
                else value_loss(value, samples["returns"])
            ),
            "entropy": mean_entropy(policy),
            "clip_fraction": ratio.clip_fraction,
            "approx_kl": ratio.approx_kl,
        }
        self.log_losses(losses)
        return (
            losses["policy"]
            + self.value_coef * losses["value"]
            - self.entropy_coef * losses["entropy"]
        )

    @property
    def displaces(self) -> bool:
        """Whether the round's steps start at the weights that collected it, not at the newest."""
        return self.delayed_step == "displacement" and self.lag > 0

    def on_round_end(self) -> None:
        """Add the way that the round's steps went to the newest weights."""
        if self.displaces:
            self.delayed.add_displacement()
