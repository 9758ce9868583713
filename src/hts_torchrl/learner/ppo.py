"""Proximal policy optimisation, one round late.

A round is ``training_step``, once a minibatch: ``samples_to_learn`` and ``on_samples_ready`` with
the first one, ``loss`` with each, ``on_round_end`` after the last step.

Shapes: N environments, T steps of a round; B samples of it.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from tensordict import TensorDictBase
from torch import Tensor, nn

from hts_torchrl.errors import ConfigurationError, require
from hts_torchrl.learner.base import Learner
from hts_torchrl.learner.gradient_chunks import RUNNING
from hts_torchrl.learner.minibatches import Minibatches
from hts_torchrl.objectives.losses import (
    clipped_ratio_loss,
    clipped_value_loss,
    mean_entropy,
    value_loss,
)
from hts_torchrl.policy.normalization import RunningStatistics
from hts_torchrl.training.round_slice import RoundSlice


class PPO(Learner):
    """Proximal policy optimisation, learning from the previous round.

    A round is ``epochs * minibatches`` steps of the Trainer. The delayed step has three forms:

    - ``decoupled`` starts the epochs from the newest weights. The ratio is taken to the policy at
      the sample's first minibatch, so it is 1 in the first epoch, where nothing is clipped. The
      advantage is weighted by the ratio of that policy to the behaviour policy. This is the
      decoupled objective of Hilton et al. (2022, arXiv 2110.00641), whose proximal policy is an
      average of weights.
    - ``displacement`` starts them from the behaviour weights, where the ratio is 1, and adds the
      difference of weights between their end and their start to the newest weights.
    - ``ratio`` starts them from the newest weights, and takes the ratio to the behaviour policy
      (the paper's code).

    Without a delay all three are plain PPO.

    Args:
        epochs: passes over a round.
        minibatches: parts of each pass.
        gae_lambda: decay of the advantage.
        unroll: steps after which the advantage is bootstrapped; None is the whole round.
        clip: bound on the ratio's distance from 1.
        clip_value: also bound the value's change by ``clip``.
        delayed_step: ``decoupled``, ``displacement`` or ``ratio``.
    """

    computes_side_by_side = True

    def __init__(  # noqa: PLR0913 - flags of the command line, keyword only
        self,
        policy: nn.Module | None = None,
        *,
        optimizer: str = "adam",
        learning_rate: float = 2.5e-4,
        epochs: int = 4,
        minibatches: int = 4,
        gae_lambda: float = 0.95,
        unroll: int | None = None,
        clip: float = 0.1,
        clip_value: bool = True,
        delayed_step: Literal["decoupled", "displacement", "ratio"] = "decoupled",
        **settings: Any,  # noqa: ANN401 - those of Learner
    ) -> None:
        super().__init__(policy, optimizer=optimizer, learning_rate=learning_rate, **settings)
        self.epochs, self.minibatches = epochs, minibatches
        self.parts_per_pass = minibatches
        self._minibatches = Minibatches(self)
        require(0 <= gae_lambda <= 1, f"gae_lambda={gae_lambda}", "0 to 1")
        require(unroll is None or unroll > 0, f"unroll={unroll}", "None, or 1 or more,")
        require(0 < clip < math.inf, f"clip={clip}", "a finite number of more than 0")
        forms = ("decoupled", "displacement", "ratio")
        words = "decoupled, displacement or ratio"
        require(delayed_step in forms, f"delayed_step={delayed_step!r}", words)
        self.gae_lambda, self.unroll = gae_lambda, unroll
        self.clip, self.clip_value = clip, clip_value
        self.delayed_step = delayed_step

    @property
    def parts_per_round(self) -> int:
        """Minibatches of all epochs: gradient computations on each round."""
        return self.epochs * self.minibatches

    def training_step(self, part: RoundSlice, _: int) -> Tensor:
        """Return the loss of one minibatch; the first one of a round makes the samples of all."""
        with self.learning_from(part):
            if self._minibatches.lack_samples(part):
                self.samples = self.samples_by_chunks(part.round, self.samples_to_learn)
                self.on_samples_ready(self.samples)
                if self.decouples:  # what the first epoch finds begins as that of the behaviour
                    samples = self.samples
                    self._refuse_observed(("proximal_log_prob", "proximal_value"))
                    samples["proximal_log_prob"] = samples["behaviour_log_prob"].clone()
                    samples["proximal_value"] = samples["behaviour_value"].clone()
            return self.loss_by_chunks(
                lambda index: self.loss(self._minibatches.of(self.samples, part, index))
            )

    def samples_to_learn(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the samples of a round ``[N, T]``, or of a chunk, with ``advantage``, ``returns``.

        The steps on this round begin at the weights in place: the newest, or with ``displacement``
        those that collected the round.
        """
        if self.displaces and not self.delayed.holds_behaviour:
            self.delayed.load_behaviour()
        targets = self.gae(batch, gae_lambda=self.gae_lambda, unroll=self.unroll)
        return self.samples_of(
            batch,
            behaviour_value=batch["state_value"].squeeze(-1),
            advantage=targets.advantage,
            returns=targets.returns,
        )

    def on_samples_ready(self, samples: TensorDictBase) -> None:
        """Normalise the advantages over the round: of this rank, or with chunks of all ranks.

        Override it to normalise them otherwise, or not at all.

        Raises:
            ConfigurationError: if the round is a single frame, which has no deviation.
        """
        advantage = samples["advantage"]
        if self.gradient_chunks == 1 and advantage.numel() == 1:
            raise ConfigurationError(
                "PPO normalises advantages by their deviation in a round, and one frame has none: "
                "frames_per_batch of 2 or more on each rank is needed"
            )
        mean, deviation = advantage.mean(), advantage.std()
        if self.gradient_chunks > 1:
            moments = RunningStatistics().to(advantage.device)
            moments.update(*(each.flatten() for each in advantage.chunk(len(self.chunks.own))))
            mean = moments.mean.float()
            deviation = (moments.variance * moments.count / (moments.count - 1)).sqrt().float()
        samples["advantage"] = (advantage - mean) / (deviation + 1e-8)

    def loss(self, samples: TensorDictBase) -> Tensor:
        """Return the loss of B samples, which have what :meth:`samples_to_learn` adds."""
        policy, value = self.evaluate(samples)
        log_prob = policy.log_prob(samples["action"]).float()  # as actors answer it
        old_log_prob, old_value = samples["behaviour_log_prob"], samples["behaviour_value"]
        advantage = samples["advantage"]
        if self.decouples:
            if self.part.index < self.minibatches:  # of the first epoch
                self.keep_in_round(
                    samples, proximal_log_prob=log_prob.detach(), proximal_value=value.detach()
                )
            old_log_prob, old_value = samples["proximal_log_prob"], samples["proximal_value"]
            advantage = advantage * (old_log_prob - samples["behaviour_log_prob"]).exp()
        ratio = clipped_ratio_loss(log_prob, old_log_prob, advantage, self.clip)
        losses = {
            "policy": ratio.loss,
            "value": (
                clipped_value_loss(value, old_value, samples["returns"], self.clip)
                if self.clip_value
                else value_loss(value, samples["returns"])
            ),
            "entropy": mean_entropy(policy),
            "clip_fraction": ratio.clip_fraction,
            "approx_kl": ratio.approx_kl,
        }
        return self.weighted_sum(losses)

    def keep_in_round(self, samples: TensorDictBase, **entries: Tensor) -> None:
        """Put entries into a minibatch, and into the round's samples for the epochs to come.

        Args:
            samples: what :meth:`loss` was given; they have these entries already.
            entries: of its B samples.
        """
        for key, entry in entries.items():
            samples[key] = entry
            self.samples[key].index_copy_(0, RUNNING.rows, samples[key])

    @property
    def displaces(self) -> bool:
        """Whether the round's steps start at the weights that collected it, not at the newest."""
        return self.delayed_step == "displacement" and self.lag > 0

    @property
    def decouples(self) -> bool:
        """Whether the clip bounds the distance from the weights that first visit a sample."""
        return self.delayed_step == "decoupled" and self.lag > 0

    def on_round_end(self) -> None:
        """Add the way that the round's steps went to the newest weights."""
        if self.displaces:
            self.delayed.add_displacement()

    def put_newest_back(self) -> None:
        """Add the way so far to the newest weights, where a run ends within a round."""
        self.delayed.add_displacement()

    def on_train_batch_end(self, outputs: Any, batch: RoundSlice, batch_idx: int) -> None:  # noqa: ANN401
        """Add it too where the run ends within a round, for who uses the policy then."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        trainer = self.trainer
        at_end = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if self.delayed.holds_behaviour and (at_end or trainer.global_step == trainer.max_steps):
            self.put_newest_back()
