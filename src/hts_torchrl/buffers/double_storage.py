"""The two storages that executors and learner exchange at a rendezvous."""

from __future__ import annotations

from collections.abc import Mapping

from hts_torchrl.buffers.arena import Array, Layout, SharedArena
from hts_torchrl.buffers.counted_storage import CountedStorage
from hts_torchrl.buffers.keys import array_name
from hts_torchrl.buffers.rollout_storage import RolloutStorage, storage_specs
from hts_torchrl.config import ArraySpec, EnvSpec, Key


class DoubleStorage:
    """Two storages: executors write one while the learner reads the other.

    Which is which follows from the round's number (:meth:`Schedule.storage_of`), so nobody has to
    signal the exchange. In debug mode both count what is written into them.
    """

    def __init__(
        self,
        arena: SharedArena,
        spec: EnvSpec,
        outputs: Mapping[Key, ArraySpec],
        *,
        debug: bool = False,
    ) -> None:
        keys = list(storage_specs(spec, outputs))

        def half(index: int, kind: str) -> dict[Key, Array]:
            return {key: arena[f"{kind}/{array_name(key)}"][index] for key in keys}

        self._storages = [
            CountedStorage(half(index, "rollout"), half(index, "writes"))
            if debug
            else RolloutStorage(half(index, "rollout"))
            for index in range(2)
        ]

    @staticmethod
    def layout(
        spec: EnvSpec,
        outputs: Mapping[Key, ArraySpec],
        num_envs: int,
        steps: int,
        *,
        debug: bool = False,
    ) -> Layout:
        """Shapes ``[2, N, T, ...]``; in debug mode also of the counts of writes, ``[2, N, T]``."""
        cells = (2, num_envs, steps)
        specs = storage_specs(spec, outputs)
        layout: Layout = {
            f"rollout/{array_name(key)}": ((*cells, *array.shape), array.dtype.str)
            for key, array in specs.items()
        }
        if debug:
            layout |= {f"writes/{array_name(key)}": (cells, "uint8") for key in specs}
        return layout

    def __getitem__(self, storage: int) -> RolloutStorage:
        """Return one of the two."""
        return self._storages[storage]
