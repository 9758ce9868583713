"""An update whose bits do not depend on the number of ranks: it is computed by chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hts_torchrl.compat.lightning import (
    is_accumulating,
    leave_gradients,
    logs_after,
    set_callback_metrics,
)
from hts_torchrl.compat.torch import runs_after_accumulation
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.learner.captured_loss import SETTING, CapturedLoss, require_gpu
from hts_torchrl.learner.gradient_chunks import GradientChunks
from hts_torchrl.learner.rounds import RoundModule
from hts_torchrl.rng import update_seed


class ChunkedRounds(RoundModule):
    """Computes gradients and samples chunk by chunk, if ``gradient_chunks`` asks for it.

    A ``training_step`` says what is done with one chunk; with one chunk that is the round::

        with self.learning_from(part):
            if part.is_first:
                self.samples = self.samples_by_chunks(part.round, samples_to_learn)
            return self.loss_by_chunks(lambda index: loss(...))   # of this rank's index-th chunk

    With more, each chunk's gradient is computed at once, and ``backward`` puts their mean over all
    ranks into place: before gradients are clipped and looked at.

    Args:
        policy: as a :class:`RoundModule` has it.
        gradient_chunks: chunks of environments, whose gradients are added in a fixed order.
        settings: of a :class:`RoundModule`.
    """

    def __init__(
        self,
        policy: nn.Module | None = None,
        *,
        gradient_chunks: int = 1,
        **settings: Any,  # noqa: ANN401 - those of RoundModule
    ) -> None:
        super().__init__(policy, **settings)
        self.gradient_chunks = gradient_chunks
        self.cudagraph_loss = False
        """Whether :meth:`loss_of_chunks` is replayed as a CUDA graph; of a learner that may be."""
        self.chunks = GradientChunks(gradient_chunks)
        """Which chunks this rank has."""
        self._chunk = 0
        """Global index of the one that is being computed."""
        self._gradient: Tensor | None = None
        """Of all trained parameters, one after another, until ``backward``."""
        self._figures: dict[str, Tensor] | None = None
        """What a chunk's loss has logged; None outside of one."""
        self._names: list[str] = []
        """Of what a chunk's loss logs."""
        self._buffers_stay = False
        self._captures = False
        """Whether a loss is captured, which may ask the GPU for nothing then."""
        self._graph: CapturedLoss | None = None
        self._graph_of: Any = None
        """What the graph was captured for."""

    def on_fit_start(self) -> None:
        """Take this rank's chunks.

        Raises:
            ConfigurationError: if environments, ranks or the Trainer's settings do not suit them.
        """
        super().on_fit_start()
        self._buffers_stay = False
        if self.cudagraph_loss:
            require_gpu(self.device)
        if not self.computes_gradient:
            return
        for name, parameter in self.named_parameters():
            if runs_after_accumulation(parameter):
                raise ConfigurationError(
                    f"{self._why_computed}: {name} has a post_accumulate_grad_hook, which would "
                    "not run, as no gradient is accumulated; leave one of the two out"
                )
        rank, ranks = self.global_rank, self.trainer.world_size
        self.chunks = GradientChunks(self.gradient_chunks, rank=rank, world_size=ranks)
        schedule = getattr(getattr(self.trainer, "datamodule", None), "schedule", None)
        if schedule is not None:
            self.chunks.require_divides(schedule.num_envs)
        if (several := self.trainer.accumulate_grad_batches) != 1:
            raise ConfigurationError(
                f"accumulate_grad_batches={several} with {self._why_computed}: "
                "chunks are accumulated already; 1 is needed"
            )

    @property
    def computes_gradient(self) -> bool:
        """Whether a training step computes the gradient, and ``backward`` puts it into place."""
        return self.gradient_chunks > 1 or self.cudagraph_loss

    @property
    def _why_computed(self) -> str:
        several = self.gradient_chunks > 1
        return f"gradient_chunks={self.gradient_chunks}" if several else f"{SETTING}=True"

    def on_train_start(self) -> None:
        """Take the weights with which a resumed run acts; keep DDP from averaging gradients."""
        super().on_train_start()
        if self.computes_gradient:
            leave_gradients(self.trainer.strategy)

    def on_fit_end(self) -> None:
        """Free the memory of the graph."""
        super().on_fit_end()
        self._graph = self._graph_of = None

    def chunks_of_round(self) -> list[TensorDictBase]:
        """Return this rank's chunks of the round, ``[N, T]`` each."""
        return self.chunks.of(self.part.round)

    def samples_by_chunks(
        self, batch: TensorDictBase, samples_to_learn: Callable[[TensorDictBase], TensorDictBase]
    ) -> TensorDictBase:
        """Return the samples of this rank's chunks, one chunk after another.

        Args:
            batch: the round ``[N, T]``.
            samples_to_learn: gives B samples of a chunk.
        """
        if self.gradient_chunks == 1:
            return samples_to_learn(batch)
        samples = []
        for chunk, rows in zip(self.chunks.own, self.chunks.of(batch), strict=True):
            self._begin(chunk)
            samples.append(samples_to_learn(rows))
        return torch.cat(samples)

    def loss_by_chunks(self, loss_of: Callable[[int], Tensor]) -> Tensor:
        """Return the loss of a part of a round: with several chunks, the mean over all of them.

        Args:
            loss_of: gives the loss of this rank's chunk of an index, 0 and up.

        Returns:
            A scalar. Of several chunks it has no gradient: that is computed here, and
            ``backward`` puts it into place.
        """
        if not self.computes_gradient:
            return loss_of(0)
        return self._mean(lambda index: self._gradient_of(partial(loss_of, index)))

    def loss_of_chunks(
        self, loss: Callable[[TensorDictBase], Tensor], chunks: list[TensorDictBase]
    ) -> Tensor:
        """Return what :meth:`loss_by_chunks` does; with ``cudagraph_loss`` it is replayed.

        Args:
            loss: of a chunk ``[N, T]``, from its entries alone. A replay runs no Python of it, so
                what else it reads stays as it was, but for the learner's own floats.
            chunks: this rank's.
        """
        if not self.cudagraph_loss:
            return self.loss_by_chunks(lambda index: loss(chunks[index]))
        return self._mean(lambda index: self._replayed(loss, chunks[index]))

    def _mean(self, gradient_of: Callable[[int], Tensor]) -> Tensor:
        """Keep the mean gradient over all chunks, log their mean figures, return the mean loss."""

        def vectors() -> Iterator[Tensor]:
            for index, chunk in enumerate(self.chunks.own):
                self._begin(chunk)
                yield gradient_of(index)

        total = self.chunks.mean(vectors())
        end = sum(parameter.numel() for parameter in self._trained())
        self._gradient, figures = total[:end], total[end + 1 :]
        if self._names:
            self._log(dict(zip(self._names, figures, strict=True)))
        return total[end]

    def _gradient_of(self, loss_of: Callable[[], Tensor]) -> Tensor:
        """Return gradient, loss and logged figures of a chunk as one vector."""
        self._figures = {}
        try:
            loss = loss_of()
            with torch.autocast(self.device.type, enabled=False):
                gradients = torch.autograd.grad(
                    loss, self._trained(), allow_unused=True, materialize_grads=True
                )
            self._names = list(self._figures)
            figures = [each.detach().float() for each in (loss, *self._figures.values())]
        finally:
            self._figures = None
        return torch.cat([*(each.flatten() for each in gradients), torch.stack(figures)])

    def _replayed(self, loss: Callable[[TensorDictBase], Tensor], batch: TensorDictBase) -> Tensor:
        """Return what :meth:`_gradient_of` does, by a graph if the chunk is as most are."""
        # How many values a truncation asks for differs, and a graph has one shape.
        if batch["next", "truncated"][:, :-1].any():
            return self._gradient_of(partial(loss, batch))
        # A callback may change a coefficient.
        numbers = [value for value in vars(self).values() if isinstance(value, float)]
        graph_of = (self.lag, *numbers, *map(id, self._trained()))
        if self._graph is None or self._graph_of != graph_of:
            self._graph = None  # its memory is free before that of the next is taken
            self._captures = True
            try:
                self._graph = CapturedLoss(
                    lambda static: self._gradient_of(partial(loss, static)), batch, self.device
                )
            finally:
                self._captures = False
            self._graph_of = graph_of
        return self._graph(batch)

    def _begin(self, chunk: int) -> None:
        """Let a chunk's draws be its own, whichever rank computes it."""
        self._chunk = chunk
        if self.gradient_chunks > 1:
            self._draws.reseed(update_seed(self.seed, self.updates, self.part.index, chunk))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Compute the gradient, or put that of all chunks into place.

        Raises:
            ConfigurationError: if the training step knows nothing of chunks.
        """
        if not self.computes_gradient:
            super().backward(loss, *args, **kwargs)
            return
        if self._gradient is None:
            raise ConfigurationError(
                f"{self._why_computed}: {type(self).__name__}.training_step computes one gradient "
                "of the round; let it return loss_by_chunks(...), or leave the setting out"
            )
        end = 0
        for parameter in self._trained():
            begin, end = end, end + parameter.numel()
            part = self._gradient[begin:end]
            parameter.grad = part.view(parameter.shape).to(parameter.dtype)
        self._gradient = None

    def _trained(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Stop a run whose gradients are not finite, or whose layers mix the chunks.

        Raises:
            ConfigurationError: if a layer has statistics that change with each pass.
        """
        super().on_before_optimizer_step(optimizer)
        if not self.computes_gradient or self._buffers_stay:
            return
        if moved := self._weights.moved_buffers():
            depend = "the number of ranks" if self.gradient_chunks > 1 else "when it was captured"
            raise ConfigurationError(
                f"{self._why_computed}: the policy's {moved[0]} changes with each pass, as "
                f"statistics of BatchNorm do, and would depend on {depend}: put LayerNorm in its "
                "place, or call eval() on the layer before fit"
            )
        self._buffers_stay = True

    def log_losses(self, losses: dict[str, Tensor], group: str = "loss") -> None:
        """Log losses, or another group of figures, when the Trainer's loggers will take them.

        ``Trainer.callback_metrics`` has them after each step. Of several chunks it has their means.
        """
        if is_accumulating(self.trainer):
            return
        figures = {f"{group}/{name}": value.detach().clone() for name, value in losses.items()}
        if self._figures is None:
            self._log(figures)
        else:
            self._figures |= figures

    def _log(self, figures: dict[str, Tensor]) -> None:
        if logs_after(self.trainer, self.trainer.global_step + 1):
            self.log_dict(figures)
        else:
            set_callback_metrics(self.trainer, figures)
