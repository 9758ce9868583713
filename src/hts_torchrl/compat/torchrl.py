"""What TorchRL keeps private: queues, workers' starts and ends, users of Ray, a sampler's way."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty
from typing import Any

from torchrl._comm import ray_runtime
from torchrl._utils import _check_for_faulty_process
from torchrl.collectors import AsyncBatchedCollector, BaseCollector, _runner
from torchrl.data import SliceSampler
from torchrl.weight_update import SharedMemWeightSyncScheme

_LOOK_EVERY_S = 1.0


def set_queue_patience(seconds: float) -> None:
    """Set how long a worker of this process waits for a place in the collector's queue.

    A worker that finds none in time (TorchRL: 1 s) throws its trajectory away and plays another.
    """
    _runner._TIMEOUT = seconds


def use_ray(init_config: dict[str, Any]) -> Callable[[], None]:
    """Connect this process to Ray, unless it is, and return what ends that.

    TorchRL counts who uses Ray in a process, so that its collectors and ours share one connection.
    Ray is shut down by the last of them, if the first of them has started it.

    Args:
        init_config: arguments of ``ray.init``, where it has to be called.
    """
    release: Callable[[], None] = ray_runtime._RayRuntimeLease.acquire(init_config).release
    return release


def samples_by_ends(sampler: object) -> bool:
    """Return whether a sampler of slices tells trajectories by their ends, and not by numbers."""
    return isinstance(sampler, SliceSampler) and not sampler._fetch_traj


def start_workers(collector: BaseCollector) -> None:
    """Start the processes that some collectors start only when the first batch is asked for."""
    if isinstance(collector, AsyncBatchedCollector):
        collector._ensure_started()


class WatchedWeights(SharedMemWeightSyncScheme):  # type: ignore[misc]
    """Weights that workers share. TorchRL's own waits without end for a worker that has died."""

    def _wait_for_ack(self, worker_ids: object = None, timeout: float | None = None) -> None:  # noqa: ARG002
        """Wait until all workers have the weights.

        Raises:
            RuntimeError: if a worker has ended.
        """
        for receipts in self._ack_queues.values():
            while True:
                try:
                    receipts.get(timeout=_LOOK_EVERY_S)
                    break
                except Empty:
                    _check_for_faulty_process(self.context.procs)
