"""What is needed to play games again: the actions since a seed, and checksums of what they did."""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from hts_torchrl.buffers.arena import Array
from hts_torchrl.buffers.rollout_storage import next_key
from hts_torchrl.config import ActionSpec, EnvSpec, Key


class Rows:
    """An array that grows at its end, in no time; who holds a shorter one still sees that.

    Rows lie one behind the other in memory that is taken ahead: an array for each of them would
    be ten times what it holds.

    Example:
        >>> short = Rows(np.array([1, 2]))
        >>> long = short.plus(np.array([3]))
        >>> len(short), long.array()
        (2, array([1, 2, 3]))
    """

    def __init__(self, first: Array) -> None:
        self._memory = _Memory(first, len(first))
        self._length = len(first)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._length

    def plus(self, rows: Array, *, reserve: int = 0) -> Rows:
        """Return these rows and further ones of their type.

        Args:
            rows: to be added.
            reserve: rows in all for which memory is taken, where it has to be taken anew.
        """
        end = self._length + len(rows)
        memory = self._memory
        # Another one may have grown from here already.
        if memory.used != self._length or end > len(memory.array):
            make = _mapped if reserve else np.zeros
            array = make((max(2 * end, reserve), *rows.shape[1:]), memory.array.dtype)
            array[: self._length] = memory.array[: self._length]
            memory = _Memory(array, end)
        memory.array[self._length : end] = rows
        memory.used = end
        longer = Rows.__new__(Rows)
        longer._memory, longer._length = memory, end
        return longer

    def array(self) -> Array:
        """Return a copy of all rows."""
        return self._memory.array[: self._length].copy()

    def __reduce__(self) -> tuple[type[Rows], tuple[Array]]:
        """Pickle no more than these rows."""
        return Rows, (self.array(),)


