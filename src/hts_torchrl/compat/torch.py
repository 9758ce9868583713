"""What torch keeps private: operations on lists and trees of tensors, a schedule's last rates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "CopiesFromCPU",
    "bfloat16_in_hardware",
    "copy_all",
    "fused_adam",
    "let_gradients_be_clipped",
    "norms",
    "set_last_rates",
    "tree_leaves",
    "tree_map",
    "uncompiled",
    "unvalidated_distributions",
]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, in one call.

    Args:
        targets: changed in place; at least one.
        sources: as many, of the same shapes.
    """
    torch._foreach_copy_(targets, sources)


def norms(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the 2-norm of each tensor, a scalar tensor, in one call."""
    return torch._foreach_norm(tensors)


def fused_adam(
    parameters: list[Parameter],
    squares: list[Tensor],
    *,
    learning_rate: float,
    smoothing: float,
    epsilon: float,
) -> None:
    """Step by Adam without momentum, and as if after so many steps that no bias is left.

    Args:
        parameters: float32, changed in place; each has a gradient, which stays.
        squares: running means of the squared gradients, changed in place.
        learning_rate: of the step.
        smoothing: of these means, less than 1.
        epsilon: what is added to their roots.
    """
    moving: list[Tensor] = list(parameters)
    # Without momentum the running mean is the gradient, and so it is written to itself.
    gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
    torch._fused_adam_(
        moving, gradients, gradients, squares, [], [torch.tensor(1e9)] * len(moving),
        lr=learning_rate, beta1=0.0, beta2=smoothing, weight_decay=0.0, eps=epsilon,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def let_gradients_be_clipped(optimizer: Optimizer) -> None:
    """Take from a fused optimiser that it scales gradients back, where Lightning does that first.

    Lightning refuses to clip the gradients of one that does, also where nothing is scaled, as with
    ``bf16-mixed``. With ``16-mixed`` it scales them back itself then.
    """
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def set_last_rates(scheduler: LRScheduler, rates: Sequence[float | Tensor]) -> None:
    """Set the learning rates of a schedule and of its optimiser, one for each parameter group."""
    scheduler._last_lr = list(rates)
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def bfloat16_in_hardware() -> bool:
    """Return whether this CPU computes in bfloat16 itself."""
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported


def uncompiled(module: nn.Module) -> nn.Module:
    """Return what ``torch.compile`` was given, with the same parameters; else the module itself."""
    original: nn.Module = getattr(module, "_orig_mod", module)
    return original


@contextlib.contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """Let distributions that are made meanwhile check no values, as that waits for a GPU."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


class CopiesFromCPU(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that make tensors of a device from tensors of the CPU.

    A single number counts for none: kernels are given its value.

    Args:
        device: any but the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.found: list[str] = []

    def __torch_dispatch__(  # noqa: D105 - torch calls it
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        results = func(*args, **(kwargs or {}))
        given = {each.device.type for each in _tensors((args, kwargs)) if each.ndim}
        made = {each.device.type for each in _tensors(results)}
        if "cpu" in given and self._device.type in made:
            self.found.append(str(func))
        return results


def _tensors(tree: object) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]
