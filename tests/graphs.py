"""A CUDA graph without a GPU: the work of a function, recorded once and done again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hts_torchrl.policy import cuda_graph
from hts_torchrl.policy.cuda_graph import StagedPass
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.specs import EnvSpec

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Which warnings a machine with a GPU gives is not known yet.
    pytest.mark.filterwarnings("default"),
]
ASKS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
}
"""What would wait for the GPU in the middle of a capture."""


class Recording(TorchDispatchMode):
    """Notes every operation with its arguments and results, by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in ASKS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        results = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, results))
        return results


def recorded(run: Callable[[], None], _: torch.device) -> Callable[[], None]:
    """Do what ``cuda_graph._capture`` does, with tensors on the CPU.

    A replay runs no Python of the function: it does the recorded operations again, on the same
    memory, and overwrites the same results.
    """
    run()
    with Recording() as recording:
        run()

    @torch.no_grad()
    def replay() -> None:
        for func, args, kwargs, results in recording.operations:
            given = {_memory(each) for each in tree_leaves((args, kwargs)) if _is_tensor(each)}
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if _is_tensor(old) and _memory(old) not in given:  # else a view, or in place
                    old.copy_(new)

    return replay


def record_captures(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Let recorded operations stand for captured ones; returns a list that grows by each."""
    captures: list[torch.device] = []

    def capture(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
        captures.append(device)
        return recorded(run, device)

    monkeypatch.setattr(cuda_graph, "_capture", capture)
    return captures


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def replaying(policy: nn.Module, spec: EnvSpec, batch_size: int = 4, **settings) -> PolicyInference:
    """Inference on the CPU that stages and replays, as one on a GPU with ``cudagraph=True``."""
    inference = PolicyInference(policy, spec, batch_size=batch_size, **settings)
    inference._staged = staged = StagedPass(
        inference._run,
        inference.inputs,
        inference.draws,
        device=torch.device("cpu"),
        cudagraph=True,
    )
    inference.inputs, inference.draws = staged.inputs, staged.draws
    return inference
