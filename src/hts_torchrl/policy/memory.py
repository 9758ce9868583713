"""What a policy remembers: by the keys that it reads and writes, its primers, and over sequences.

Shapes: N environments, T steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.modules import (
    GRUModule,
    LSTMModule,
    OrnsteinUhlenbeckProcessModule,
    set_recurrent_mode,
)

from hts_torchrl.envs.torchrl_specs import primer_values
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.policy.composite import distribution_of
from hts_torchrl.policy.forward import (
    PolicyOutput,
    evaluate,
    memory_keys,
    modules_of,
    probabilistic_module,
    written_by,
)
from hts_torchrl.policy.limits import named
from hts_torchrl.specs import (
    IS_INIT,
    ActionSpec,
    Array,
    EnvSpec,
    Key,
    MemorySpec,
    next_key,
    path_of,
)


def noise_memory(policy: nn.Module, action: ActionSpec) -> dict[Key, Array]:
    """Return what an Ornstein-Uhlenbeck process remembers, as it is when a trajectory begins."""
    values: dict[Key, Array] = {}
    for module in modules_of(policy):
        if isinstance(module, OrnsteinUhlenbeckProcessModule):
            values[module.ou.noise_key] = torch.zeros(action.array.shape).numpy()
            values[module.ou.steps_key] = torch.zeros((), dtype=torch.int64).numpy()
    return values


def with_memory(policy: nn.Module, spec: EnvSpec) -> EnvSpec:
    """Return a specification that has what the policy remembers of the environment.

    That is what it writes under ``next`` and reads at the root, as TorchRL's ``LSTMModule`` does.
    Shapes and first values come from ``TensorDictPrimer``: of the environment, which ``spec`` has
    already, or of the policy's modules (``make_tensordict_primer``).

    Raises:
        ConfigurationError: if a first value is not known, a primer fills what the policy does not
            write, a memory is bidirectional, or an LSTM or GRU would not begin with its primer's.
    """
    _refuse_bidirectional(policy)
    keys = memory_keys(policy)
    filled = {path_of(key): value for key, value in spec.memory.initial.items()}
    if unread := [key for key in filled if key not in map(path_of, keys)]:
        raise ConfigurationError(
            f"the environment's TensorDictPrimer fills {unread[0][-1]!r}, but the policy does not "
            f"write {('next', *unread[0])}: leave the primer out"
        )
    if keys:
        filled = _own_values(policy) | filled
    if unknown := [key for key in keys if path_of(key) not in filled]:
        raise ConfigurationError(
            f"the policy remembers {unknown[0]!r}, but not with which value a trajectory begins: "
            "give its module a make_tensordict_primer(), as torchrl's LSTMModule has, or the "
            "environment a TensorDictPrimer"
        )
    read: list[Key] = list(getattr(policy, "in_keys", ()))
    noise = noise_memory(policy, spec.action)
    initial = {key: filled[path_of(key)] for key in keys} | noise
    _refuse_first_values(policy, initial)
    reads_is_init = (IS_INIT in read or bool(noise)) and IS_INIT not in spec.observations
    return replace(spec, memory=MemorySpec(initial, reads_is_init))


def _refuse_bidirectional(policy: nn.Module) -> None:
    """Refuse memories that read a sequence from its end as well: actors act before that."""
    for name, module in policy.named_modules():
        if not isinstance(module, LSTMModule | GRUModule):
            continue
        layers = module.lstm if isinstance(module, LSTMModule) else module.gru
        if layers.bidirectional:
            raise ConfigurationError(
                f"the policy's {named(module, name)} is bidirectional: it would learn from later "
                "steps, which no actor has seen when it acts; leave bidirectional=True out"
            )


def _refuse_first_values(policy: nn.Module, initial: Mapping[Key, Array]) -> None:
    """Refuse first values of TorchRL's memories but 0, which they take for a step, but no sequence.

    So a policy that learns would not be the one that acted.
    """
    nonzero = {path_of(key) for key, value in initial.items() if value.any()}
    for name, module in policy.named_modules():
        if isinstance(module, LSTMModule | GRUModule):
            for key in filter(nonzero.__contains__, map(path_of, module.in_keys)):
                raise ConfigurationError(
                    f"a TensorDictPrimer fills {key[-1]!r} with other numbers than 0, but the "
                    f"policy's {named(module, name)} begins each trajectory with 0: leave its "
                    "default_value out"
                )


def _own_values(policy: nn.Module) -> dict[tuple[str, ...], Array]:
    """Return what the primers of a policy's modules fill."""
    values: dict[tuple[str, ...], Array] = {}
    for module in policy.modules():
        make: Any = getattr(module, "make_tensordict_primer", None)
        if make is not None:
            values |= {path_of(key): value for key, value in primer_values(make())}
    return values


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
    remembered = {path_of(next_key(key)) for key in memory_keys(policy)}
    writers = [module for module in modules_of(policy) if remembered & written_by(module)]
    reads_sequences = all(isinstance(module, LSTMModule | GRUModule) for module in writers)
    with set_recurrent_mode(reads_sequences):
        if reads_sequences:
            return evaluate(policy, inputs, is_init.shape[:2])
        return _unroll(policy, inputs, is_init)


def _unroll(policy: nn.Module, inputs: dict[Key, Tensor], is_init: Tensor) -> PolicyOutput:
    num_envs, steps = is_init.shape[:2]
    keys = memory_keys(policy)
    memory = {key: inputs[key][:, 0] for key in keys}
    written: list[TensorDict] = []
    for step in range(steps):
        now = {key: rows[:, step] for key, rows in inputs.items()}
        if step:
            for key, carried in memory.items():
                begins = is_init[:, step].view(-1, *[1] * (carried.ndim - 1))
                memory[key] = torch.where(begins, now[key], carried)
        result = evaluate(policy, now | memory, num_envs)
        assert isinstance(result.written, TensorDict)
        written.append(result.written)
        # Of the type that actors hand on.
        memory = {key: result.written[next_key(key)].to(inputs[key].dtype) for key in keys}
    stacked: TensorDictBase = torch.stack(written, 1)
    head = probabilistic_module(policy)
    return PolicyOutput(distribution_of(head, stacked), stacked.get("state_value", None), stacked)
