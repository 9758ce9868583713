"""A group of environments stepped in lock step: the one interface that executors know.

Shapes: G environments of the group; arrays lead with G.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from hts_torchrl.config import EnvSpec, Key
from hts_torchrl.errors import ConfigurationError

Array: TypeAlias = np.ndarray[Any, Any]
Observation: TypeAlias = dict[Key, Array]
CreateEnv: TypeAlias = Callable[[int], Any] | Sequence[Callable[[int], Any]]


@dataclass
class Transition:
    """What one step of a group brought.

    ``observation`` is what the step led to, also where the episode ended; ``next_observation`` is
    what to act on next, the first of a new episode where one ended. ``reward`` is what the agent
    learns from, ``score`` the game's own. ``episode_end`` marks whole games: a lost life may be
    ``terminated`` without it.
    """

    observation: Observation
    next_observation: Observation
    reward: Array
    score: Array
    terminated: Array
    truncated: Array
    episode_end: Array


class EnvGroup(Protocol):
    """G environments that reset themselves within the step that ends an episode.

    Example:
        >>> group.reset(seeds)                              # doctest: +SKIP
        >>> transition = group.step(actions)                # doctest: +SKIP
        >>> act_on = transition.next_observation            # doctest: +SKIP
        >>> group.close()                                   # doctest: +SKIP
    """

    num_envs: int
    spec: EnvSpec

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Seed and reset every environment; called once, before any step."""
        ...

    def step(self, actions: Array) -> Transition:
        """Step every environment; the arrays are valid until the next call."""
        ...

    def render(self) -> Array:
        """Return the first environment's picture, uint8 ``[height, width, 3]``."""
        ...

    def close(self) -> None:
        """Free what the environments hold."""
        ...


class EnvFactory(ABC):
    """A picklable maker of groups: what ``create_env_fn`` may be instead of a plain function."""

    @abstractmethod
    def group(self, indices: Sequence[int], *, render: bool = False) -> EnvGroup:
        """Make the environments of the given global indices."""


def make_group(
    create_env_fn: CreateEnv | EnvFactory, indices: Sequence[int], *, render: bool = False
) -> EnvGroup:
    """Make the group of the environments ``indices``, from whatever the user gave.

    Args:
        create_env_fn: an ``EnvFactory``; or a function of the environment's index, or a list with
            one such function for each environment, returning a ``gymnasium.Env``, a TorchRL
            ``EnvBase`` or a vector environment with as many environments as ``indices``.
        indices: global indices of the environments.
        render: whether :meth:`EnvGroup.render` will be called.

    Raises:
        ConfigurationError: if that cannot be made a group.
    """
    if isinstance(create_env_fn, EnvFactory):
        return create_env_fn.group(indices, render=render)
    if isinstance(create_env_fn, Sequence):
        if max(indices) >= len(create_env_fn):
            raise ConfigurationError(
                f"create_env_fn lists {len(create_env_fn)} environments, but environment "
                f"{max(indices)} is wanted: give one function each, or lower num_envs"
            )
        makers = [create_env_fn[index] for index in indices]
    elif callable(create_env_fn):
        makers = [create_env_fn] * len(indices)
    else:
        raise ConfigurationError(
            f"create_env_fn is a {type(create_env_fn).__name__}; a function of the environment's "
            "index, or a list of such functions, is needed"
        )
    first = makers[0](indices[0])
    kinds = {base.__module__.split(".")[0] + "." + base.__name__ for base in type(first).__mro__}
    if "gymnasium.VectorEnv" in kinds:
        from hts_torchrl.envs.gym import VectorGroup  # noqa: PLC0415 - it imports this file

        return VectorGroup(first, indices)
    rest = [maker(index) for maker, index in zip(makers[1:], indices[1:], strict=True)]
    if "gymnasium.Env" in kinds:
        from hts_torchrl.envs.gym import SerialGroup  # noqa: PLC0415

        return SerialGroup([first, *rest], indices)
    if "torchrl.EnvBase" in kinds:
        from hts_torchrl.envs.torchrl import EnvBaseGroup  # noqa: PLC0415 - it imports torch

        return EnvBaseGroup([first, *rest], indices)
    raise ConfigurationError(
        f"create_env_fn returned a {type(first).__name__}; a gymnasium.Env, a gymnasium VectorEnv "
        "or a TorchRL EnvBase is needed"
    )
