"""Advantage actor-critic with the one-step-delayed gradient."""

from __future__ import annotations

from typing import Literal

from tensordict import TensorDictBase
from torch import Tensor, nn
from torch import distributions as d

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.learner.base import Learner
from hts_torchrl.objectives.a2c import mean_entropy, policy_gradient_loss, value_loss
from hts_torchrl.round_part import RoundPart


class A2C(Learner):
    """Advantage actor-critic with the one-step-delayed gradient (equation 3 of the paper).

    A round is one update. ``Trainer(accumulate_grad_batches=K)`` computes its gradient in K chunks
    of environments; ``Trainer(gradient_clip_val=0.5)`` clips it.

    Args:
        policy: an actor-critic; None builds ``network`` for the data module's environment.
        network: ``nature``, ``nips``, ``impala``, ``seed``, ``mlp`` or ``module.Class`` of a trunk.
        squash: pass continuous actions through tanh into their bounds.
        optimizer: ``rmsprop`` (smoothing 0.99) or ``adam``.
        learning_rate: at the start.
        learning_rate_decay: linearly to zero over the run.
        epsilon: of the optimiser.
        gamma: discount.
        gae_lambda: 1 gives n-step returns.
        unroll: steps after which a return is bootstrapped; None is the whole round.
        value_coef: weight of the value loss.
        entropy_coef: weight of the entropy bonus.
        num_threads: torch threads of the learner; results depend on it. None leaves torch's.
    """

    def __init__(  # noqa: PLR0913 - flags of the command line, keyword only
        self,
        policy: nn.Module | None = None,
        *,
        network: str = "mlp",
        squash: bool = False,
        optimizer: Literal["adam", "rmsprop"] = "rmsprop",
        learning_rate: float = 7e-4,
        learning_rate_decay: bool = False,
        epsilon: float = 1e-5,
        gamma: float = 0.99,
        gae_lambda: float = 1.0,
        unroll: int | None = None,
        value_coef: float = 0.5,
        entropy_coef: float = 0.01,
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
        self.save_hyperparameters(ignore=["policy"])

    @property
    def parts_per_round(self) -> int:  # type: ignore[override]
        """Chunks whose gradients the Trainer accumulates."""
        return self.trainer.accumulate_grad_batches

    def _rows(self, part: RoundPart) -> slice:
        num_envs, steps = part.round.shape
        if num_envs % part.count:
            raise ConfigurationError(
                f"accumulate_grad_batches={part.count} does not divide the {num_envs} environments"
            )
        chunk = num_envs // part.count * steps
        return slice(part.index * chunk, (part.index + 1) * chunk)

    def _before_forward(self, part: RoundPart) -> None:  # noqa: ARG002
        if self.lag:
            self._delayed.load_behaviour()

    def on_after_backward(self) -> None:
        """Put the newest weights back; the gradient at the behaviour weights stays."""
        if self.lag:
            self._delayed.restore_newest()

    def _loss(self, samples: TensorDictBase, distribution: d.Distribution, value: Tensor) -> Tensor:
        losses = {
            "policy": policy_gradient_loss(
                distribution.log_prob(samples["action"]), samples["advantage"]
            ),
            "value": value_loss(value, samples["returns"]),
            "entropy": mean_entropy(distribution),
        }
        self.log_losses(losses)
        return (
            losses["policy"]
            + self.value_coef * losses["value"]
            - self.entropy_coef * losses["entropy"]
        )
