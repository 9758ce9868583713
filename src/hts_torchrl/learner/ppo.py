"""Proximal policy optimisation, one round late."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch import distributions as d

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.learner.base import Learner, require
from hts_torchrl.objectives.a2c import mean_entropy, value_loss
from hts_torchrl.objectives.ppo import clipped_ratio_loss, clipped_value_loss
from hts_torchrl.round_part import RoundPart


class PPO(Learner):
    """Proximal policy optimisation, learning from the round before the running one.

    A round is ``epochs * minibatches`` steps of the Trainer. The delayed step has two forms:
    ``ratio`` starts at the newest weights and takes the ratio against the stored behaviour
    log-probabilities (the paper's code); ``displacement`` runs the epochs from the behaviour
    weights, where the ratio starts at 1, and adds the way they went to the newest weights.

    Args:
        policy: an actor-critic; None builds ``network`` for the data module's environment.
        network: ``nature``, ``nips``, ``impala``, ``seed``, ``mlp`` or ``module.Class`` of a trunk.
        squash: pass continuous actions through tanh into their bounds.
        optimizer: ``adam`` or ``rmsprop`` (smoothing 0.99).
        learning_rate: at the start.
        learning_rate_decay: linearly to zero over the run.
        epsilon: of the optimiser.
        gamma: discount.
        gae_lambda: decay of the advantage.
        unroll: steps after which the advantage is bootstrapped; None is the whole round.
        value_coef: weight of the value loss.
        entropy_coef: weight of the entropy bonus.
        epochs: passes over a round.
        minibatches: parts of each pass.
        clip: bound on the ratio's distance from 1.
        clip_value: bound the value's change by ``clip`` too.
        delayed_step: ``ratio`` or ``displacement``.
        num_threads: torch threads of the learner; results depend on it. None leaves torch's.
    """

    def __init__(  # noqa: PLR0913 - flags of the command line, keyword only
        self,
        policy: nn.Module | None = None,
        *,
        network: str = "mlp",
        squash: bool = False,
        optimizer: Literal["adam", "rmsprop"] = "adam",
        learning_rate: float = 2.5e-4,
        learning_rate_decay: bool = False,
        epsilon: float = 1e-5,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        unroll: int | None = None,
        value_coef: float = 0.5,
        entropy_coef: float = 0.01,
        epochs: int = 4,
        minibatches: int = 4,
        clip: float = 0.1,
        clip_value: bool = True,
        delayed_step: Literal["ratio", "displacement"] = "ratio",
        num_threads: int | None = 1,
    ) -> None:
        super().__init__(
            policy,
            network=network,
            squash=squash,
            optimizer=optimizer,
            learning_rate=learning_rate,
            learning_rate_decay=learning_rate_decay,
            epsilon=epsilon,
            gamma=gamma,
            gae_lambda=gae_lambda,
            unroll=unroll,
            value_coef=value_coef,
            entropy_coef=entropy_coef,
            num_threads=num_threads,
        )
        require(epochs > 0, f"epochs={epochs}", "1 or more")
        require(minibatches > 0, f"minibatches={minibatches}", "1 or more")
        require(0 < clip < math.inf, f"clip={clip}", "a finite number of more than 0")
        forms = ("ratio", "displacement")
        require(delayed_step in forms, f"delayed_step={delayed_step!r}", "ratio or displacement")
        self.save_hyperparameters(ignore=["policy"])
        self.epochs, self.minibatches = epochs, minibatches
        self.clip, self.clip_value = clip, clip_value
        self.delayed_step = delayed_step

    @property
    def parts_per_round(self) -> int:  # type: ignore[override]
        """Gradient computations on each round."""
        parts = self.epochs * self.minibatches
        if parts % self.trainer.accumulate_grad_batches:
            raise ConfigurationError(
                f"accumulate_grad_batches={self.trainer.accumulate_grad_batches} does not divide "
                f"the {parts} minibatches of a round: gradients of two rounds would mix"
            )
        return parts

    def _scale(self, advantage: Tensor) -> Tensor:
        return (advantage - advantage.mean()) / (advantage.std() + 1e-8)

    def _rows(self, part: RoundPart) -> Tensor:
        frames = part.round.numel()
        if frames % self.minibatches:
            raise ConfigurationError(
                f"minibatches={self.minibatches} does not divide the {frames} frames of a round"
            )
        epoch, minibatch = divmod(part.index, self.minibatches)
        if minibatch == 0:
            entropy = (self._seed % 2**64, self.updates, epoch)  # the same on all ranks
            seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(frames, generator=generator).to(self.device)
            self._minibatches = order.chunk(self.minibatches)
        return self._minibatches[minibatch]

    @property
    def _displaces(self) -> bool:
        return self.delayed_step == "displacement" and self.lag > 0

    def _before_forward(self, part: RoundPart) -> None:
        if part.is_first and self._displaces:
            self._delayed.load_behaviour()

    def _end_round(self) -> None:
        if self._displaces:
            self._delayed.add_displacement()
        super()._end_round()

    def _loss(self, samples: TensorDictBase, distribution: d.Distribution, value: Tensor) -> Tensor:
        ratio = clipped_ratio_loss(
            distribution.log_prob(samples["action"]),
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
            "entropy": mean_entropy(distribution),
            "clip_fraction": ratio.clip_fraction,
            "approx_kl": ratio.approx_kl,
        }
        self.log_losses(losses)
        return (
            losses["policy"]
            + self.value_coef * losses["value"]
            - self.entropy_coef * losses["entropy"]
        )
