"""The learner of IMPALA: an actor-critic that corrects for however old its data is."""

from __future__ import annotations

from typing import Literal

from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch import distributions as d

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.learner.base import Learner, require
from hts_torchrl.objectives.a2c import mean_entropy, policy_gradient_loss, value_loss
from hts_torchrl.objectives.vtrace import vtrace_targets
from hts_torchrl.round_part import RoundPart


class Impala(Learner):
    """V-trace actor-critic: the baseline of asynchronous systems (Espeholt et al., 2018).

    One update a batch, at the newest weights. With ``data.collection=actors`` it is IMPALA, with
    ``server`` SEED RL (Espeholt et al., 2020); with ``rounds`` the same loss learns from data that
    is one update old. How many updates old it was is logged: ``staleness/mean`` and
    ``staleness/max``, over the steps of a batch. Losses are means over a batch, where the paper has
    sums.

    Args:
        policy: an actor-critic; None builds ``network`` for the data module's environment.
        network: ``nature``, ``nips``, ``impala``, ``seed``, ``mlp`` or ``module.Class`` of a trunk.
        squash: pass continuous actions through tanh into their bounds.
        optimizer: ``adam`` or ``rmsprop`` (smoothing 0.99).
        learning_rate: at the start.
        learning_rate_decay: linearly to zero over the run.
        epsilon: of the optimiser.
        gamma: discount.
        value_coef: weight of the value loss.
        entropy_coef: weight of the entropy bonus.
        rho_clip: bound on the importance ratio of a step.
        c_clip: bound on the importance ratios of the steps after it.
        num_threads: torch threads of the learner. None leaves torch's.
    """

    corrects_any_lag = True

    def __init__(  # noqa: PLR0913 - flags of the command line, keyword only
        self,
        policy: nn.Module | None = None,
        *,
        network: str = "mlp",
        squash: bool = False,
        optimizer: Literal["adam", "rmsprop"] = "rmsprop",
        learning_rate: float = 6e-4,
        learning_rate_decay: bool = False,
        epsilon: float = 1e-5,
        gamma: float = 0.99,
        value_coef: float = 0.5,
        entropy_coef: float = 0.01,
        rho_clip: float = 1.0,
        c_clip: float = 1.0,
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
            gae_lambda=1.0,
            unroll=None,
            value_coef=value_coef,
            entropy_coef=entropy_coef,
            num_threads=num_threads,
        )
        require(rho_clip > 0, f"rho_clip={rho_clip}", "more than 0")
        require(c_clip > 0, f"c_clip={c_clip}", "more than 0")
        self.save_hyperparameters(ignore=["policy"])
        self.rho_clip, self.c_clip = rho_clip, c_clip

    @property
    def parts_per_round(self) -> int:  # type: ignore[override]
        """One: V-trace needs whole trajectories."""
        chunks = self.trainer.accumulate_grad_batches
        if chunks != 1:
            raise ConfigurationError(f"accumulate_grad_batches={chunks}; Impala needs 1")
        return 1

    def _begin_round(self, batch: TensorDictBase) -> None:
        """Flatten the trajectories, and evaluate what they ended on."""
        age = (self.updates - batch["collector", "policy_version"]).float()
        self.log_losses({"mean": age.mean(), "max": age.max()}, "staleness")
        self._open_round()
        after = batch["next"]
        self._shape = batch.shape
        self._unseen = after["truncated"].squeeze(-1).clone()
        self._unseen[:, -1] = True
        final = after.select(*self._observation_keys)[self._unseen]
        self._final_value = self._value_of(final)
        self._samples = TensorDict(
            {
                **self._observations(batch),
                "action": batch[self._action_key],
                "behaviour_log_prob": batch[self._log_prob_key].unsqueeze(-1),
                "reward": after["reward"],
                "done": after["done"],
                "terminated": after["terminated"],
            },
            batch.shape,
        ).reshape(-1)

    def _rows(self, part: RoundPart) -> slice:
        return slice(0, part.round.numel())

    def _before_forward(self, part: RoundPart) -> None:
        """Take the gradient at the newest weights, where the parameters are."""

    def _loss(self, samples: TensorDictBase, distribution: d.Distribution, value: Tensor) -> Tensor:
        log_prob = distribution.log_prob(samples["action"])
        behaviour, reward, done, terminated = (
            samples[key].view(*self._shape, 1)
            for key in ("behaviour_log_prob", "reward", "done", "terminated")
        )
        now = value.detach().view_as(reward)
        next_value = now.roll(-1, 1)
        next_value[self._unseen] = self._final_value
        targets = vtrace_targets(
            log_prob=log_prob.detach().view_as(reward),
            behaviour_log_prob=behaviour,
            reward=reward,
            value=now,
            next_value=next_value,
            done=done,
            terminated=terminated,
            gamma=self.gamma,
            rho_clip=self.rho_clip,
            c_clip=self.c_clip,
        )
        losses = {
            "policy": policy_gradient_loss(log_prob, targets.advantage.flatten()),
            "value": value_loss(value, targets.returns.flatten()),
            "entropy": mean_entropy(distribution),
        }
        self.log_losses(losses)
        return (
            losses["policy"]
            + self.value_coef * losses["value"]
            - self.entropy_coef * losses["entropy"]
        )
