"""Any Gymnasium environment, by its id."""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import gymnasium

from hts_torchrl.envs.adapter import GymAdapter, SerialGroup
from hts_torchrl.envs.group import EnvFactory, EnvGroup, closed_if_refused
from hts_torchrl.envs.observed import called
from hts_torchrl.envs.own_generators import making
from hts_torchrl.envs.registered import made
from hts_torchrl.errors import ConfigurationError, require, require_type

_REFUSALS = (gymnasium.error.Error, ImportError, TypeError, ValueError, AssertionError)
"""What Gymnasium and its environments raise for settings that cannot work."""


@dataclass(frozen=True)
class GymEnvs(EnvFactory):
    """Environments of one Gymnasium id.

    Their ``info`` is not kept. If a policy or a loss needs some of it, write a wrapper that adds it
    to the observation, and use a function that makes the wrapped environment.

    Example:
        >>> from hts_torchrl import GymEnvs, env_spec_of
        >>> env_spec_of(GymEnvs("CartPole-v1")).action.sizes
        (2,)
    """

    id: str
    """Gymnasium's id, such as ``CartPole-v1``; ``module:Name-v0`` imports the module first."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``gymnasium.make``."""
    imports: list[str] = field(default_factory=list)
    """Modules that each process imports first, because they register environments."""

    def __post_init__(self) -> None:
        """Refuse what is no name, or no collection."""
        require_type("id", self.id, str, "a name of Gymnasium's, such as CartPole-v1,")
        require(isinstance(self.kwargs, Mapping), f"kwargs={self.kwargs!r}", "a mapping")
        lists = isinstance(self.imports, Sequence) and not isinstance(self.imports, str)
        require(lists, f"imports={self.imports!r}", "a list of modules")

    def group(self, indices: Sequence[int], *, render: bool = False) -> EnvGroup:
        """Make the environments of the given indices (:class:`EnvFactory`).

        Raises:
            ConfigurationError: if Gymnasium knows no such environment or lacks what it needs.
        """
        kwargs = {**self.kwargs, **({"render_mode": "rgb_array"} if render else {})}
        envs: list[gymnasium.Env[Any, Any]] = []
        with closed_if_refused(envs):
            try:
                with called("make", indices[0]), making(0):  # whichever is first of this process
                    for module in self.imports:
                        importlib.import_module(module)
                    _import_modules(self.id)
                for index in indices:
                    with called("make", index), making(index):
                        envs.append(made(partial(gymnasium.make, self.id, **kwargs)))
            except gymnasium.error.UnregisteredEnv as error:
                near = difflib.get_close_matches(self.id, gymnasium.registry, n=3)
                hint = f"; near to it: {', '.join(near)}" if near else ""
                named = f"module:{self.id.rpartition(':')[2]}"
                raise ConfigurationError(
                    f"Gymnasium knows no environment {self.id!r}{hint}; if a module registers it, "
                    f"name that module: id={named!r} or imports=['module']"
                ) from error
            except _REFUSALS as error:
                if not str(error):  # the traceback alone tells what it is
                    raise
                raise ConfigurationError(f"environment {self.id!r}: {error}") from error
            return SerialGroup([*map(GymAdapter, envs, indices)])


def _import_modules(env_id: str) -> None:
    """Import what an environment is made of, before it is seeded: torch may come with it."""
    # Packages of a namespace have an entry point, which Gymnasium called in versions before 1.
    namespace, slash, _ = env_id.rpartition("/")
    if slash and not any(known.startswith(namespace + slash) for known in gymnasium.registry):
        for plugin in entry_points(group="gymnasium.envs", name=namespace):
            plugin.load()()
    module, colon, name = env_id.rpartition(":")
    with contextlib.suppress(Exception):  # which gymnasium.make tells
        if colon:
            importlib.import_module(module)
        importlib.import_module(str(gymnasium.registry[name].entry_point).partition(":")[0])
