"""A group of environments stepped in lock step: the one interface that executors know.

Shapes: G environments of the group; arrays lead with G.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import Array, EnvSpec, Key

_log = logging.getLogger(__name__)

Observation: TypeAlias = dict[Key, Array]
CreateEnv: TypeAlias = Callable[..., Any] | Sequence[Callable[..., Any]]


@dataclass
class Transition:
    """The result of one step of a group, for its G environments."""

    observation: Observation
    """What the step led to, also where the episode ended: for each key ``[G, *shape]``, with shape
    and dtype of :attr:`EnvSpec.observations`."""
    next_observation: Observation
    """What to act on next, in the same form: the first of a new episode where one ended."""
    reward: Array
    """What the agent learns from, float32 ``[G]``."""
    score: Array
    """The game's own reward, float32 ``[G]``."""
    terminated: Array
    """Bool ``[G]``."""
    truncated: Array
    """Bool ``[G]``."""
    episode_end: Array
    """Ends of whole games, bool ``[G]``: a lost life may be ``terminated`` without it."""


class EnvGroup(Protocol):
    """G environments that reset themselves within the step that ends an episode.

    Example:
        >>> import numpy as np
        >>> from hts_torchrl import GymEnvs
        >>> group = GymEnvs("CartPole-v1").group([0, 1])
        >>> observation = group.reset(seeds=[3, 4])
        >>> transition = group.step(np.array([0, 1]))
        >>> transition.next_observation["observation"].shape, transition.reward
        ((2, 4), array([1., 1.], dtype=float32))
        >>> group.close()
    """

    num_envs: int
    spec: EnvSpec

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Seed and reset every environment, before any step.

        An evaluation of more games than environments calls it again, when the first have ended.

        Args:
            seeds: one for each environment.

        Returns:
            What they observe: for each key ``[G, *shape]``.
        """

    def step(self, actions: Array) -> Transition:
        """Step every environment; the arrays are valid until the next call.

        Args:
            actions: ``[G, *shape]``, with shape and dtype of :attr:`ActionSpec.array`.
        """

    def render(self) -> Array:
        """Return the first environment's image, uint8 ``[height, width, 3]``."""

    def close(self) -> None:
        """Free what the environments hold."""


@runtime_checkable
class SeededGroup(EnvGroup, Protocol):
    """A group that can begin a game with a seed at any time.

    What follows depends only on that seed and the actions, so it can be replayed from there.
    Any other group is replayed from the start of the run.
    """

    steps_per_seed: int
    """Steps for which a seed lasts at least; 0 where seeding costs no more than resetting."""
    next_seed: Callable[[int], int | None] | None
    """Asked for the seed of an environment whose game has ended; None goes on without another."""

    def restart(self, rows: Sequence[int], seeds: Sequence[int]) -> Observation:
        """Begin new games in some environments.

        Args:
            rows: of these environments in the group, 0 to G - 1.
            seeds: one for each of them.

        Returns:
            What all G environments observe: for each key ``[G, *shape]``.
        """


class EnvFactory(ABC):
    """A picklable maker of groups: what ``create_env_fn`` may be instead of a plain function."""

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that are slow to import and that every executor needs."""
        return ()

    @abstractmethod
    def group(self, indices: Sequence[int], *, render: bool = False) -> EnvGroup:
        """Make the environments of the given global indices.

        Args:
            indices: of the environments, in order.
            render: whether they can be filmed.
        """


def require_alike(specs: Sequence[tuple[int, EnvSpec]]) -> EnvSpec:
    """Return what environments, by their indices, observe and accept, who must all do the same.

    Raises:
        ConfigurationError: naming the first that differs.
    """
    (first, expected), *others = specs
    for index, spec in others:
        if spec != expected:
            raise ConfigurationError(
                f"environment {index} has {spec}, but environment {first} has {expected}: one "
                "policy acts in all of them"
            )
    return expected


@contextlib.contextmanager
def closed_if_refused(envs: Sequence[Any]) -> Iterator[None]:
    """Close environments, and what is added to them, if something is raised inside."""
    try:
        yield
    except BaseException:
        for env in envs:
            with contextlib.suppress(Exception):  # what was raised first is reported
                env.close()
        raise


@contextlib.contextmanager
def closed_at_end(group: EnvGroup) -> Iterator[EnvGroup]:
    """Close a group at the end; what that raises is logged, as workers do, and ends nothing."""
    try:
        yield group
    finally:
        try:
            group.close()
        except Exception:
            _log.warning("an environment raised when it was closed\n%s", traceback.format_exc())
