"""Q-learning on the rounds of parallel environments: no replay memory, and no target network.

Shapes: N environments, T steps of a round; B samples of it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tensordict import TensorDictBase
from torch import Tensor, nn

from hts_torchrl.errors import ConfigurationError, require
from hts_torchrl.learner.base import Learner
from hts_torchrl.learner.minibatches import Minibatches
from hts_torchrl.models.q_policy import QHead, make_q_policy, q_head_of
from hts_torchrl.objectives.losses import value_loss
from hts_torchrl.specs import EnvSpec
from hts_torchrl.training.round_slice import RoundSlice
from hts_torchrl.training.trainer_limits import steps_of_run


class PQN(Learner):
    """Parallelised Q-network, learning from the round before the running one.

    Gallici et al., 2024, "Simplifying Deep Temporal Difference Learning" (arXiv 2407.04811); the
    PQN page of CleanRL has the same method in one file. Rounds of many environments replace
    the replay memory, and LayerNorm in the network replaces the target network. For one choice
    among n actions (Discrete, or one-hot).

    The loss is half the squared error of ``Q(s, a)``. Its target is Q(lambda), computed with the
    newest weights before the round's first step::

        R_t = r_t + gamma * (q_lambda * R_{t+1} + (1 - q_lambda) * max_a Q(s_{t+1}, a))

    A terminated episode ends with ``R_t = r_t``. A truncated one, and the round, end with the
    largest value of the true last observation instead of the bracket. Minibatches start at the
    newest weights. Action values can be learned from any policy's actions, so data that is one
    update old needs no correction. It needs one more pass, because actors stored older values.

    Epsilon is part of the weights: each update sets it for the rounds that they collect.

    Args:
        policy: of action values, as :func:`~hts_torchrl.make_q_policy` builds it; None builds
            ``network`` for the data module's environment.
        q_lambda: share of the next step's return in a target; 0 gives one-step targets.
        exploration_initial_eps: initial probability of a random action.
        exploration_final_eps: its final value.
        exploration_fraction: share of the run over which it falls linearly.
        epochs: passes over a round.
        minibatches: parts of each pass.
    """

    lacks: ClassVar[tuple[str, ...]] = ("squash", "value_coef", "entropy_coef")

    computes_side_by_side = True

    def __init__(  # noqa: PLR0913 - flags of the command line, keyword only
        self,
        policy: nn.Module | None = None,
        *,
        optimizer: str = "radam",
        learning_rate: float = 2.5e-4,
        q_lambda: float = 0.65,
        exploration_initial_eps: float = 1.0,
        exploration_final_eps: float = 0.05,
        exploration_fraction: float = 0.1,
        epochs: int = 2,
        minibatches: int = 4,
        **settings: Any,  # noqa: ANN401 - those of Learner
    ) -> None:
        for name in PQN.lacks:
            if name in settings:
                raise ConfigurationError(
                    f"{name}={settings[name]!r}: PQN has no such setting; A2C and PPO have it"
                )
        super().__init__(
            policy,
            optimizer=optimizer,
            learning_rate=learning_rate,
            squash=False,
            value_coef=0.0,
            entropy_coef=0.0,
            **settings,
        )
        if policy is not None and q_head_of(policy) is None:
            raise ConfigurationError(
                f"PQN learns action values, and a policy of type {type(policy).__name__} has none: "
                "leave policy out and name a network, or take make_q_policy(network, spec)"
            )
        for name, number in (
            ("q_lambda", q_lambda),
            ("exploration_initial_eps", exploration_initial_eps),
            ("exploration_final_eps", exploration_final_eps),
            ("exploration_fraction", exploration_fraction),
        ):
            require(0 <= number <= 1, f"{name}={number}", "0 to 1")
        self.epochs, self.minibatches = epochs, minibatches
        self.parts_per_pass = minibatches
        self._minibatches = Minibatches(self)
        self.q_lambda = q_lambda
        self.exploration_initial_eps = exploration_initial_eps
        self.exploration_final_eps = exploration_final_eps
        self.exploration_fraction = exploration_fraction

    def make_policy(self, spec: EnvSpec) -> nn.Module:
        """Build ``network`` with action values, for an environment."""
        return make_q_policy(self.network, spec)

    def prepare_policy(self, datamodule: Any) -> None:  # noqa: ANN401 - may be of another class
        """Build the policy for a data module; before its first update it explores as a new run."""
        super().prepare_policy(datamodule)
        if self.updates == 0:  # a checkpoint is loaded later
            self._head_of_values.epsilon.fill_(self.exploration_initial_eps)

    def on_fit_start(self) -> None:
        """Take note of how many updates epsilon falls."""
        super().on_fit_start()
        self._falling_updates, self._updates_before = 0.0, 0
        if self.exploration_initial_eps != self.exploration_final_eps:
            steps_per_round = self.parts_per_round // self.trainer.accumulate_grad_batches
            updates = steps_of_run(self.trainer, "exploration_fraction") / steps_per_round
            self._falling_updates = self.exploration_fraction * updates
            data = getattr(self.trainer, "datamodule", None)
            self._updates_before = self.updates - getattr(data, "first_round", 0)

    def on_train_start(self) -> None:
        """Let a new run explore as at its start, once it is known that it has something to do."""
        if self.resumption is None:
            self._head_of_values.epsilon.fill_(self.exploration_initial_eps)
        super().on_train_start()

    @property
    def parts_per_round(self) -> int:
        """Minibatches of all epochs: gradient computations on each round."""
        return self.epochs * self.minibatches

    def training_step(self, part: RoundSlice, _: int) -> Tensor:
        """Return the loss of one minibatch; the first one of a round makes the samples of all."""
        with self.learning_from(part):
            if self._minibatches.lack_samples(part):
                self.samples = self.samples_by_chunks(part.round, self.samples_to_learn)
            return self.loss_by_chunks(
                lambda index: self.loss(self._minibatches.of(self.samples, part, index))
            )

    def samples_to_learn(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the samples of a round ``[N, T]`` with the ``returns`` that are their targets."""
        # gae's returns are these with the largest action value as the state's value.
        value = self.values_of(batch) if self.lag else None
        targets = self.gae(batch, gae_lambda=self.q_lambda, value=value)
        return self.samples_of(batch, returns=targets.returns)

    def loss(self, samples: TensorDictBase) -> Tensor:
        """Return the loss of B samples, which have what :meth:`samples_to_learn` adds."""
        policy, largest = self.evaluate(samples)
        value = policy.value_of(samples["action"])  # type: ignore[attr-defined]
        loss = 0.5 * value_loss(value, samples["returns"])
        self.log_losses({"value": loss})
        exploration = {"epsilon": self._head_of_values.epsilon, "state_value": largest.mean()}
        self.log_losses(exploration, "exploration")
        return loss

    def on_round_end(self) -> None:
        """Set epsilon for the weights that the update makes."""
        super().on_round_end()
        updates = self.updates + 1 - self._updates_before
        self._head_of_values.epsilon.fill_(self.epsilon_after(updates))

    def epsilon_after(self, updates: int) -> float:
        """Return epsilon of the weights after so many updates of a run."""
        start, end = self.exploration_initial_eps, self.exploration_final_eps
        if updates >= self._falling_updates:
            return end
        return start + (end - start) * updates / self._falling_updates

    @property
    def _head_of_values(self) -> QHead:
        head = q_head_of(self.actor_critic)
        assert head is not None  # as __init__ and make_policy have seen to
        return head
