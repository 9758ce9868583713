"""A pass on a GPU: one copy there, one copy back, and all between them captured once and replayed.

What torch's documents ask for is in their notes on CUDA semantics, under "CUDA Graphs" and "Use
pinned memory buffers". B rows of a pass.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from hts_torchrl.compat.torch import CopiesFromCPU, unvalidated_distributions
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import Array, Key

Compute: TypeAlias = Callable[[dict[Key, Tensor], Tensor, bool], tuple[dict[Key, Tensor], object]]
"""A pass: inputs and draws on the device, and random; returns the answers there, and all else."""

_ALIGNMENT = 512  # that of torch's own allocator, so that kernels find what they always find
_WARM_UPS = 3  # as in torch's documents
_DRAWS: Key = ("collector", "draws")  # no observation has this name


class Block:
    """Tensors of several shapes and types in one piece of memory, which one copy moves.

    Args:
        like: gives shapes and types, by key; its values are not copied.
        device: where the memory lies.
        pinned: whether it is page-locked, so that a GPU reads and writes it by itself.

    Example:
        >>> block = Block({"observation": torch.ones(8, 4), "step": torch.ones(8).long()}, "cpu")
        >>> block.tensors["observation"].shape, block.tensors["step"].dtype
        (torch.Size([8, 4]), torch.int64)
    """

    def __init__(
        self, like: Mapping[Key, Tensor], device: torch.device | str, *, pinned: bool = False
    ) -> None:
        sizes = [tensor.nbytes for tensor in like.values()]
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        self.memory = torch.zeros(sum(padded), dtype=torch.uint8, device=device, pin_memory=pinned)
        """uint8, all that :meth:`copy_from` moves."""
        self.tensors: dict[Key, Tensor] = {}
        """Views of the memory, by key."""
        for (key, tensor), size, part in zip(
            like.items(), sizes, torch.split(self.memory, padded), strict=True
        ):
            self.tensors[key] = part[:size].view(tensor.dtype).view(tensor.shape)

    def copy_from(self, other: Block) -> None:
        """Copy a block of the same layout; between page-locked memory and a GPU without waiting."""
        self.memory.copy_(other.memory, non_blocking=True)


class StagedPass:
    """A pass of one shape on a GPU, with inputs and answers in page-locked memory.

    **Writer** of :attr:`inputs` and :attr:`draws`: whoever calls :meth:`run`, between two calls.
    The GPU reads them during the call alone, which waits once, for the copy of the answers::

        staged.inputs["observation"].numpy()[:rows] = observations
        answers = staged.run()

    Args:
        compute: the pass.
        inputs: observations and memory ``[B, ...]`` on the CPU, whose values are taken.
        draws: float64 ``[B, K]`` on the CPU, whose values are taken.
        device: of the passes.
        cudagraph: capture the pass at the first call, as a CUDA graph, and replay it in all others.
            It reads the policy's weights where they were then: new ones are copied there.
    """

    def __init__(
        self,
        compute: Compute,
        inputs: Mapping[Key, Tensor],
        draws: Tensor,
        *,
        device: torch.device,
        cudagraph: bool = False,
    ) -> None:
        self._compute, self._device, self._cudagraph = compute, device, cudagraph
        given = {**inputs, _DRAWS: draws}
        self._from_cpu = Block(given, "cpu", pinned=device.type == "cuda")
        for key, tensor in given.items():
            self._from_cpu.tensors[key].copy_(tensor)
        self._there = Block(given, device)
        self.inputs = {key: self._from_cpu.tensors[key] for key in inputs}
        """``[B, ...]`` by key, on the CPU."""
        self.draws = self._from_cpu.tensors[_DRAWS]
        """float64 ``[B, K]``, on the CPU."""
        self._variants: dict[bool, _Variant] = {}

    def run(self, random: bool = False) -> dict[Key, Array]:
        """Run a pass over inputs and draws.

        Returns:
            Its answers ``[B, ...]`` by key, valid until the next call.

        Raises:
            ConfigurationError: if it cannot be captured.
        """
        self._there.copy_from(self._from_cpu)
        if random not in self._variants:
            inputs = {key: self._there.tensors[key] for key in self.inputs}
            draws = self._there.tensors[_DRAWS]
            self._variants[random] = _Variant(
                lambda: self._compute(inputs, draws, random)[0], self._device, self._cudagraph
            )
        return self._variants[random].run()


class _Variant:
    """A pass with its answers, on the device and in page-locked memory."""

    def __init__(
        self, compute: Callable[[], dict[Key, Tensor]], device: torch.device, cudagraph: bool
    ) -> None:
        self._device = device
        answers = compute()  # only a pass tells what is answered
        self._there = Block(answers, device)
        self._on_cpu = Block(answers, "cpu", pinned=device.type == "cuda")

        def fill() -> None:
            for key, answer in compute().items():
                self._there.tensors[key].copy_(answer)

        self._fill = fill
        if cudagraph:
            self._fill = captured(
                fill, device, setting="cudagraph_policy", what="the policy's pass"
            )

    def run(self) -> dict[Key, Array]:
        self._fill()
        self._on_cpu.copy_from(self._there)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return {key: tensor.numpy() for key, tensor in self._on_cpu.tensors.items()}


def captured(
    run: Callable[[], None], device: torch.device, *, setting: str, what: str
) -> Callable[[], None]:
    """Capture what a function does on a GPU; returns what does the same work again.

    Nothing of the function's Python runs in a replay. It reads and writes the same memory.

    Raises:
        ConfigurationError: if something in it asks the GPU for a value, moves a tensor of the CPU
            there, or cannot be captured else.
    """
    refused = f"{setting}=True: {what}"
    if device.type != "cpu":  # from there a replay would read whatever the memory holds then
        with CopiesFromCPU(device) as copies:
            run()
        if copies.found:
            raise ConfigurationError(
                f"{refused} moves a tensor of the CPU to the GPU ({copies.found[0]}); make it a "
                f"buffer of the policy, or leave {setting} out"
            )
    try:
        with unvalidated_distributions(), _keeping_garbage():
            return _capture(run, device)
    except RuntimeError as error:
        first = error.__context__ or error  # the end of a capture that failed fails, too
        reason = str(first).partition("\n")[0]
        raise ConfigurationError(
            f"{refused} cannot be captured ({reason}); leave it out"
        ) from error


@contextlib.contextmanager
def _keeping_garbage() -> Iterator[None]:
    """Collect no garbage meanwhile: a graph in it, whose memory is freed, would end a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _capture(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(caller)
    # The outer stream ends here also where a failed capture has left the inner one in place.
    with torch.cuda.device(device), torch.cuda.stream(side):
        for _ in range(_WARM_UPS):  # libraries make handles and plans at their first use
            run()
        # Of this thread alone: a process group's watchdog asks the GPU from another one.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            run()
    caller.wait_stream(side)
    return graph.replay
