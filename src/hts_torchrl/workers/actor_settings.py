"""How actors compute: the settings that all of them share, found for a policy and applied."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase, composite_lp_aggregate, set_composite_lp_aggregate
from torch import nn

from hts_torchrl.allocator import keep_freed_memory
from hts_torchrl.compat.torch import flushes_denormals
from hts_torchrl.config import Precision
from hts_torchrl.models.layers import NarrowLinear
from hts_torchrl.policy.examination import examine, require_capturable, require_fitting
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.policy.limits import copied, require_copyable, require_tensors
from hts_torchrl.specs import ArraySpec, EnvSpec, Key

_backends: Any = torch.backends  # whose newer attributes have no types
_FLOAT32_OPERATIONS = (
    _backends.cuda.matmul,
    _backends.cudnn.conv,
    _backends.cudnn.rnn,
    _backends.mkldnn.matmul,
    _backends.mkldnn.conv,
    _backends.mkldnn.rnn,
)
_ATTENTION = (
    (_backends.mha.get_fastpath_enabled, _backends.mha.set_fastpath_enabled),
    (_backends.cuda.flash_sdp_enabled, _backends.cuda.enable_flash_sdp),  # also on the CPU
    (_backends.cuda.mem_efficient_sdp_enabled, _backends.cuda.enable_mem_efficient_sdp),
    (_backends.cuda.math_sdp_enabled, _backends.cuda.enable_math_sdp),
    (_backends.cuda.cudnn_sdp_enabled, _backends.cuda.enable_cudnn_sdp),
)


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch names none once backends have precisions of their own
        return None


@dataclass(frozen=True, kw_only=True)
class ActorSettings:
    """How every actor computes; the same in all of them, or bits would differ.

    What is global to a process has the value of the one that makes this.
    """

    batch_size: int
    """Rows of a pass, if each row's answer depends on that row alone."""
    device: str
    precision: Precision
    compile_policy: dict[str, Any] | None = None
    """Arguments of ``torch.compile`` for the pass; None compiles nothing."""
    extras: tuple[Key, ...] = ()
    """What is answered in addition to action, log-probability, value and memory."""
    greedy: bool = False
    """Answer greedy actions instead of sampled ones."""
    random_rounds: int = 0
    """Rounds from the start of the run in which actions are uniform."""
    cudagraph: bool = False
    """Replay each pass as one CUDA graph."""
    matmul_precision: str | None = field(default_factory=_matmul_precision)
    """Of ``torch.set_float32_matmul_precision``; None if only ``float32_precisions`` say it."""
    float32_precisions: tuple[str, ...] = field(
        default_factory=lambda: tuple(each.fp32_precision for each in _FLOAT32_OPERATIONS)
    )
    """``fp32_precision`` of torch's operations on GPU and CPU, such as ``tf32`` or ``bf16``."""
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    only_warns: bool = field(default_factory=torch.is_deterministic_algorithms_warn_only_enabled)
    """Whether that warns of an operation without a deterministic form, as Lightning's ``warn``."""
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    """Of the tensors that a policy makes in a pass without naming one."""
    mkldnn: bool = field(default_factory=lambda: bool(_backends.mkldnn.enabled))
    """Whether layers may compute by oneDNN."""
    cudnn: tuple[bool, bool] = field(
        default_factory=lambda: (_backends.cudnn.enabled, _backends.cudnn.deterministic)
    )
    """Whether layers may compute by cuDNN, and by none but its deterministic algorithms."""
    bfloat16_sums: bool = field(
        default_factory=lambda: _backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    )
    """Whether a GPU may add up products of bfloat16 in bfloat16."""
    attention: tuple[bool, ...] = field(
        default_factory=lambda: tuple(is_enabled() for is_enabled, _ in _ATTENTION)
    )
    """Whether attention may compute by torch's fast path, and by each of its kernels."""
    flushes: bool = field(default_factory=flushes_denormals)
    """Whether numbers next to zero are taken for zero."""
    aggregate: bool = field(default_factory=partial(composite_lp_aggregate, nowarn=True))
    """tensordict's ``composite_lp_aggregate``, which decides the log-probability's key."""

    def apply(self) -> None:
        """Set what is global to a process."""
        keep_freed_memory()
        torch.set_num_threads(1)
        if self.matmul_precision is not None:
            torch.set_float32_matmul_precision(self.matmul_precision)
        for operation, precision in zip(_FLOAT32_OPERATIONS, self.float32_precisions, strict=True):
            if operation.fp32_precision != precision:
                operation.fp32_precision = precision
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.only_warns)
        torch.set_default_dtype(self.dtype)
        _backends.mkldnn.enabled = self.mkldnn
        _backends.cudnn.enabled, _backends.cudnn.deterministic = self.cudnn
        _backends.cuda.matmul.allow_bf16_reduced_precision_reduction = self.bfloat16_sums
        for (_, enable), enabled in zip(_ATTENTION, self.attention, strict=True):
            enable(enabled)
        torch.set_flush_denormal(self.flushes)
        set_composite_lp_aggregate(self.aggregate).set()
        if torch.device(self.device).type == "cuda":
            torch.cuda.set_device(self.device)
            if self.deterministic:  # as Lightning does; cuBLAS reads it at its first use
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def find_settings(
    policy: TensorDictModuleBase, env_spec: EnvSpec, asked: ActorSettings, *, all_outputs: bool
) -> tuple[ActorSettings, dict[Key, ArraySpec]]:
    """Find how actors compute, and the arrays they answer with (without the row dimension).

    ``all_outputs=False`` leaves out what is neither action, log-probability nor value.

    Raises:
        ConfigurationError: if the policy does not fit the environment, or cannot be compiled or
            captured where it should be.
    """
    require_copyable(policy)
    require_tensors(policy)
    found = examine(
        make_inference(copied(policy), env_spec, replace(asked, cudagraph=False)),
        all_outputs=all_outputs,
        compile_policy=asked.compile_policy,
    )
    settings = replace(asked, batch_size=found.batch_size, extras=found.extras)
    if settings.batch_size != asked.batch_size:  # one row a pass, which was not tried
        alone = replace(settings, cudagraph=False)
        require_fitting(make_inference(copied(policy), env_spec, alone))
    if settings.cudagraph:
        require_capturable(make_inference(copied(policy), env_spec, settings))
    return settings, found.outputs


def make_inference(policy: nn.Module, spec: EnvSpec, settings: ActorSettings) -> PolicyInference:
    """Make what runs a policy in an actor, not yet compiled; the policy is not trained."""
    inference = PolicyInference(
        policy,
        spec,
        batch_size=settings.batch_size,
        device=settings.device,
        precision=settings.precision,
        extras=settings.extras,
        greedy=settings.greedy,
        cudagraph=settings.cudagraph,
    )
    # Before the first answer, with which a graph takes the weights' places for good.
    for layer in policy.modules():
        if isinstance(layer, NarrowLinear):
            layer.pad_once()
    return inference
