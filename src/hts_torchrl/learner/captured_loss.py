"""A loss and its gradient as one CUDA graph. Shapes: N environments, T steps of a round."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor

from hts_torchrl.compat.torch import copy_all
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.policy.cuda_graph import captured

SETTING = "cudagraph_loss"


class CapturedLoss:
    """A vector that is computed of a round, captured at the first one and replayed for all others.

    No Python of the function runs in a replay: it must read nothing else that changes, but for
    tensors that keep their memory, as parameters do.

    Raises:
        ConfigurationError: if it cannot be captured.
    """

    def __init__(
        self,
        compute: Callable[[TensorDictBase], Tensor],
        batch: TensorDictBase,
        device: torch.device,
    ) -> None:
        self._keys = list(batch.keys(include_nested=True, leaves_only=True))
        self._batch = batch.clone()
        self._vector = torch.empty(0)

        def run() -> None:
            # Casts that autocast keeps would be those of the weights of the capture.
            kind = device.type
            with torch.autocast(
                kind,
                dtype=torch.get_autocast_dtype(kind),
                enabled=torch.is_autocast_enabled(kind),
                cache_enabled=False,
            ):
                self._vector = compute(self._batch)

        # What is sampled for a round is the same, whether it is captured or replayed.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            self._replay = captured(run, device, setting=SETTING, what="the loss")

    def __call__(self, batch: TensorDictBase) -> Tensor:
        """Return the vector of a round ``[N, T]``, in memory of its own."""
        copy_all([self._batch[key] for key in self._keys], [batch[key] for key in self._keys])
        self._replay()
        return self._vector.clone()


def require_gpu(device: torch.device) -> None:
    """Refuse a learner that computes on something else than a GPU."""
    if device.type != "cuda":
        raise ConfigurationError(
            f"{SETTING}=True: the learner computes on {str(device)!r}, but CUDA graphs need a GPU: "
            "Trainer(accelerator='gpu'), or leave it out"
        )
