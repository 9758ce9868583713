"""Advantage actor-critic, learning from the round before the running one.

Shapes: N environments, T steps of a round; B samples of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.optim import Optimizer

from hts_torchrl.errors import ConfigurationError, require
from hts_torchrl.learner.base import Learner
from hts_torchrl.learner.captured_loss import SETTING, CapturedLoss, require_gpu
from hts_torchrl.objectives.losses import mean_entropy, policy_gradient_loss, value_loss
from hts_torchrl.training.round_slice import RoundSlice


class A2C(Learner):
    """Advantage actor-critic, learning from the previous round.

    The delayed step has two forms:

    - ``ratio`` takes the gradient at the newest weights, with their values. Each sample is weighted
      by the probability of its action under the newest weights, divided by that under the weights
      that collected the round. Weights are truncated at 1, as in V-trace (Espeholt et al., 2018).
    - ``gradient`` takes it at the weights that collected the round, and applies it to the newest
      (equation 3 of the paper).

    Without a delay both are plain A2C.

    A round is one update. ``Trainer(accumulate_grad_batches=K)`` computes its gradient in K parts,
    each of some environments. ``Trainer(gradient_clip_val=0.5)`` clips it.

    Args:
        gae_lambda: 1 gives n-step returns.
        unroll: steps after which a return is bootstrapped; None is the whole round.
        delayed_step: ``ratio`` or ``gradient``.
        cudagraph_loss: replay the loss and its gradient as one CUDA graph on a GPU, which is faster
            for small rounds. Its bits may differ from those without. Rounds with a truncation
            before their last step are computed without it. Layers of the policy stay in the mode of
            the first round. Not with ``gradient``, ``normalize_value`` or parts of a round.

    Raises:
        ConfigurationError: if a setting is out of its bounds, or cannot be part of a graph.
    """

    def __init__(
        self,
        policy: nn.Module | None = None,
        *,
        gae_lambda: float = 1.0,
        unroll: int | None = None,
        delayed_step: Literal["ratio", "gradient"] = "ratio",
        cudagraph_loss: bool = False,
        **settings: Any,  # noqa: ANN401 - those of Learner
    ) -> None:
        super().__init__(policy, **settings)
        require(0 <= gae_lambda <= 1, f"gae_lambda={gae_lambda}", "0 to 1")
        require(unroll is None or unroll > 0, f"unroll={unroll}", "None, or 1 or more,")
        forms = ("ratio", "gradient")
        require(delayed_step in forms, f"delayed_step={delayed_step!r}", "ratio or gradient")
        self.gae_lambda, self.unroll = gae_lambda, unroll
        self.delayed_step = delayed_step
        self.cudagraph_loss = cudagraph_loss
        self._graph: CapturedLoss | None = None
        self._graph_of: Any = None
        """What the graph was captured for."""
        exchanges = delayed_step == "gradient"
        if cudagraph_loss and (exchanges or self.value_scale is not None):
            other = "delayed_step=gradient" if exchanges else "normalize_value=True"
            raise ConfigurationError(
                f"cudagraph_loss=True with {other}: no graph has what it exchanges or keeps; leave "
                "one of them out"
            )

    @property
    def reweights(self) -> bool:
        """Whether the gradient is that of the newest weights, from data of those before."""
        return self.delayed_step == "ratio" and self.lag > 0

    @property
    def computed_for(self) -> str | None:
        """The setting for which a training step computes the gradient, if there is one."""
        return super().computed_for or (f"{SETTING}=True" if self.cudagraph_loss else None)

    @property
    def parts_per_round(self) -> int:
        """Parts whose gradients the Trainer accumulates."""
        return self.trainer.accumulate_grad_batches

    def training_step(self, part: RoundSlice, _: int) -> Tensor:
        """Return the loss of one part, at the weights that ``delayed_step`` asks for."""
        with self.learning_from(part):
            if self.lag and not self.reweights:
                self.delayed.load_behaviour()
            chunks = self.chunks.of(part.round[self.environments_of(part)])
            if self.cudagraph_loss:
                return self._gradient.mean(lambda index: self._replayed(chunks[index]))
            return self.loss_by_chunks(lambda index: self.loss(chunks[index]))

    def environments_of(self, part: RoundSlice) -> slice:
        """Return which of the round's environments a part has.

        Raises:
            ConfigurationError: if the environments cannot be divided so.
        """
        num_envs = part.round.shape[0]
        if num_envs % part.count:
            raise ConfigurationError(
                f"accumulate_grad_batches={part.count} does not divide the {num_envs} environments"
            )
        size = num_envs // part.count
        return slice(part.index * size, (part.index + 1) * size)

    def loss(self, batch: TensorDictBase) -> Tensor:
        """Return the loss of the round ``[N, T]``, or of some of its environments."""
        gae = partial(self.gae, batch, gae_lambda=self.gae_lambda, unroll=self.unroll)
        # Before the pass, whose graph would not survive that buffers change.
        targets = None if self.reweights else gae()
        samples = self.samples_of(batch)
        policy, value = self.evaluate(samples)
        log_prob = policy.log_prob(samples["action"])
        weight: Tensor | float = 1.0
        if targets is None:
            targets = gae(value=value.detach().reshape(*batch.shape, 1))
            ratio = (log_prob.detach() - samples["behaviour_log_prob"]).exp()
            weight = ratio.clamp(max=1)
        advantage = weight * targets.advantage.reshape(value.shape)
        losses = {
            "policy": policy_gradient_loss(log_prob, advantage),
            "value": value_loss(value, targets.returns.reshape(value.shape)),
            "entropy": mean_entropy(policy),
        }
        return self.weighted_sum(losses)

    def on_fit_start(self) -> None:
        """Refuse a graph where there is no GPU, or where ranks would have no equal chunks."""
        if self.cudagraph_loss:
            require_gpu(self.device)
            chunks, ranks = self.gradient_chunks, self.trainer.world_size
            told = f"cudagraph_loss=True with gradient_chunks={chunks} on {ranks} ranks"
            require(chunks % ranks == 0, told, f"a multiple of {ranks}")
            self._at_end.callback(setattr, self, "_graph", None)  # its memory is free then
        super().on_fit_start()

    def on_after_backward(self) -> None:
        """Put the newest weights back, from which the optimiser steps; the gradient stays."""
        if self.delayed.holds_behaviour:
            self.delayed.restore_newest()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Put them back where there was no backward pass, as ``training_step`` returned None."""
        if self.delayed.holds_behaviour:
            self.delayed.restore_newest()
        super().on_before_optimizer_step(optimizer)

    def _replayed(self, batch: TensorDictBase) -> Tensor:
        """Return gradient, loss and figures of a chunk, by a graph if the chunk is as most are."""
        # How many values a truncation asks for differs, and a graph has one shape.
        if batch["next", "truncated"][:, :-1].any():
            return self._gradient.of(partial(self.loss, batch))
        # A replay runs no Python; what a callback may change is a coefficient, perhaps to a whole
        # number. Other whole numbers count updates.
        numbers = [
            value
            for name, value in vars(self).items()
            if isinstance(value, float) or (isinstance(value, int) and name in self.hparams)
        ]
        graph_of = (self.lag, *numbers, *map(id, self._gradient.trained()))
        if self._graph is None or self._graph_of != graph_of:
            self._graph = None  # its memory is free before that of the next is taken
            self._captures = True
            try:
                self._graph = CapturedLoss(
                    lambda static: self._gradient.of(partial(self.loss, static)), batch, self.device
                )
            finally:
                self._captures = False
            self._graph_of = graph_of
        return self._graph(batch)
