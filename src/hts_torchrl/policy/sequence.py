"""A policy with a memory on whole sequences, from the memory with which each began.

Shapes: N environments, T steps.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

from hts_torchrl.policy.composite import distribution_of
from hts_torchrl.policy.forward import (
    PolicyOutput,
    evaluate,
    modules_of,
    path_of,
    probabilistic_module,
    written_by,
)
from hts_torchrl.policy.memory import memory_keys
from hts_torchrl.specs import Key, next_key


def evaluate_sequences(
    policy: nn.Module, inputs: dict[Key, Tensor], is_init: Tensor
) -> PolicyOutput:
    """Run a policy over N sequences of T steps, with gradient through time.

    TorchRL's LSTM and GRU modules read a whole sequence at once (their recurrent mode); a policy
    with another memory runs step by step. Both begin with the memory that was stored for the first
    step, and anew where ``is_init``.

    Args:
        policy: with a memory.
        inputs: observations and stored memory by key, ``[N, T, ...]``.
        is_init: whether a trajectory begins, bool ``[N, T, 1]``.

    Returns:
        Distributions and values of shape ``[N, T]``.
    """
    if _reads_sequences(policy):
        with set_recurrent_mode(True):
            return evaluate(policy, inputs, is_init.shape[:2])
    return _unroll(policy, inputs, is_init)


def _reads_sequences(policy: nn.Module) -> bool:
    """Return whether all that is remembered is written by modules that have a recurrent mode."""
    remembered = {path_of(next_key(key)) for key in memory_keys(policy)}
    return all(
        isinstance(module, LSTMModule | GRUModule)
        for module in modules_of(policy)
        if remembered & written_by(module)
    )


def _unroll(policy: nn.Module, inputs: dict[Key, Tensor], is_init: Tensor) -> PolicyOutput:
    num_envs, steps = is_init.shape[:2]
    keys = memory_keys(policy)
    memory = {key: inputs[key][:, 0] for key in keys}
    written: list[TensorDict] = []
    for step in range(steps):
        now = {key: rows[:, step] for key, rows in inputs.items()}
        if step:
            begins = is_init[:, step]
            memory = {key: _where(begins, now[key], memory[key]) for key in keys}
        result = evaluate(policy, now | memory, num_envs)
        assert isinstance(result.written, TensorDict)
        written.append(result.written)
        # Of the type that actors hand on.
        memory = {key: result.written[next_key(key)].to(inputs[key].dtype) for key in keys}
    stacked: TensorDictBase = torch.stack(written, 1)
    head = probabilistic_module(policy)
    return PolicyOutput(distribution_of(head, stacked), stacked.get("state_value", None), stacked)


def _where(begins: Tensor, first: Tensor, carried: Tensor) -> Tensor:
    """Choose by row: ``begins`` is bool ``[N, 1]``, the others ``[N, ...]``."""
    return torch.where(begins.view(-1, *[1] * (first.ndim - 1)), first, carried)
