"""Learners that ``delay.py`` tries against the delay of one update; none is part of the package.

With theta_j the newest weights, theta_{j-1} those that collected the round, and u_j the way that an
update would go from theta_j.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from hts_torchrl import A2C, PPO, PQN
from hts_torchrl.objectives.losses import mean_entropy, policy_gradient_loss, value_loss
from hts_torchrl.objectives.returns import Targets


class OtherStep:
    """Makes another step of the way u_j that an update would go."""

    _before: list[Tensor] | None = None

    @torch.no_grad()
    def on_round_end(self) -> None:
        super().on_round_end()
        parameters, newest = self.delayed.parameters, self.delayed.newest
        ways = [now - old for now, old in zip(parameters, newest, strict=True)]
        for parameter, old, step in zip(parameters, newest, self.steps(ways), strict=True):
            parameter.copy_(old + step)

    def steps(self, ways: list[Tensor]) -> list[Tensor]:
        raise NotImplementedError


class Extrapolated(OtherStep):
    """theta_{j+1} = theta_j + u_j + (u_j - u_{j-1}).

    What an update lacked, because its gradient came one round late, is made good as soon as it is
    known: the step of optimistic gradient methods. It was derived here, and is not claimed to be
    the error feedback of arXiv 2606.30634.
    """

    def steps(self, ways: list[Tensor]) -> list[Tensor]:
        before, self._before = self._before or ways, ways
        return [way + (way - last) for way, last in zip(ways, before, strict=True)]


class Outer(OtherStep):
    """theta_{j+1} = theta_j + s (u_j + m v_j), v_j = m v_{j-1} + u_j: Nesterov's momentum.

    As in outer-PPO (Tan et al., 2024, arXiv 2411.00666), one round late.
    """

    s, m = 1.0, 0.0

    def steps(self, ways: list[Tensor]) -> list[Tensor]:
        before = self._before or [torch.zeros_like(way) for way in ways]
        self._before = [self.m * v + way for v, way in zip(before, ways, strict=True)]
        return [self.s * (way + self.m * v) for v, way in zip(self._before, ways, strict=True)]


class NewestValues:
    """Computes advantages and returns with the critic of theta_j, not with what actors stored."""

    def gae(self, batch: TensorDictBase, **settings: Any) -> Targets:
        return super().gae(batch, value=self.values_of(batch) if self.lag else None, **settings)


class DecoupledByAPass(PPO):
    """PPO's ``decoupled``, but with the newest weights as proximal policy of all samples.

    Their log-probabilities and values take one more pass. The option of the package takes those
    that the first epoch computes.
    """

    def on_samples_ready(self, samples: TensorDictBase) -> None:
        super().on_samples_ready(samples)
        if self.lag:
            with torch.no_grad():
                policy, value = self.evaluate(samples)
                newest = policy.log_prob(samples["action"])
            samples["advantage"] *= (newest - samples["behaviour_log_prob"]).exp()
            samples["behaviour_log_prob"], samples["behaviour_value"] = newest, value


class Reanchored(PPO):
    """Bounds the distance from the newest weights, as if those had collected the round.

    :class:`DecoupledByAPass` without its weights, which correct for the older ones.
    """

    def on_samples_ready(self, samples: TensorDictBase) -> None:
        super().on_samples_ready(samples)
        if self.lag:
            with torch.no_grad():
                policy, samples["behaviour_value"] = self.evaluate(samples)
                samples["behaviour_log_prob"] = policy.log_prob(samples["action"])


class AlwaysDecoupled(PPO):
    """``decoupled`` without a delay too, where it leaves the first epoch unclipped."""

    decouples = True


class CutDecoupled(PPO):
    """PPO's ``decoupled`` with weights of at most 1, as A2C's ``ratio`` has them."""

    def keep_in_round(self, samples: TensorDictBase, **entries: Tensor) -> None:
        """Let no sample be likelier by the proximal policy than by the behaviour policy."""
        behaviour = torch.maximum(samples["behaviour_log_prob"], entries["proximal_log_prob"])
        super().keep_in_round(samples, behaviour_log_prob=behaviour, **entries)


class RateByKL(PPO):
    """Lets the rate follow how far an update went, as the adaptive schedule of rl_games does.

    The last epoch's mean divergence is to stay between half the target and twice the target. A rate
    that falls by itself is to be left out (``learning_rate_decay=False``).
    """

    target = 0.008
    factor = 1.5
    smallest, largest = 1e-6, 1e-2

    def weighted_sum(self, losses: dict[str, Tensor]) -> Tensor:
        epoch, minibatch = divmod(self.part.index, self.minibatches)
        if epoch == self.epochs - 1:
            self._divergences = [] if minibatch == 0 else self._divergences
            self._divergences.append(losses["approx_kl"].detach())
        return super().weighted_sum(losses)

    def on_round_end(self) -> None:
        super().on_round_end()
        divergence = torch.stack(self._divergences).mean().item()
        for group in self.optimizers().param_groups:
            if divergence > 2 * self.target:
                group["lr"] = max(group["lr"] / self.factor, self.smallest)
            elif divergence < self.target / 2:
                group["lr"] = min(group["lr"] * self.factor, self.largest)


class Uncut(A2C):
    """A2C's ``ratio`` with weights of more than 1 too."""

    newest_values = True

    def loss(self, batch: TensorDictBase) -> Tensor:
        gae = partial(self.gae, batch, gae_lambda=self.gae_lambda, unroll=self.unroll)
        stored = None if self.newest_values else gae()  # before the pass: it exchanges weights
        samples = self.samples_of(batch)
        policy, value = self.evaluate(samples)
        targets = stored or gae(value=value.detach().reshape(*batch.shape, 1))
        log_prob = policy.log_prob(samples["action"])
        weight = (log_prob.detach() - samples["behaviour_log_prob"]).exp()
        losses = {
            "policy": policy_gradient_loss(log_prob, weight * targets.advantage.flatten()),
            "value": value_loss(value, targets.returns.flatten()),
            "entropy": mean_entropy(policy),
        }
        return self.weighted_sum(losses)


