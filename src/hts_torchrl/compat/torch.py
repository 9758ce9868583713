"""What torch keeps private: operations on lists and trees of tensors, a schedule's last rates."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

copy_all = torch._foreach_copy_
"""Copies each of a list of sources into its target, in place and in one call; at least one."""

norms = torch._foreach_norm
"""Returns the 2-norm of each of a list of tensors, a scalar tensor, in one call."""


def of_all_ranks(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks in their order; in a run of one rank, its own.

    Args:
        tensor: of the same shape and dtype on each; all ranks must call it.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return [tensor]
    ranks = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(ranks, tensor)
    return ranks


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


def set_base_rates(scheduler: LRScheduler) -> None:
    """Let a schedule, and those that it is made of, compute from its optimiser's initial rates."""
    for each in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if hasattr(each, "base_lrs"):
            each.base_lrs = [group["initial_lr"] for group in each.optimizer.param_groups]


def flushes_denormals() -> bool:
    """Return what ``torch.set_flush_denormal`` has set, for which torch has no function."""
    return not (torch.full((), torch.finfo(torch.float32).tiny) / 2).item()


def bfloat16_in_hardware() -> bool:
    """Return whether this CPU computes in bfloat16 itself."""
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported


def compiles_calls(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called, which compiles calls of that module."""
    return module._compiled_call_impl is not None


def uncompiled(module: nn.Module) -> nn.Module:
    """Return what ``torch.compile`` was given, with the same parameters; else the module itself."""
    original: nn.Module = getattr(module, "_orig_mod", module)
    return original


def is_transforming() -> bool:
    """Return whether this is run by a transform of ``torch.func``, such as ``vmap``."""
    return torch._C._functorch.maybe_current_level() is not None


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return what runs before and after a module's call, and its gradient's."""
    return [
        *module._forward_pre_hooks.values(),
        *module._forward_hooks.values(),
        *module._backward_pre_hooks.values(),
        *module._backward_hooks.values(),
    ]


def runs_after_accumulation(parameter: Parameter) -> bool:
    """Return whether a parameter has hooks that ``backward`` runs when its gradient is there."""
    return bool(parameter._post_accumulate_grad_hooks)


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

    A single number counts for none, unless it is copied: kernels are given its value.

    Args:
        device: any but the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401, D105 - torch calls it
        results = func(*args, **(kwargs or {}))
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        given = {each.device.type for each in _tensors((args, kwargs)) if each.ndim or copies}
        made = {each.device.type for each in _tensors(results)}
        if "cpu" in given and self._device.type in made:
            self.found.append(str(func))
        return results


def _tensors(tree: object) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def as_one_graph(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Return what ``torch.compile`` makes of a function whose inputs always have the same shapes.

    It is compiled at its first call, and never again: torch checks no guards, which would take
    a part of each pass of a small network.

    Args:
        function: of tensors; a nested function.
        arguments: of ``torch.compile``, by keyword.

    Raises:
        ValueError: for arguments by which it would not be one graph, or not compiled.
    """
    if torch._dynamo.config.disable:
        raise ValueError("TORCH_COMPILE_DISABLE or torch._dynamo.config.disable is set")
    unknown = arguments.keys() - {"mode", "options", "backend", "fullgraph", "dynamic"}
    if unknown:
        raise ValueError(f"{min(unknown)!r} is none of mode, options and backend")
    if not arguments.get("fullgraph", True) or arguments.get("dynamic"):
        raise ValueError("fullgraph is always True and dynamic False here")
    mode, options = arguments.get("mode"), arguments.get("options")
    modes = torch._inductor.list_mode_options()
    if mode is not None and (options is not None or mode not in modes):
        raise ValueError(f"mode={mode!r}; one of {', '.join(modes)}, without options, is possible")
    options = {**modes[mode or "default"], **(options or {})}
    # torch keeps what it has compiled with the code, which all closures of one function share:
    # without guards one would run what was made for another.
    own = types.FunctionType(
        function.__code__.replace(), function.__globals__, closure=function.__closure__
    )
    compiled: Callable[..., Any] = torch.compile(
        own,
        fullgraph=True,
        dynamic=False,
        backend=arguments.get("backend") or "inductor",
        options={**options, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
    )
    return compiled


@contextlib.contextmanager
def compile_settings() -> Iterator[None]:
    """Let torch compile by itself, and so that every process has the same bits.

    ``compile_threads``: with more than one it may start processes of its own, which stay.
    ``cpp.threads``: with more, rows' bits may depend on their place. ``deterministic``: no kernel
    is chosen by timing it.
    """
    settings = {"compile_threads": 1, "cpp.threads": 1, "deterministic": True}
    with warnings.catch_warnings(), torch._inductor.config.patch(settings):
        # The compiler itself uses what torch deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        # torch says so with Python 3.13.0, and there are no guards here.
        warnings.filterwarnings("ignore", "Guards may run slower", RuntimeWarning)
        yield


def compile_failure(error: BaseException) -> tuple[str, bool]:
    """Return in one line why torch could not compile, and whether it lacks a C++ compiler."""
    causes = [error]
    while cause := getattr(causes[-1], "inner_exception", None) or causes[-1].__cause__:
        causes.append(cause)
    lines = [line.strip() for line in str(causes[-1]).splitlines() if line.strip()]
    missing = any("InvalidCxxCompiler" in f"{type(each).__name__} {each}" for each in causes)
    return (lines or [type(causes[-1]).__name__])[0], missing
