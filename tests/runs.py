"""Whole runs of a collector, and how two of them are compared."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from hts_torchrl import HTSCollector

WeightsOf = Callable[[int], dict[str, Tensor]]


def play(collector: HTSCollector, weights_of: WeightsOf | None = None) -> list[TensorDictBase]:
    """Collect the whole run, publishing ``weights_of(version)`` after each batch."""
    batches: list[TensorDictBase] = []
    try:
        for batch in collector:
            batches.append(batch.clone())
            if weights_of is not None:
                collector.update_policy_weights_(weights_of(len(batches)))
    finally:
        collector.shutdown()
    return batches


def stopped_after(rounds: int, make: Callable[[], HTSCollector]) -> list[TensorDictBase]:
    """Collect the whole run by two collectors: the second goes on after ``rounds`` of the first."""
    stopped = make()
    iterator = iter(stopped)
    batches = [next(iterator).clone() for _ in range(rounds)]
    state = copy.deepcopy(stopped.state_dict())
    stopped.shutdown()
    resumed = make()
    resumed.load_state_dict(state)
    return batches + play(resumed)


def perturbed(policy: nn.Module, scale: float = 0.1) -> WeightsOf:
    """Weights that stand for updates: the policy's own plus noise seeded by the version."""
    base = {name: tensor.clone() for name, tensor in policy.state_dict().items()}

    def weights_of(version: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(version)
        return {
            name: tensor + scale * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            for name, tensor in base.items()
        }

    return weights_of


def leaves(batch: TensorDictBase) -> dict[str, Tensor]:
    """All tensors of a batch by dotted name."""
    return dict(sorted(batch.flatten_keys(".").items()))


def digest(batches: list[TensorDictBase]) -> str:
    """One number for every bit of every tensor of every batch."""
    total = hashlib.sha256()
    for batch in batches:
        for name, tensor in leaves(batch).items():
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()
