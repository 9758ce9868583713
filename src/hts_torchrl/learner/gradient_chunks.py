"""Gradients by fixed chunks of environments: the same bits on any number of ranks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn import Parameter
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode

from hts_torchrl.compat.lightning import leave_gradients, log_figures
from hts_torchrl.compat.torch import of_all_ranks, runs_after_accumulation
from hts_torchrl.errors import ConfigurationError, require, require_type
from hts_torchrl.learner.delayed_gradient import DelayedWeights
from hts_torchrl.learner.finite import DENSE
from hts_torchrl.policy.sampling import seed_generators
from hts_torchrl.rng import update_seed

if TYPE_CHECKING:
    from hts_torchrl.learner.base import Learner


class GradientChunks:
    """The environments of a run in C chunks of equal size, and which of them a rank has.

    Chunks follow the global indices of environments, and each rank has C / R neighbours. What is
    computed of a chunk has the same shapes whoever computes it, and so the same bits::

        for rows in chunks.of(round):          # this rank's
            vectors.append(gradient(rows))
        gradient = chunks.mean(vectors)        # of all chunks, on every rank

    Args:
        count: C.
        rank: of this process.
        world_size: R, the number of ranks.

    Raises:
        ConfigurationError: if the ranks cannot have equally many chunks.
    """

    def __init__(self, count: int, *, rank: int = 0, world_size: int = 1) -> None:
        require(count >= 1, f"gradient_chunks={count}", "1 or more")
        if count % world_size:
            raise ConfigurationError(
                f"model.gradient_chunks={count} on {world_size} ranks; a multiple of {world_size} "
                "is needed, so that each rank has equally many chunks"
            )
        share = count // world_size
        self.count = count
        self.own = range(rank * share, (rank + 1) * share)
        """This rank's chunks."""
        self._world_size = world_size

    def require_divides(self, num_envs: int) -> None:
        """Refuse environments, of all ranks, that cannot be cut into so many equal chunks."""
        if num_envs % self.count:
            raise ConfigurationError(
                f"model.gradient_chunks={self.count} does not divide the {num_envs} environments "
                "(data.num_envs)"
            )

    def of(self, batch: TensorDictBase) -> list[TensorDictBase]:
        """Return this rank's chunks of its round ``[N, T]``, in order; no data is copied.

        Returns:
            TensorDicts ``[N / (C / R), T]``.
        """
        if self.count == 1:
            return [batch]
        self.require_divides(len(batch) * self._world_size)
        return list(batch.split(len(batch) // len(self.own)))

    def mean(self, vectors: Iterable[Tensor]) -> Tensor:
        """Return the mean over the chunks of all ranks; all ranks must call it.

        The chunks are added by :func:`tree_sum`. A rank adds the largest subtrees first that lie
        within the chunks of any rank, and sends those.
        """
        given = iter(vectors)
        share = len(self.own)
        subtree = share & -share  # the largest power of two that divides it
        sums = [tree_sum(itertools.islice(given, subtree)) for _ in range(share // subtree)]
        if self._world_size > 1:
            sums = [each for of_rank in of_all_ranks(torch.stack(sums)) for each in of_rank]
        return tree_sum(sums) / self.count


def tree_sum(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, added in an order that their number alone decides.

    Neighbours are added in pairs, then neighbours among these sums, and so on; what is left without
    a neighbour goes on as it is. Five are ``((a + b) + (c + d)) + e``. At most log2 of them are
    kept at a time.

    Example:
        >>> float(tree_sum(torch.tensor([1e8, 1.0, -1e8, 1.0])))
        0.0
    """
    partial: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        partial.append(tensor)
        ended = index
        while ended % 2 == 1:  # as a binary counter carries
            right = partial.pop()
            partial[-1] = partial[-1] + right
            ended //= 2
    while len(partial) > 1:
        right = partial.pop()
        partial[-1] = partial[-1] + right
    return partial[0]


class RunningChunk(threading.local):
    """The chunk that a thread computes."""

    index = 0
    """Global index."""
    rows = torch.empty(0, dtype=torch.int64)
    """Which of the round's samples its minibatch has."""
    figures: dict[str, Tensor] | None = None
    """What its loss has logged; None outside of a chunk."""


RUNNING = RunningChunk()
"""Of this thread; learners are copied, and have none of their own."""


class ComputedGradient:
    """The mean gradient over all chunks of all ranks, from ``training_step`` until ``backward``.

    A learner with several chunks, or with a captured loss, makes each step so::

        loss = gradient.mean(lambda index: gradient.of(loss_of_chunk))   # in training_step
        gradient.put_into_place(loss, weights)                           # in backward
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.threads = 1
        """In which chunks are computed side by side."""
        self._names: list[str] = []
        """Of what a chunk's loss logs."""
        self._mean: Tensor | None = None
        """Of all trained parameters, one after another, then the loss and for each parameter the
        share of chunks whose loss reaches it, until ``backward``."""
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
        leave_gradients(learner.trainer.strategy)  # DDP would average them
        return chunks

    def of(self, loss_of: Callable[[], Tensor]) -> Tensor:
        """Return a chunk as one vector: gradient, loss, what the loss reaches, logged figures.

        Raises:
            ConfigurationError: if the loss is no tensor, or a gradient is sparse.
        """
        figures = RUNNING.figures = {}
        try:
            loss = loss_of()
            require_type("a chunk's loss", loss, Tensor, "a tensor")
            with torch.autocast(loss.device.type, enabled=False):
                trained = self.trained()
                found = torch.autograd.grad(loss, trained, allow_unused=True)
            if any(gradient is not None and gradient.is_sparse for gradient in found):
                raise ConfigurationError(f"a gradient is sparse, and {DENSE}")
        finally:
            RUNNING.figures = None
        self._names = list(figures)
        yes, no = loss.new_ones((), dtype=torch.float32), loss.new_zeros((), dtype=torch.float32)
        reached = [no if gradient is None else yes for gradient in found]
        gradients = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(trained, found, strict=True)
        ]
        total, *logged = (
            each.detach().to(loss.device, torch.float32).reshape(())
            for each in (loss, *figures.values())
        )
        numbers = torch.stack([total, *reached, *logged])
        return torch.cat([*(each.flatten() for each in gradients), numbers])

    def begin_chunk(self, chunk: int) -> None:
        """Let a chunk's draws be its own, whichever rank computes it."""
        RUNNING.index, learner = chunk, self._learner
        if learner.gradient_chunks > 1:
            seed = update_seed(learner.seed, learner.updates, learner.part.index, chunk)
            seed_generators(learner.device, seed)

    def mean(self, vector_of: Callable[[int], Tensor]) -> Tensor:
        """Keep the mean gradient over all chunks, log their mean figures, return the mean loss."""
        learner = self._learner
        several = self.threads > 1
        vectors = self._side_by_side(vector_of) if several else self._one_by_one(vector_of)
        total = learner.chunks.mean(vectors)
        trained = self.trained()
        end = sum(parameter.numel() for parameter in trained)
        figures = end + 1 + len(trained)
        self._mean = total[:figures]
        if self._names:
            log_figures(learner, dict(zip(self._names, total[figures:], strict=True)))
        return total[end].clone()  # which a training step may change in place

    def _one_by_one(self, vector_of: Callable[[int], Tensor]) -> Iterator[Tensor]:
        for index, chunk in enumerate(self._learner.chunks.own):
            self.begin_chunk(chunk)
            yield vector_of(index)

    def _side_by_side(self, vector_of: Callable[[int], Tensor]) -> list[Tensor]:
        """Compute chunks in several threads; whichever is free takes the next one.

        Raises:
            ConfigurationError: if a loss draws numbers: threads share torch's generator.
        """
        own = self._learner.chunks.own
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        def compute(index: int) -> Tensor:
            RUNNING.index = own[index]
            # A thread begins without the Trainer's precision; Lightning caches no cast either.
            with torch.autocast("cpu", dtype, enabled, cache_enabled=False):
                return vector_of(index)

        before = torch.get_rng_state()
        # evaluate() sets the same; these are of the process, and the last thread would leave them.
        modes = set_exploration_type(ExplorationType.RANDOM), set_recurrent_mode(False)
        with modes[0], modes[1], ThreadPoolExecutor(self.threads) as pool:
            vectors = list(pool.map(compute, range(len(own))))
        if not torch.equal(torch.get_rng_state(), before):
            raise ConfigurationError(
                f"num_threads={self._learner.num_threads} with {self._learner.computed_for}: the "
                "loss draws numbers, as Dropout does, and threads that compute chunks side by side "
                "would share torch's generator; num_threads=1 is needed"
            )
        return vectors

    def put_into_place(self, loss: Tensor, weights: DelayedWeights) -> None:
        """Give the parameters their gradients, before they are clipped and looked at.

        One that no chunk's loss reaches has none: an optimiser would move it by a gradient of 0.

        Args:
            loss: what the training step has returned; any but the mean loss itself is refused.
            weights: of the policy, whose buffers must not have moved in the first step.

        Raises:
            ConfigurationError: if the training step has computed none or returns another loss, or a
                layer has statistics that change with each pass.
        """
        setting, mean, trained = self._learner.computed_for, self._mean, self.trained()
        sizes = [parameter.numel() for parameter in trained]
        end = sum(sizes)
        if mean is None or loss.requires_grad or not _same(loss, mean[end]):
            raise ConfigurationError(
                f"{setting}: {type(self._learner).__name__}.training_step computes one gradient "
                "of the round; let it return loss_by_chunks(...) alone, as it is, or leave "
                "the setting out"
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
        gradients = zip(torch.split(mean[:end], sizes), mean[end + 1 :].tolist(), strict=True)
        for parameter, (gradient, reached) in zip(trained, gradients, strict=True):
            own = gradient.view(parameter.shape).to(parameter.dtype)
            parameter.grad = own if reached else None
        self._mean = None


def _same(loss: Tensor, other: Tensor) -> bool:
    return torch.allclose(loss.to(other), other, rtol=0.0, atol=0.0, equal_nan=True)
