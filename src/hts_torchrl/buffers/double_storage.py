"""The two storages that executors and learner exchange at a rendezvous."""

from __future__ import annotations

from collections.abc import Mapping

from hts_torchrl.buffers.arena import Layout, SharedArena
from hts_torchrl.buffers.keys import array_name
from hts_torchrl.buffers.rollout_storage import RolloutStorage, storage_specs
from hts_torchrl.config import ArraySpec, EnvSpec, Key


class DoubleStorage:
    """Two storages: executors write one while the learner reads the other.

    Which is which follows from the round's number (:meth:`Schedule.storage_of`), so nobody has to
    signal the exchange.
    """

    def __init__(self, arena: SharedArena, spec: EnvSpec, outputs: Mapping[Key, ArraySpec]) -> None:
        specs = storage_specs(spec, outputs)
        self._storages = [
            RolloutStorage({key: arena[f"rollout/{array_name(key)}"][half] for key in specs})
            for half in range(2)
        ]

    @staticmethod
    def layout(
        spec: EnvSpec, outputs: Mapping[Key, ArraySpec], num_envs: int, steps: int
    ) -> Layout:
        """Shapes ``[2, N, T, ...]``."""
        return {
            f"rollout/{array_name(key)}": ((2, num_envs, steps, *array.shape), array.dtype.str)
            for key, array in storage_specs(spec, outputs).items()
        }

    def __getitem__(self, storage: int) -> RolloutStorage:
        """Return one of the two."""
        return self._storages[storage]