class Weighted(Uncut):
    """:class:`Uncut` with the values that actors stored: the critic is one update late."""

    newest_values = False


class RatioNewestValues(NewestValues, PPO):
    pass


class DecoupledNewestValues(NewestValues, DecoupledByAPass):
    pass


class NewestDecoupled(NewestValues, PPO):
    """PPO's ``decoupled`` whose advantages and returns come from the critic of theta_j."""


class ReanchoredNewestValues(NewestValues, Reanchored):
    pass


class StoredValues(PQN):
    """Computes targets with the values that actors stored: those of theta_{j-1}."""

    def gae(self, batch: TensorDictBase, **settings: Any) -> Targets:
        return super().gae(batch, **settings | {"value": None})


class ExtrapolatedA2C(Extrapolated, A2C):
    pass


class ExtrapolatedPPO(Extrapolated, PPO):
    pass


class SmallOuterPPO(Outer, PPO):
    s = 0.8


class LargeOuterPPO(Outer, PPO):
    s = 1.25


class LargerOuterPPO(Outer, PPO):
    s = 1.5


class NesterovPPO(Outer, PPO):
    s, m = 0.8, 0.2


class NewestCritic(PPO):
    """Displaces the actor alone: the critic of ``mlp``, a network of its own, goes on at theta_j.

    What a critic's updates lack is known without a policy, so its regression need not be late.
    """

    newest_targets = False
    """Compute advantages and returns with the critic of theta_j, not with what actors stored."""

    def samples_to_learn(self, batch: TensorDictBase) -> TensorDictBase:
        if not self.displaces:
            return super().samples_to_learn(batch)
        if self.newest_targets:
            value = self.values_of(batch)
            targets = self.gae(batch, gae_lambda=self.gae_lambda, unroll=self.unroll, value=value)
        samples = super().samples_to_learn(batch)
        if self.newest_targets:
            samples["advantage"] = targets.advantage.flatten()
            samples["returns"] = targets.returns.flatten()
        with torch.no_grad():
            for parameter, newest in self._of_critic():
                parameter.copy_(newest)
            samples["behaviour_value"] = self.evaluate(samples)[1]
        return samples

    @torch.no_grad()
    def on_round_end(self) -> None:
        if self.displaces:
            kept = [parameter.clone() for parameter, _ in self._of_critic()]
        super().on_round_end()
        if self.displaces:
            for (parameter, _), value in zip(self._of_critic(), kept, strict=True):
                parameter.copy_(value)

    def _of_critic(self) -> list[tuple[Tensor, Tensor]]:
        named = zip(
            (name for name, p in self.actor_critic.named_parameters() if p.requires_grad),
            self.delayed.parameters,
            self.delayed.newest,
            strict=True,
        )
        return [
            (parameter, newest) for name, parameter, newest in named if name.startswith("module.2.")
        ]


class NewestCriticAndTargets(NewestCritic):
    newest_targets = True
