"""What TorchRL keeps private: how long a worker of an asynchronous collector waits for a place."""

from __future__ import annotations

from torchrl.collectors import _runner


def set_queue_patience(seconds: float) -> None:
    """Set how long a worker of this process waits for a place in the collector's queue.

    A worker that finds none in time (TorchRL: 1 s) throws its trajectory away and plays another.
    """
    _runner._TIMEOUT = seconds
