"""What is needed to play games again: the actions since a seed, and checksums of what they did."""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.shared.memory import Memory
from hts_torchrl.specs import Array, EnvSpec, Key, MemorySpec, array_name, next_key


class Rows:
    """The end of an array that grows, in no time; who holds a shorter one still sees that.

    Rows lie one behind the other in memory that is taken ahead: an array for each of them would
    be ten times what it holds.

    Example:
        >>> short = Rows(np.array([1, 2]))
        >>> long = short.plus(np.array([3]))
        >>> short.last(1), long.last(3)
        (array([2]), array([1, 2, 3]))
    """

    def __init__(self, rows: Array, memory: _Memory | None = None) -> None:
        self._memory = memory or _Memory(rows, len(rows))
        self._end = len(rows)

    def plus(self, rows: Array, *, keep: int | None = None, reserve: int = 0) -> Rows:
        """Return these rows and further ones of their type.

        Args:
            rows: to be added.
            keep: how many of these are still wanted, at least; None is all.
            reserve: rows in all for which memory is taken, where it has to be taken anew.
        """
        memory, begin, end = self._memory, self._end, self._end + len(rows)
        # Another one may have grown from here already.
        if memory.used != begin or end > len(memory.array):
            kept = self.last(begin if keep is None else keep)
            begin, end = len(kept), len(kept) + len(rows)
            make = _mapped if reserve else np.zeros
            # A policy of float64 acts by numbers that a declared float32 does not hold.
            dtype = rows.dtype if rows.dtype.kind == "f" else memory.array.dtype
            array = make((max(2 * end, reserve), *rows.shape[1:]), dtype)
            array[:begin] = kept
            memory = _Memory(array, end)
        memory.array[begin:end] = rows
        memory.used = end
        return Rows(memory.array[:end], memory)

    def last(self, count: int) -> Array:
        """Return a view of the last rows."""
        return self._memory.array[self._end - count : self._end]


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
class Segment:
    """What one environment has played since it was last seeded: a game, or several."""

    index: int
    """Seeds that the environment was given before; decides this one."""
    trajectory: int
    """Trajectories that ended before it in this environment."""
    actions: Array
    """``[S, ...]``, in the smallest type that holds them."""
    checks: Array
    """int64 ``[K, 2]``: steps so far, and the checksum over them, at the end of each round."""
    memory: dict[Key, Array] = field(default_factory=dict)
    """What the policy remembers of the environment, by key, without its dimension."""


def checksum(before: int, arrays: Iterable[Array]) -> int:
    """Continue a checksum, 0 at first: over rewards (float32), and the last step of a round."""
    for array in arrays:
        before = zlib.crc32(array.data, before)
    return before


