"""The learner of IMPALA: an actor-critic that corrects for however old its data is.

Shapes: N trajectories, T steps; B = N * T.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from hts_torchrl.errors import ConfigurationError, require
from hts_torchrl.learner.base import Learner
from hts_torchrl.objectives.losses import mean_entropy, policy_gradient_loss, value_loss
from hts_torchrl.objectives.vtrace import vtrace_targets
from hts_torchrl.training.round_slice import RoundSlice


class Impala(Learner):
    """V-trace actor-critic: the baseline of asynchronous systems (Espeholt et al., 2018).

    One update per batch, at the newest weights. With ``data.collection=actors`` it is IMPALA, with
    ``server`` SEED RL (Espeholt et al., 2020); with ``rounds`` the same loss learns from data that
    is one update old. The age of the data in updates is logged as ``staleness/mean`` and
    ``staleness/max``, over the steps of a batch. Losses are means over a batch, where the paper has
    sums.

    Args:
        rho_clip: bound on the importance ratio of a step.
        c_clip: bound on the importance ratios of the steps after it.
    """

    corrects_any_lag = True

    def __init__(
        self,
        policy: nn.Module | None = None,
        *,
        learning_rate: float = 6e-4,
        rho_clip: float = 1.0,
        c_clip: float = 1.0,
        **settings: Any,  # noqa: ANN401 - those of Learner
    ) -> None:
        super().__init__(policy, learning_rate=learning_rate, **settings)
        require(rho_clip > 0, f"rho_clip={rho_clip}", "more than 0")
        require(c_clip > 0, f"c_clip={c_clip}", "more than 0")
        if self.value_scale is not None:
            raise ConfigurationError("normalize_value=true: A2C and PPO have it, Impala has not")
        self.rho_clip, self.c_clip = rho_clip, c_clip

    def training_step(self, part: RoundSlice, _: int) -> Tensor:
        """Return the loss of a batch, at the newest weights, which are in place."""
        with self.learning_from(part):
            # Of the whole batch: chunks would give the mean of their largest.
            age = (self.updates - part.round["collector", "policy_version"]).float()
            self.log_losses({"mean": age.mean(), "max": age.max()}, "staleness")
            chunks = self.chunks.of(part.round)
            return self.loss_by_chunks(lambda index: self.loss(chunks[index]))

    def loss(self, batch: TensorDictBase) -> Tensor:
        """Return the loss of a round ``[N, T]``, or of a chunk: of whole trajectories."""
        samples = self.samples_of(batch)
        policy, value = self.evaluate(samples)
        log_prob = policy.log_prob(samples["action"])
        newest_value = value.detach().view(*batch.shape, 1)
        next_value = self._next_value(batch["next"], newest_value, of_behaviour=False)
        targets = vtrace_targets(
            log_prob=log_prob.detach().view_as(next_value),
            behaviour_log_prob=samples["behaviour_log_prob"].view_as(next_value),
            reward=self.rewards(batch),
            value=newest_value,
            next_value=next_value,
            done=batch["next", "done"],
            terminated=batch["next", "terminated"],
            gamma=self.gamma,
            rho_clip=self.rho_clip,
            c_clip=self.c_clip,
        )
        losses = {
            "policy": policy_gradient_loss(log_prob, targets.advantage.view_as(log_prob)),
            "value": value_loss(value, targets.returns.view_as(value)),
            "entropy": mean_entropy(policy),
        }
        return self.weighted_sum(losses)
