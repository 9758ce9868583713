"""What training needs of a collector, whichever way it collects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import nn


class RoundSource(Protocol):
    """A run's batches ``[N, T]``: what the data module, the learner and the callbacks need.

    :class:`HTSCollector` collects them in synchronous rounds, ``AsynchronousCollector`` as the
    baselines do. N are the environments, T the steps of each.
    """

    @property
    def rounds(self) -> int:
        """Batches that have been handed out since the start of the run."""

    @property
    def acting_weights(self) -> dict[str, torch.Tensor] | None:
        """The weights of a loaded state that collect the next batch; None for the newest."""

    def __len__(self) -> int:
        """Return the batches of the whole run."""

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield one batch after another; going on after a ``break`` continues the run."""

    def start(self) -> None:
        """Start the workers, if they are not yet running."""

    def update_policy_weights_(self, policy: nn.Module, /) -> None:
        """Publish newer weights."""

    def stats(self) -> dict[str, int | float | bool]:
        """Return counters, and the seconds at work and waiting since the start."""

    def state_at(self, round_index: int, *, envs: bool = True) -> dict[str, Any]:
        """Return the state of a run whose next batch is ``round_index``, with its games or not."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on where a state was taken."""

    def shutdown(self) -> None:
        """Stop all workers; may be called twice."""
