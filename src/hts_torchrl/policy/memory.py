"""What a policy remembers: found by the keys that it reads and writes, and by its primers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torchrl.modules import GRUModule, LSTMModule

from hts_torchrl.envs.torchrl_specs import primer_values
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.policy.exploration import noise_memory
from hts_torchrl.policy.forward import modules_of, path_of, written_by
from hts_torchrl.policy.limits import named
from hts_torchrl.specs import IS_INIT, Array, EnvSpec, Key, MemorySpec, next_key


def memory_keys(policy: nn.Module) -> list[Key]:
    """Return the keys that a policy reads, and writes under ``next`` for the step after."""
    written = written_by(*modules_of(policy))
    read: list[Key] = list(getattr(policy, "in_keys", ()))
    return [key for key in read if path_of(next_key(key)) in written]


def with_memory(policy: nn.Module, spec: EnvSpec) -> EnvSpec:
    """Return a specification that has what the policy remembers of the environment.

    That is what it writes under ``next`` and reads at the root, as TorchRL's ``LSTMModule`` does.
    Shapes and first values come from ``TensorDictPrimer``: of the environment, which ``spec`` has
    already, or of the policy's modules (``make_tensordict_primer``).

    Raises:
        ConfigurationError: if a first value is not known, a primer fills what the policy does not
            write, or a memory is bidirectional.
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
    initial: dict[Key, Array] = {}
    for key in keys:
        if path_of(key) not in filled:
            raise ConfigurationError(
                f"the policy remembers {key!r}, but not with which value a trajectory begins: give "
                "its module a make_tensordict_primer(), as torchrl's LSTMModule has, or the "
                "environment a TensorDictPrimer"
            )
        initial[key] = filled[path_of(key)]
    read: list[Key] = list(getattr(policy, "in_keys", ()))
    noise = noise_memory(policy, spec.action)
    initial |= noise
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


def _own_values(policy: nn.Module) -> dict[tuple[str, ...], Array]:
    """Return what the primers of a policy's modules fill."""
    values: dict[tuple[str, ...], Array] = {}
    for module in policy.modules():
        make: Any = getattr(module, "make_tensordict_primer", None)
        if make is not None:
            values |= {path_of(key): value for key, value in primer_values(make())}
    return values
