"""Sums over fixed chunks of environments: the same bits on any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from tensordict import TensorDictBase
from torch import Tensor

from hts_torchrl.compat.torch import of_all_ranks
from hts_torchrl.errors import ConfigurationError, require


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
        """Refuse environments that cannot be cut into so many equal chunks.

        Args:
            num_envs: of all ranks.

        Raises:
            ConfigurationError: naming both numbers.
        """
        if num_envs % self.count:
            raise ConfigurationError(
                f"model.gradient_chunks={self.count} does not divide the {num_envs} environments "
                "(data.num_envs)"
            )

    def of(self, batch: TensorDictBase) -> list[TensorDictBase]:
        """Return this rank's chunks of its round, in order; no data is copied.

        Args:
            batch: ``[N, T]``, with this rank's N environments.

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

        Args:
            vectors: one of each of this rank's chunks, in order, of one shape.
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

    Args:
        tensors: at least one.

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
