"""Learners for studies of the delay of one update (``delay.py``); none is part of the package."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from hts_torchrl import A2C, PPO, PQN
from hts_torchrl.objectives.losses import mean_entropy, policy_gradient_loss, value_loss
from hts_torchrl.objectives.returns import Targets


class Uncut(A2C):
    """A2C's ``ratio`` with weights of more than 1 too."""

    def loss(self, batch: TensorDictBase) -> Tensor:
        samples = self.samples_of(batch)
        policy, value = self.evaluate(samples)
        targets = self.gae(
            batch,
            value=value.detach().reshape(*batch.shape, 1),
            gae_lambda=self.gae_lambda,
            unroll=self.unroll,
        )
        log_prob = policy.log_prob(samples["action"])
        weight = (log_prob.detach() - samples["behaviour_log_prob"]).exp()
        losses = {
            "policy": policy_gradient_loss(log_prob, weight * targets.advantage.flatten()),
            "value": value_loss(value, targets.returns.flatten()),
            "entropy": mean_entropy(policy),
        }
        return self.weighted_sum(losses)


class AlwaysDecoupled(PPO):
    """``decoupled`` without a delay too, where it leaves the first epoch unclipped."""

    decouples = True


class StoredValues(PQN):
    """Computes targets with the values that actors stored: those of one update before."""

    def gae(self, batch: TensorDictBase, **settings: Any) -> Targets:
        return super().gae(batch, **settings | {"value": None})
