"""RMSprop whose step reads and writes each tensor once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hts_torchrl.compat.torch import fused_adam


class OnePassRMSprop(torch.optim.RMSprop):
    """``torch.optim.RMSprop``, with torch's fused kernel of Adam where that computes the same.

    RMSprop is Adam (Kingma and Ba, 2015, section 5) without momentum and without its correction of
    the bias. torch has a fused kernel of Adam alone. With momentum, weight decay or ``centered``,
    on a GPU, or with parameters of other types than float32, the step is torch's own.

    State and settings are those of ``torch.optim.RMSprop``, so their checkpoints are the same.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - as torch's
        """Step once; the weights differ from torch's in the last bits."""
        if not all(_is_plain(group) for group in self.param_groups):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            for p in moving:
                if not self.state[p]:
                    square = torch.zeros_like(p, memory_format=torch.preserve_format)
                    self.state[p] = {"step": torch.zeros(()), "square_avg": square}
                self.state[p]["step"] += 1
            if not moving:
                continue
            fused_adam(
                moving,
                [self.state[p]["square_avg"] for p in moving],
                learning_rate=group["lr"],
                smoothing=group["alpha"],
                epsilon=group["eps"],
            )
        return loss


def _is_plain(group: dict[str, Any]) -> bool:
    others = ("momentum", "weight_decay", "centered", "maximize", "differentiable", "capturable")
    return (
        not any(group[name] for name in others)
        and group["foreach"] is None
        and group["alpha"] < 1
        and not isinstance(group["lr"], torch.Tensor)
        and all(p.device.type == "cpu" and p.dtype == torch.float32 for p in group["params"])
        and all(p.grad is None or p.grad.layout == torch.strided for p in group["params"])
    )