@dataclass(frozen=True)
class ActionLog:
    """What every environment has played since its seed, as it was when round ``round_index`` began.

    It is written from what lies in a storage anyway, and never changed: :meth:`after` returns the
    one of the next round. So whoever holds one can begin its round again, at any time.

    An environment is seeded where a game ends and the seed has lasted for ``steps_per_seed`` steps;
    None is never: then everything since the start of the run is one segment.

    All environments write into the same rows, which costs a round far less than rows of their own:
    a segment is the end of a column.
    """

    round_index: int
    steps_per_seed: int | None
    _seeds: Array
    """int64 ``[N]``, like those below: :attr:`Segment.index`."""
    _trajectories: Array
    _lengths: Array
    """Steps of each segment."""
    _num_checks: Array
    _actions: Rows
    """``[., N, ...]``."""
    _checks: Rows
    """int64 ``[., 1 + N]``: the steps of each round, and the checksums at its end."""
    _memory: Memory
    """What the policy remembers of each environment, ``[N, ...]``: no pass is repeated for it."""

    @classmethod
    def blank(
        cls,
        spec: EnvSpec,
        num_envs: int,
        *,
        steps_per_seed: int | None,
        round_index: int = 0,
        first: int = 0,
    ) -> Self:
        """Return one in which each environment is about to get its ``first``-th seed."""
        action = spec.action
        dtype = action.array.dtype
        if dtype.kind in "iu":
            dtype = np.min_scalar_type(max(action.sizes) - 1)
        numbers = np.full(num_envs, first, np.int64)
        none = np.zeros(num_envs, np.int64)
        actions = Rows(np.empty((0, num_envs, *action.array.shape), dtype))
        checks = Rows(np.empty((0, 1 + num_envs), np.int64))
        return cls(
            round_index, steps_per_seed, numbers, numbers, none, none, actions, checks,
            Memory.blank(spec.memory, num_envs),
        )  # fmt: skip

    @property
    def most_steps(self) -> int:
        """Steps that must be played again of the environment whose seed is the oldest."""
        return int(self._lengths.max())

    def after(self, spec: EnvSpec, arrays: Mapping[Key, Array]) -> Self:
        """Return the action log after its round, which ``arrays`` ``[N, T, ...]`` hold."""
        actions = arrays[spec.action.key]
        num_envs, steps = actions.shape[:2]
        seeds, trajectories = self._seeds.copy(), self._trajectories.copy()
        lengths, num_checks = self._lengths + steps, self._num_checks + 1
        sums = [0] * num_envs
        if self._num_checks.any():
            sums = self._checks.last(1)[0, 1:].tolist()
        seeds_end = self.steps_per_seed is not None
        ends = np.argwhere(arrays["next", "episode_end"][..., 0]).tolist() if seeds_end else []
        for env, step in ends:
            left = steps - 1 - step
            if lengths[env] - left >= (self.steps_per_seed or 0):
                seeds[env] += 1
                trajectories[env] = arrays["collector", "traj_ids"][env, step] // num_envs + 1
                lengths[env], num_checks[env], sums[env] = left, min(left, 1), 0
        rewards = arrays["next", "reward"].astype(np.float32)
        seen = [np.ascontiguousarray(arrays[next_key(key)][:, -1]) for key in spec.observations]
        for env, played in enumerate(np.minimum(lengths, steps).tolist()):
            if played:
                sums[env] = checksum(
                    sums[env], [rewards[env, steps - played :], *(array[env] for array in seen)]
                )
        reserve = (self.steps_per_seed or 0) * 9 // 8  # the last game of a seed goes on past it
        return replace(
            self,
            round_index=self.round_index + 1,
            _seeds=seeds,
            _trajectories=trajectories,
            _lengths=lengths,
            _num_checks=num_checks,
            _actions=self._actions.plus(
                actions.swapaxes(0, 1), keep=int(self._lengths.max()), reserve=reserve
            ),
            _checks=self._checks.plus(
                np.array([[steps, *sums]]),
                keep=int(self._num_checks.max()),
                reserve=reserve // steps,
            ),
            _memory=self._memory.after(arrays),
        )

    def segment(self, env: int) -> Segment:
        """Return what one environment has played."""
        length, num_checks = int(self._lengths[env]), int(self._num_checks[env])
        rounds = self._checks.last(num_checks)
        later = rounds[::-1, 0].cumsum()[::-1] - rounds[:, 0]
        return Segment(
            int(self._seeds[env]),
            int(self._trajectories[env]),
            self._actions.last(length)[:, env].copy(),
            np.stack([length - later, rounds[:, 1 + env]], axis=1),
            {key: array[env].copy() for key, array in self._memory.arrays.items()},
        )

    def arrays(self) -> dict[str, Array]:
        """Return all segments as arrays, by name; those of several ranks can be concatenated."""
        segments = [self.segment(env) for env in range(len(self._seeds))]
        return {
            "seeds": self._seeds.copy(),
            "trajectory": self._trajectories.copy(),
            "num_actions": self._lengths.copy(),
            "num_checks": self._num_checks.copy(),
            "actions": np.concatenate([segment.actions for segment in segments]),
            "checks": np.concatenate([segment.checks for segment in segments]),
            **{_named(key): array.copy() for key, array in self._memory.arrays.items()},
        }

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, Array],
        envs: slice,
        memory: MemorySpec,
        *,
        steps_per_seed: int | None,
        round_index: int,
    ) -> Self:
        """Return the action log of the environments ``envs``, from what :meth:`arrays` returned.

        Raises:
            ConfigurationError: if the arrays lack what the policy remembers.
        """
        names = ("seeds", "trajectory", "num_actions", "num_checks")
        seeds, trajectories, lengths, num_checks = (arrays[name][envs] for name in names)
        played = np.split(arrays["actions"], np.cumsum(arrays["num_actions"])[:-1])[envs]
        checked = np.split(arrays["checks"], np.cumsum(arrays["num_checks"])[:-1])[envs]
        shape = (lengths.max(), len(seeds), *arrays["actions"].shape[1:])
        actions = np.zeros(shape, arrays["actions"].dtype)
        checks = np.zeros((num_checks.max(), 1 + len(seeds)), np.int64)
        # Whoever was checked most often knows where all rounds ended.
        checks[:, 0] = np.diff(max(checked, key=len)[:, 0], prepend=0)
        for env, (mine, known) in enumerate(zip(played, checked, strict=True)):
            actions[len(actions) - len(mine) :, env] = mine
            checks[len(checks) - len(known) :, 1 + env] = known[:, 1]
        return cls(
            round_index, steps_per_seed, seeds, trajectories, lengths, num_checks, Rows(actions),
            Rows(checks), _remembered(arrays, envs, memory),
        )  # fmt: skip


def _named(key: Key) -> str:
    return f"memory/{array_name(key)}"


def _remembered(arrays: Mapping[str, Array], envs: slice, spec: MemorySpec) -> Memory:
    kept = {}
    for key, array in spec.arrays.items():
        rows = arrays.get(_named(key))
        if rows is None or rows.shape[1:] != array.shape:
            found = "nothing" if rows is None else f"an array of shape {rows.shape[1:]}"
            raise ConfigurationError(
                f"the policy remembers {key!r} of shape {array.shape}, but the state has {found}: "
                "it is of another policy; resume_envs=false begins new games"
            )
        kept[key] = np.array(rows[envs], array.dtype)
    return Memory(spec, kept)
