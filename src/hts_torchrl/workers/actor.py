"""The actor: answers whatever observations are ready, one batched pass at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict.nn import set_composite_lp_aggregate
from torch import nn

from hts_torchrl.allocator import keep_freed_memory
from hts_torchrl.config import Key, Precision
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.policy.shared_weights import PolicyWeights
from hts_torchrl.shared.arrays import Array
from hts_torchrl.shared.buffers import SharedBuffers


@dataclass(frozen=True)
class ActorSettings:
    """How every actor computes; the same in all of them, or bits would differ."""

    batch_size: int
    device: str
    precision: Precision
    matmul_precision: str
    deterministic: bool
    aggregate: bool = False
    """tensordict's ``composite_lp_aggregate``, which decides the log-probability's key."""
    extras: tuple[Key, ...] = ()
    """What is answered in addition to action, log-probability and value."""

    def apply(self) -> None:
        """Set what is global to a process."""
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic)
        set_composite_lp_aggregate(self.aggregate).set()


class Actor:
    """Owns a copy of the policy, and loads the acting weights when a round has brought new ones."""

    def __init__(self, shared: SharedBuffers, policy: nn.Module, settings: ActorSettings) -> None:
        self._shared = shared
        self.batch_size = settings.batch_size
        self._weights = PolicyWeights(shared.arrays, policy)
        self._inference = PolicyInference(
            policy,
            shared.spec,
            batch_size=settings.batch_size,
            device=settings.device,
            precision=settings.precision,
            extras=settings.extras,
        )
        self._version = -1

    def answer(self, envs: Array) -> None:
        """Answer the environments ``envs`` (int32): state buffer to action buffer."""
        self._version = self._weights.load(self._inference.policy, self._version)
        state = self._shared.state
        observations = {key: slots[envs] for key, slots in state.observations.items()}
        self._shared.actions.put(envs, self._inference.answer(observations, state.draws[envs]))


def make_actor(
    make_policy: Callable[[], nn.Module], settings: ActorSettings, shared: SharedBuffers
) -> Actor:
    """Make the one actor of a process, and set what is global to it.

    Args:
        make_policy: makes the policy.
        settings: the same for all actors.
        shared: what it reads from and writes to.
    """
    keep_freed_memory()
    settings.apply()
    return Actor(shared, make_policy(), settings)
