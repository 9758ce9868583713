"""A rollout node: a slice of the environments, with a worker pool of its own on some machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import cloudpickle
import numpy as np
import torch

from hts_torchrl.config import CollectorSettings
from hts_torchrl.envs.registered import unpickle_envs
from hts_torchrl.machine import cpu_model
from hts_torchrl.portable import is_portable
from hts_torchrl.shared.action_log import ActionLog
from hts_torchrl.shared.arrays import Layout
from hts_torchrl.shared.buffers import SharedBuffers
from hts_torchrl.specs import Array, ArraySpec, EnvSpec, Key
from hts_torchrl.workers.make_pool import make_pool
from hts_torchrl.workers.pool import WorkerPool

_OF_A_ROUND = ("rollout/", "writes/")


@dataclass(frozen=True)
class NodeKind:
    """What a process computes with: where it differs, the last bits may."""

    cpu: str
    """Model and the instructions that torch uses; neither where kernels are portable."""
    torch: str
    hts_torchrl: str

    @classmethod
    def of_this_process(cls) -> NodeKind:
        """Return that of the process that calls this."""
        instructions = torch.backends.cpu.get_cpu_capability()
        cpu = "portable kernels" if is_portable() else f"{cpu_model()} ({instructions})"
        return cls(cpu, torch.__version__, version("hts_torchrl"))


@dataclass(frozen=True)
class NodeRound:
    """What comes of a round: n environments of the slice, W workers of the node."""

    arrays: dict[str, Array]
    """The storage's, ``[n, T, ...]`` by their names in the shared arrays."""
    finished_s: Array
    """Seconds from the node's begin of the round to each executor's end, float64 ``[W]``."""
    busy_s: Array
    """Seconds of each worker at work in this round, float64 ``[W]``."""
    waiting_s: Array
    """Seconds of each worker waiting in this round, float64 ``[W]``."""


class RolloutNode:
    """Plays rounds of its slice.

    Whoever has it calls, in this order::

        node.kind()
        node.start(...)
        for round_index in ...:
            node.play(round_index, version, weights)
        node.shutdown()

    It knows nothing of Ray, of other nodes, or of the learner.
    """

    def __init__(self) -> None:
        self._shared: SharedBuffers | None = None
        self._pool: WorkerPool | None = None

    def kind(self) -> NodeKind:
        """Return what the node computes with."""
        return NodeKind.of_this_process()

    def start(
        self,
        *,
        settings: CollectorSettings,
        spec: EnvSpec,
        outputs: dict[Key, ArraySpec],
        weights_layout: Layout,
        action_log: ActionLog,
        parts: bytes,
    ) -> None:
        """Start the workers of a slice, whose environments are where the action log says.

        ``settings`` are those of :meth:`CollectorSettings.of_node`, and ``parts`` are pickled
        arguments by keyword of :func:`make_pool`.

        Raises:
            ConfigurationError: if environments or policy cannot be made here.
            ReplayError: if an environment does not do again what it did, without processes.
        """
        pool: dict[str, Any] = cloudpickle.loads(parts)
        pool["create_env_fn"] = unpickle_envs(pool["create_env_fn"])
        pool["settings"].apply()  # the passes are in this process, if there are no actors
        self._shared = shared = SharedBuffers(spec, outputs, settings, weights_layout)
        self._booked_s = self._seconds(shared)
        try:
            self._pool = make_pool(shared, action_log, **pool)
        except BaseException:
            shared.close()
            raise

    def play(self, round_index: int, version: int, weights: Array) -> NodeRound:
        """Play one round with the weights of a version, and return what came of it.

        The weights lie there as in a slot of :class:`PolicyWeights`, uint8.

        Raises:
            ConfigurationError: from the pool, like those below.
            WorkerError: if a worker of this node raised, or hangs.
            WorkerKilled: if a worker of this node was ended by a signal.
        """
        assert self._pool is not None
        assert self._shared is not None
        shared, arrays, begin_s = self._shared, self._shared.arrays, time.perf_counter()
        # Written beside those that act, and then let to act: no environment waits now.
        slot = 1 - int(arrays["weights_acting"][1])
        arrays["weights"][slot] = weights
        arrays["weights_acting"][:] = version, slot
        shared.begin_round(round_index)
        self._pool.start_round(round_index)
        self._pool.wait_round(round_index)
        before, self._booked_s = self._booked_s, self._seconds(shared)
        busy_s, waiting_s = self._booked_s - before
        half = shared.schedule.storage_of(round_index)
        names = [name for name in arrays.layout if name.startswith(_OF_A_ROUND)]
        return NodeRound(
            {name: arrays[name][half] for name in names},
            shared.status.finished_s - begin_s,
            busy_s,
            waiting_s,
        )

    @staticmethod
    def _seconds(shared: SharedBuffers) -> Array:
        """Return what all workers have booked since the start, float64 ``[2, W]``."""
        return np.stack((shared.status.busy_s, shared.status.waiting_s))

    def shutdown(self) -> None:
        """Stop the workers and free the shared memory; may be called twice."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        if self._shared is not None:
            self._shared.close()
            self._shared = None
