"""What environments observe and accept, and what a policy remembers: shapes and types by key."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from hts_torchrl.errors import ConfigurationError

Array: TypeAlias = np.ndarray[Any, Any]
"""A numpy array; its shape and type stand where it is named."""

Key: TypeAlias = str | tuple[str, ...]
"""A TensorDict key: a name, or a path of names."""

ActionKind: TypeAlias = Literal["discrete", "one_hot", "multi_discrete", "continuous", "mixed"]


@dataclass(frozen=True)
class ArraySpec:
    """Shape (without environment and time) and numpy dtype of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    choices: tuple[range, ...] = ()
    """Of which each element is one, in C order; empty where the numbers are sizes."""

    def __str__(self) -> str:
        """Return type and shape, as ``float32 [4]``."""
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class ActionSpec:
    """What an environment accepts.

    ``sizes`` has the number of choices: one for ``discrete`` and ``one_hot``, one per component
    for ``multi_discrete``. It is empty for ``continuous``, which has ``low`` and ``high`` instead.
    ``mixed`` has both: a vector of choices, followed by numbers.
    """

    kind: ActionKind
    array: ArraySpec
    sizes: tuple[int, ...] = ()
    low: Array | None = None
    """Lower bounds of the numbers, float32; None where there are none."""
    high: Array | None = None
    """Upper bounds, likewise."""
    key: Key = "action"
    """Where the environment reads it, and the policy writes it."""
    parts: dict[Key, ActionSpec] = field(default_factory=dict)
    """What it joins, by the environment's names; empty for an action that is one by itself."""
    mask: Key | None = None
    """Where TorchRL's ``ActionMask`` reads which actions are allowed, if there is one."""

    @property
    def num_draws(self) -> int:
        """Random numbers that decide one action."""
        one_each = self.kind in ("continuous", "mixed")
        return math.prod(self.array.shape) if one_each else len(self.sizes)

    @property
    def mask_key(self) -> Key:
        """Where an observation tells which actions are allowed: ``action_mask``, beside the key.

        An ``ActionMask`` of TorchRL's may name another.
        """
        if self.mask is not None:
            return self.mask
        return "action_mask" if isinstance(self.key, str) else (*self.key[:-1], "action_mask")


def path_of(key: Key) -> tuple[str, ...]:
    """Return a key as a path, also where it is a single name or has paths in it."""
    return (key,) if isinstance(key, str) else tuple(name for part in key for name in path_of(part))


def array_name(key: Key) -> str:
    """Return one string for a key: its names joined by dots."""
    return ".".join(path_of(key))


def next_key(key: Key) -> Key:
    """Return the key of the following step's entry."""
    return ("next", *path_of(key))


IS_INIT = "is_init"
"""Key of whether a step is the first of its trajectory, as TorchRL's ``InitTracker`` writes it."""


@dataclass(frozen=True)
class MemorySpec:
    """What a policy writes under ``next`` and reads in the environment's next step.

    For example recurrent states, and whatever else TorchRL's ``TensorDictPrimer`` fills.
    """

    initial: dict[Key, Array] = field(default_factory=dict)
    """What it reads in the first step of a trajectory, by key."""
    reads_is_init: bool = False
    """Whether it reads :data:`IS_INIT`, which no environment observes."""

    @property
    def arrays(self) -> dict[Key, ArraySpec]:
        """All that a policy reads beside observations, by key."""
        specs = {key: ArraySpec(value.shape, value.dtype) for key, value in self.initial.items()}
        if self.reads_is_init:
            specs[IS_INIT] = ArraySpec((1,), np.dtype(np.bool_))
        return specs


_TAKEN = frozenset(
    {"action", "next", "reward", "done", "terminated", "truncated", "collector"}
    | {"episode_end", "discounted_return"}
)
COUNTED = {
    "episode_reward": ArraySpec((1,), np.dtype(np.float32)),
    "step_count": ArraySpec((1,), np.dtype(np.int64)),
}
"""What an environment may count itself, as TorchRL's ``RewardSum`` and ``StepCounter`` do."""


@dataclass(frozen=True)
class EnvSpec:
    """Observations by key, and actions, of one environment; and what a policy remembers of it."""

    observations: dict[Key, ArraySpec]
    action: ActionSpec
    memory: MemorySpec = field(default_factory=MemorySpec)
    """What a policy remembers of it."""

    @property
    def inputs(self) -> dict[Key, ArraySpec]:
        """All that a policy reads of it: observations, and what it remembers."""
        return self.observations | self.memory.arrays

    def first_value(self, key: Key) -> Array:
        """Return an input of zeros or first choices; a mask, and booleans, allow everything."""
        array = self.inputs[key]
        allows = array.dtype == np.bool_ or key == self.action_mask
        values = np.full(array.shape, allows, array.dtype)
        if array.choices and not allows:
            values[...] = np.reshape([each.start for each in array.choices], array.shape)
        return values

    def __post_init__(self) -> None:
        """Refuse an environment without observations, or with names that a batch uses."""
        if not self.observations:
            raise ConfigurationError("the environment has no observation")
        if taken := sorted(_TAKEN & {path_of(key)[0] for key in self.observations}):
            raise ConfigurationError(
                f"the environment has observations named {taken}, which are other entries of a "
                "batch: give them other names, with gymnasium.wrappers.TransformObservation or "
                "torchrl's RenameTransform"
            )
        joined = [array_name(key) for key in self.observations]
        if doubled := [name for name in joined if joined.count(name) > 1]:
            raise ConfigurationError(
                f"the environment has two observations named {doubled[0]!r} when their names are "
                "joined by dots: give one another name"
            )
        for name, counted in COUNTED.items():
            seen = self.observations.get(name, counted)
            if (seen.shape, seen.dtype) != (counted.shape, counted.dtype):
                raise ConfigurationError(
                    f"the environment's observation {name!r} is {seen}, and a batch has {counted} "
                    "under that name, of the game so far: give it another name, with "
                    "gymnasium.wrappers.TransformObservation or torchrl's RenameTransform"
                )

    @property
    def action_mask(self) -> Key | None:
        """Key of the observation that tells which actions are allowed, if there is one."""
        return self.action.mask_key if self.action.mask_key in self.observations else None

    def __str__(self) -> str:
        """Name shapes, types and bounds in one line."""
        seen = ", ".join(f"{key!r} {array}" for key, array in self.observations.items())
        action = self.action
        accepted = f"{action.kind} {list(action.sizes) or action.array}"
        if action.low is not None and action.high is not None:
            accepted += f" from {action.low.tolist()} to {action.high.tolist()}"
        if action.parts:
            named = (f"{key!r} {part.kind} {part.array}" for key, part in action.parts.items())
            accepted += f", joined of {', '.join(named)}"
        return f"observations {seen} and actions {accepted}"

    def __eq__(self, other: object) -> bool:
        """Compare shapes, kinds, bounds and names of parts; what is remembered is the policy's."""
        if not isinstance(other, EnvSpec):
            return NotImplemented
        ours, theirs = self.action, other.action
        bounds = ((ours.low, theirs.low), (ours.high, theirs.high))
        return (
            self.observations == other.observations
            and _forms(ours) == _forms(theirs)
            and all(np.array_equal(np.asarray(one), np.asarray(two)) for one, two in bounds)
        )

    __hash__ = None  # type: ignore[assignment]


def _forms(action: ActionSpec) -> list[tuple[Any, ...]]:
    each = [("action", action), *action.parts.items()]
    return [(name, part.kind, part.array, part.sizes) for name, part in each]
