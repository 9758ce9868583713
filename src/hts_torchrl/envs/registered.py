"""What a program registers with Gymnasium, in processes that never run the program."""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
import uuid
from collections.abc import Callable
from typing import TypeVar

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec

from hts_torchrl.envs.group import CreateEnv, EnvFactory
from hts_torchrl.envs.layers import is_a
from hts_torchrl.envs.own_generators import making
from hts_torchrl.errors import ConfigurationError, in_one_line

Made = TypeVar("Made")

_MAIN = "__main__"
_PROCESS = uuid.uuid4().hex
"""Of this process, and of those that are forked from it."""
_carried: dict[str, bytes] = {}
"""By id, what only the process knew which sent this one its environments: pickled specs."""


def pickle_envs(create_env_fn: CreateEnv | EnvFactory) -> bytes:
    """Pickle what makes environments, with what this process has registered with Gymnasium.

    Raises:
        ConfigurationError: if it uses something that cannot be pickled.
    """
    registrations = dict(_carried)
    for spec in gymnasium.registry.values():
        with contextlib.suppress(Exception):  # what cannot be pickled is left out
            registrations[spec.id] = cloudpickle.dumps(_without_main(spec))
    try:
        pickled: bytes = cloudpickle.dumps((_PROCESS, registrations, create_env_fn))
    except Exception as error:
        instead = "make what it uses within it, or import that from a module"
        if is_a(create_env_fn, "torchrl.EnvCreator"):
            instead = (
                "an EnvCreator shares the statistics of a VecNorm, but environments here have "
                "their own; give the function that it was given"
            )
        raise ConfigurationError(
            f"create_env_fn cannot be sent to the executors ({type(error).__name__}: "
            f"{in_one_line(error)}): {instead}"
        ) from error
    return pickled


def unpickle_envs(pickled: bytes) -> CreateEnv | EnvFactory:
    """Return what makes environments; :func:`made` knows what was registered for them."""
    with making(0):  # what modules draw while they are imported
        process, registrations, create_env_fn = cloudpickle.loads(pickled)
    if process != _PROCESS:
        for name, spec in registrations.items():
            if name in gymnasium.registry:  # where a program replaces it, all processes do
                gymnasium.registry[name] = cloudpickle.loads(spec)
            else:
                _carried[name] = spec
    return create_env_fn  # type: ignore[no-any-return]


def made(make: Callable[[], Made]) -> Made:
    """Call what makes an environment, a second time if Gymnasium did not know it at first."""
    try:
        return make()
    except gymnasium.error.UnregisteredEnv:
        if not _register():
            raise
    return make()


def _without_main(spec: EnvSpec) -> EnvSpec:
    """Return a spec whose entry point is not looked up in the program, which others do not run."""
    module, _, name = str(spec.entry_point).partition(":")
    if module == _MAIN:
        spec = copy.copy(spec)
        spec.entry_point = getattr(sys.modules[_MAIN], name)
    return spec


def _register() -> bool:
    """Register all that was carried here; return whether Gymnasium knows more than before."""
    known = len(gymnasium.registry)
    for pickled in _carried.values():
        with making(0), contextlib.suppress(Exception):  # what is wanted is reported as unknown
            spec = cloudpickle.loads(pickled)
            if isinstance(spec.entry_point, str):  # most packages register theirs when imported
                importlib.import_module(spec.entry_point.partition(":")[0])
            gymnasium.registry.setdefault(spec.id, spec)
    return len(gymnasium.registry) > known