def _mapped(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return zeros in memory of their own, which goes back to the system with them.

    A heap would grow where rows are taken before those of the seed before are given back, and the
    process keeps what it has freed (:func:`hts_torchrl.allocator.keep_freed_memory`).
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    array: Array = np.frombuffer(memory, dtype).reshape(shape)
    array.fill(0)  # all of it now: a run that needs ever more memory looks leaky
    return array


@dataclass
class _Memory:
    array: Array
    used: int
    """Rows that somebody has."""


@dataclass(frozen=True)
class Stretch:
    """What one environment has played since it was last seeded: a game, or several."""

    index: int
    """Seeds that the environment was given before; decides this one."""
    trajectory: int
    """Trajectories that ended before it in this environment."""
    actions: Rows
    """``[S, ...]``, in the smallest type that holds them."""
    checks: Rows = field(default_factory=lambda: Rows(np.empty((0, 2), np.int64)))
    """int64 ``[K, 2]``: steps so far, and the checksum over them, at the end of each round."""
    checksum: int = 0
    """The last of ``checks``."""

    def after(
        self,
        actions: Array,
        rewards: Array,
        seen: Iterable[Array],
        reserve: tuple[int, int] = (0, 0),
    ) -> Stretch:
        """Return the stretch after further steps.

        Args:
            actions: ``[S, ...]`` of these steps.
            rewards: ``[S, 1]`` of these steps.
            seen: what the last of them led to.
            reserve: steps and rounds in all for which memory is taken ahead.
        """
        if not len(actions):
            return self
        checksum = checksum_of_observation(checksum_of_rewards(self.checksum, rewards), seen)
        longer = self.actions.plus(actions, reserve=reserve[0])
        checks = self.checks.plus(np.array([[len(longer), checksum]]), reserve=reserve[1])
        return replace(self, actions=longer, checks=checks, checksum=checksum)


def checksum_of_rewards(before: int, rewards: Array) -> int:
    """Continue a checksum over the rewards of some steps."""
    return zlib.crc32(np.ascontiguousarray(rewards, np.float32).data, before)


def checksum_of_observation(before: int, arrays: Iterable[Array]) -> int:
    """Continue a checksum over one observation, its arrays in the order of the specification."""
    for array in arrays:
        before = zlib.crc32(np.ascontiguousarray(array).data, before)
    return before


@dataclass(frozen=True)
class Journal:
    """What every environment has played since its seed, as it was when round ``round_index`` began.

    It is written from what lies in a storage anyway, and never changed: :meth:`after` returns the
    one of the next round. So whoever holds one can begin its round again, at any time.

    An environment is seeded where a game ends and the seed has lasted for ``steps_per_seed`` steps;
    None is never: then everything since the start of the run is one stretch.
    """

    round_index: int
    stretches: tuple[Stretch, ...]
    steps_per_seed: int | None

    @classmethod
    def blank(
        cls,
        action: ActionSpec,
        num_envs: int,
        *,
        steps_per_seed: int | None,
        round_index: int = 0,
        first: int = 0,
    ) -> Self:
        """Return one in which each environment is about to get its ``first``-th seed."""
        dtype = np.min_scalar_type(max(action.sizes) - 1) if action.sizes else action.array.dtype
        none = Rows(np.empty((0, *action.array.shape), dtype))
        return cls(round_index, (Stretch(first, first, none),) * num_envs, steps_per_seed)

    def after(self, spec: EnvSpec, arrays: Mapping[Key, Array]) -> Self:
        """Return the journal after its round, which ``arrays`` ``[N, T, ...]`` hold."""
        stretches = tuple(
            self._stretch_after(env, spec, arrays) for env in range(len(self.stretches))
        )
        return replace(self, round_index=self.round_index + 1, stretches=stretches)

    def _stretch_after(self, env: int, spec: EnvSpec, arrays: Mapping[Key, Array]) -> Stretch:
        stretch, first = self.stretches[env], 0
        ends = arrays["next", "episode_end"][env]
        steps = (self.steps_per_seed or 0) * 9 // 8  # the last game of a seed goes on past it
        for last in np.flatnonzero(ends).tolist():
            if self._seeds_after(len(stretch.actions) + last + 1 - first):
                trajectory = arrays["collector", "traj_ids"][env, last] // len(self.stretches)
                none = Rows(stretch.actions.array()[:0])
                stretch = Stretch(stretch.index + 1, int(trajectory) + 1, none)
                first = last + 1
        return stretch.after(
            arrays["action"][env, first:],
            arrays["next", "reward"][env, first:],
            (arrays[next_key(key)][env, -1] for key in spec.observations),
            reserve=(steps, steps // len(ends)),
        )

    def _seeds_after(self, steps: int) -> bool:
        return self.steps_per_seed is not None and steps >= self.steps_per_seed

    def arrays(self) -> dict[str, Array]:
        """Return all stretches as arrays, by name; those of several ranks can be concatenated."""
        numbers = {
            "seeds": [stretch.index for stretch in self.stretches],
            "trajectory": [stretch.trajectory for stretch in self.stretches],
            "num_actions": [len(stretch.actions) for stretch in self.stretches],
            "num_checks": [len(stretch.checks) for stretch in self.stretches],
        }
        return {
            **{name: np.array(values, np.int64) for name, values in numbers.items()},
            "actions": np.concatenate([stretch.actions.array() for stretch in self.stretches]),
            "checks": np.concatenate([stretch.checks.array() for stretch in self.stretches]),
        }

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, Array],
        envs: slice,
        *,
        steps_per_seed: int | None,
        round_index: int,
    ) -> Self:
        """Return the journal of the environments ``envs``, from what :meth:`arrays` returned."""
        actions = np.split(arrays["actions"], np.cumsum(arrays["num_actions"])[:-1])
        checks = np.split(arrays["checks"], np.cumsum(arrays["num_checks"])[:-1])
        stretches = [
            Stretch(int(index), int(first), Rows(done), Rows(known), int([0, *known[-1:, 1]][-1]))
            for index, first, done, known in zip(
                arrays["seeds"], arrays["trajectory"], actions, checks, strict=True
            )
        ]
        return cls(round_index, tuple(stretches[envs]), steps_per_seed)
