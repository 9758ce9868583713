"""A gradient that a training step computes itself: chunk by chunk, or by a replayed graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from hts_torchrl.compat.torch import runs_after_accumulation
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.learner.delayed_gradient import DelayedWeights
from hts_torchrl.learner.gradient_chunks import GradientChunks

if TYPE_CHECKING:
    from hts_torchrl.learner.base import Learner


class ComputedGradient:
    """The mean gradient over all chunks of all ranks, from ``training_step`` until ``backward``.

    A learner with several chunks, or with a captured loss, makes each step so::

        loss = gradient.mean(lambda index: gradient.of(loss_of_chunk))   # in training_step
        gradient.put_into_place(weights)                                 # in backward

    Args:
        learner: whose trained parameters have the gradient.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.figures: dict[str, Tensor] | None = None
        """What a chunk's loss has logged; None outside of one."""
        self._names: list[str] = []
        """Of what a chunk's loss logs."""
        self._mean: Tensor | None = None
        """Of all trained parameters, one after another, until ``backward``."""
        self._is_first = True

    def trained(self) -> list[Parameter]:
        """Return the parameters that have a gradient, in their order."""
        return [parameter for parameter in self._learner.parameters() if parameter.requires_grad]

    def begin(self) -> GradientChunks:
        """Begin a ``fit``; returns the chunks of this rank.

        Raises:
            ConfigurationError: if environments, ranks or the Trainer's settings do not suit them.
        """
        learner, setting = self._learner, self._learner.computed_for
        self._is_first = True
        for name, parameter in learner.named_parameters():
            if runs_after_accumulation(parameter):
                raise ConfigurationError(
                    f"{setting}: {name} has a post_accumulate_grad_hook, which would "
                    "not run, as no gradient is accumulated; leave one of the two out"
                )
        rank, ranks = learner.global_rank, learner.trainer.world_size
        chunks = GradientChunks(learner.gradient_chunks, rank=rank, world_size=ranks)
        schedule = getattr(getattr(learner.trainer, "datamodule", None), "schedule", None)
        if schedule is not None:
            chunks.require_divides(schedule.num_envs)
        if (several := learner.trainer.accumulate_grad_batches) != 1:
            raise ConfigurationError(
                f"accumulate_grad_batches={several} with {setting}: "
                "chunks are accumulated already; 1 is needed"
            )
        return chunks

    def of(self, loss_of: Callable[[], Tensor]) -> Tensor:
        """Return gradient, loss and logged figures of a chunk as one vector."""
        self.figures = {}
        try:
            loss = loss_of()
            with torch.autocast(loss.device.type, enabled=False):
                gradients = torch.autograd.grad(
                    loss, self.trained(), allow_unused=True, materialize_grads=True
                )
            self._names = list(self.figures)
            figures = [each.detach().float() for each in (loss, *self.figures.values())]
        finally:
            self.figures = None
        return torch.cat([*(each.flatten() for each in gradients), torch.stack(figures)])

    def mean(self, vector_of: Callable[[int], Tensor]) -> Tensor:
        """Keep the mean gradient over all chunks, log their mean figures, return the mean loss.

        Args:
            vector_of: gives what :meth:`of` returns, of this rank's chunk of an index.
        """
        learner = self._learner

        def vectors() -> Iterator[Tensor]:
            for index, chunk in enumerate(learner.chunks.own):
                learner.begin_chunk(chunk)
                yield vector_of(index)

        total = learner.chunks.mean(vectors())
        end = sum(parameter.numel() for parameter in self.trained())
        self._mean = total[:end]
        if self._names:
            learner.log_figures(dict(zip(self._names, total[end + 1 :], strict=True)))
        return total[end]

    def put_into_place(self, weights: DelayedWeights) -> None:
        """Give the parameters their gradients, before they are clipped and looked at.

        Args:
            weights: of the policy, whose buffers must not have moved in the first step.

        Raises:
            ConfigurationError: if the training step has computed none, or a layer has statistics
                that change with each pass.
        """
        setting = self._learner.computed_for
        if self._mean is None:
            raise ConfigurationError(
                f"{setting}: {type(self._learner).__name__}.training_step computes one gradient "
                "of the round; let it return loss_by_chunks(...), or leave the setting out"
            )
        if self._is_first and (moved := weights.moved_buffers()):
            several = self._learner.gradient_chunks > 1
            depend = "the number of ranks" if several else "when it was captured"
            raise ConfigurationError(
                f"{setting}: the policy's {moved[0]} changes with each pass, as "
                f"statistics of BatchNorm do, and would depend on {depend}: put LayerNorm in its "
                "place, or call eval() on the layer before fit"
            )
        self._is_first = False
        trained = self.trained()
        gradients = torch.split(self._mean, [parameter.numel() for parameter in trained])
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient.view(parameter.shape).to(parameter.dtype)
        self._mean = None
