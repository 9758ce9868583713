"""What a policy remembers of some environments, carried from step to step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hts_torchrl.specs import IS_INIT, Array, Key, MemorySpec, next_key


class Memory:
    """Arrays ``[G, ...]`` of what a policy reads beside the observations of G environments.

    Whoever steps the environments calls, in this order::

        memory = Memory.blank(spec, G)      # all trajectories begin
        answers = ...                       # a pass reads memory.arrays
        memory.carry(answers, ended)        # bool [G]: which trajectories the step ended

    Args:
        spec: what the policy remembers.
        arrays: by key, ``[G, ...]``; changed in place.
    """

    def __init__(self, spec: MemorySpec, arrays: Mapping[Key, Array]) -> None:
        self._spec = spec
        self.arrays = dict(arrays)
        self._next_keys = {key: next_key(key) for key in spec.initial}

    @classmethod
    def blank(cls, spec: MemorySpec, num_envs: int) -> Memory:
        """Return the memory of environments whose trajectories begin, in arrays of its own."""
        arrays = {
            key: np.full((num_envs, *value.shape), value, value.dtype)
            for key, value in spec.initial.items()
        }
        if spec.reads_is_init:
            arrays[IS_INIT] = np.full((num_envs, 1), True)
        return cls(spec, arrays)

    def carry(self, answers: Mapping[Key, Array], ended: Array) -> None:
        """Take what the policy wrote under ``next``; forget it where a trajectory ended."""
        for key, value in self._spec.initial.items():
            array = self.arrays[key]
            array[...] = answers[self._next_keys[key]]
            array[ended] = value
        if self._spec.reads_is_init:
            self.arrays[IS_INIT][:, 0] = ended

    def after(self, cells: Mapping[Key, Array]) -> Memory:
        """Return what is remembered after a round, whose cells are ``[G, T, ...]`` by key."""
        if not self.arrays:
            return self
        memory = Memory(self._spec, {k: np.empty_like(array) for k, array in self.arrays.items()})
        ended = cells["next", "terminated"][:, -1, 0] | cells["next", "truncated"][:, -1, 0]
        memory.carry({key: cells[key][:, -1] for key in self._next_keys.values()}, ended)
        return memory
