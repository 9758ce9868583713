"""Frozen records that describe environments and workers; validated where they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from hts_torchrl.errors import ConfigurationError

Key: TypeAlias = str | tuple[str, ...]
"""A TensorDict key: a name, or a path of names."""

ActionKind: TypeAlias = Literal["discrete", "one_hot", "multi_discrete", "continuous"]
Precision: TypeAlias = Literal["32-true", "bf16-mixed", "bf16-true", "64-true"]
StartMethod: TypeAlias = Literal["forkserver", "spawn"]
Collection: TypeAlias = Literal["rounds", "actors", "server"]
Recover: TypeAlias = Literal["fail", "replay"]


@dataclass(frozen=True)
class ArraySpec:
    """Shape (without environment and time) and numpy dtype of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        """Return type and shape, as ``float32 [4]``."""
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class ActionSpec:
    """What an environment accepts.

    ``sizes`` holds the number of choices: one for ``discrete`` and ``one_hot``, one a component
    for ``multi_discrete``, empty for ``continuous``, which has ``low`` and ``high`` instead.
    """

    kind: ActionKind
    array: ArraySpec
    sizes: tuple[int, ...] = ()
    low: np.ndarray[Any, Any] | None = None
    high: np.ndarray[Any, Any] | None = None
    key: Key = "action"
    """Where the environment reads it, and the policy writes it."""

    @property
    def num_draws(self) -> int:
        """Uniform numbers that decide one action."""
        return len(self.sizes) if self.sizes else math.prod(self.array.shape)


_TAKEN: frozenset[Key] = frozenset(
    {"action", "next", "reward", "done", "terminated", "truncated", "collector"}
)


@dataclass(frozen=True)
class EnvSpec:
    """Observations by key, and actions, of one environment."""

    observations: dict[Key, ArraySpec]
    action: ActionSpec

    def __post_init__(self) -> None:
        """Refuse an environment without observations, or with names that a batch uses."""
        if not self.observations:
            raise ConfigurationError("the environment has no observation")
        taken = sorted(map(str, _TAKEN.intersection(self.observations)))
        if taken:
            raise ConfigurationError(
                f"the environment has observations named {taken}, which are other entries of a "
                "batch: give them other names, with gymnasium.wrappers.TransformObservation or "
                "torchrl's RenameTransform"
            )

    def __str__(self) -> str:
        """Name shapes, types and bounds in one line."""
        seen = ", ".join(f"{key!r} {array}" for key, array in self.observations.items())
        action = self.action
        accepted = f"{action.kind} {list(action.sizes) or action.array}"
        if action.low is not None and action.high is not None:
            accepted += f" from {action.low.tolist()} to {action.high.tolist()}"
        return f"observations {seen} and actions {accepted}"

    def __eq__(self, other: object) -> bool:
        """Compare shapes, kinds and bounds."""
        if not isinstance(other, EnvSpec):
            return NotImplemented
        ours, theirs = self.action, other.action
        bounds = ((ours.low, theirs.low), (ours.high, theirs.high))
        return (
            self.observations == other.observations
            and (ours.kind, ours.array, ours.sizes) == (theirs.kind, theirs.array, theirs.sizes)
            and all(np.array_equal(np.asarray(one), np.asarray(two)) for one, two in bounds)
        )

    __hash__ = None  # type: ignore[assignment]


MOST_ENVS = 65_536
"""In one process; also rows of a forward pass and games of an evaluation."""


@dataclass(frozen=True)
class CrewConfig:
    """How many workers there are, and how they start and wait."""

    num_envs: int = 16
    """Environments in all."""
    num_actors: int = 1
    """Actor processes; 0 runs everything in the caller's process."""
    envs_per_executor: int = 1
    """Environments that one executor process steps in lock step."""
    inference_batch_size: int | None = None
    """Rows of every forward pass; None is min(8, num_envs). The last bits depend on it."""
    step_barrier: bool = False
    """At every step all environments wait for all; the bits are the same, the speed is not."""
    start_method: StartMethod = "forkserver"
    """How worker processes start."""
    timeout_s: float = 120.0
    """Seconds without a sign of life from an executor after which a round is given up."""
    recover: Recover = "fail"
    """What a worker killed by a signal means: the end, or another crew and the round again."""
    first_env: int = 0
    """Global index of environment 0 here: distributed ranks have distinct environments."""
    debug: bool = False
    """Poison storages, and check that every cell of a round is written once."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        self._refuse_counts()
        if self.start_method not in ("forkserver", "spawn"):
            raise ConfigurationError(
                f"start_method={self.start_method!r}; 'forkserver' or 'spawn' is needed"
            )
        if self.recover not in ("fail", "replay"):
            raise ConfigurationError(f"recover={self.recover!r}; 'fail' or 'replay' is needed")
        if not self.timeout_s > 0:  # which NaN is not either
            raise ConfigurationError(f"timeout_s={self.timeout_s}; a positive time is needed")

    def _refuse_counts(self) -> None:
        for name in ("num_envs", "inference_batch_size"):
            if (getattr(self, name) or 0) > MOST_ENVS:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)}; at most {MOST_ENVS} is possible"
                )
        if self.num_actors < 0:
            raise ConfigurationError(f"num_actors={self.num_actors}; 0 or more is needed")
        if self.num_actors > self.num_envs:
            raise ConfigurationError(
                f"num_actors={self.num_actors} is more than num_envs={self.num_envs}"
            )
        if self.envs_per_executor < 1:
            raise ConfigurationError(
                f"envs_per_executor={self.envs_per_executor}; at least 1 is needed"
            )
        if self.envs_per_executor > self.num_envs:
            raise ConfigurationError(
                f"envs_per_executor={self.envs_per_executor} is more than num_envs={self.num_envs}"
            )
        if self.num_envs % self.envs_per_executor:
            raise ConfigurationError(
                f"num_envs={self.num_envs} is no multiple of "
                f"envs_per_executor={self.envs_per_executor}"
            )
        if self.inference_batch_size is not None and self.inference_batch_size < 1:
            raise ConfigurationError(
                f"inference_batch_size={self.inference_batch_size}; at least 1 is needed"
            )
        if self.step_barrier and self.num_actors > 1:
            raise ConfigurationError(
                f"step_barrier with num_actors={self.num_actors}; at a barrier one actor answers "
                "all environments: 1 is needed"
            )

    @property
    def num_executors(self) -> int:
        """Executor processes."""
        return self.num_envs // self.envs_per_executor

    @property
    def batch_size(self) -> int:
        """Rows of every forward pass."""
        return self.inference_batch_size or min(8, self.num_envs)

    def envs_of(self, executor: int) -> tuple[int, ...]:
        """Local indices of the environments of one executor."""
        first = executor * self.envs_per_executor
        return tuple(range(first, first + self.envs_per_executor))
