"""Latest observation of each environment, with the draw that decides its action."""

from __future__ import annotations

from hts_torchrl.buffers.arena import Array, Layout, SharedArena
from hts_torchrl.buffers.keys import array_name
from hts_torchrl.config import EnvSpec, Key


class StateBuffer:
    """One slot for each environment.

    **Writer**: slot ``n`` belongs to the executor of environment ``n`` until it announces ``n`` on
    the :class:`ReadyQueue`, then to the actor that took ``n``, until that actor answers.
    **Readers**: actors. **Visible when**: the slot is written before its number enters the queue.
    """

    def __init__(self, arena: SharedArena, spec: EnvSpec) -> None:
        self.observations: dict[Key, Array] = {
            key: arena[f"state/{array_name(key)}"] for key in spec.observations
        }
        self.draws = arena["state_draws"]

    @staticmethod
    def layout(spec: EnvSpec, num_envs: int) -> Layout:
        """Shapes ``[N, ...]`` of the observations, and float64 draws ``[N, K]``."""
        arrays: Layout = {
            f"state/{array_name(key)}": ((num_envs, *array.shape), array.dtype.str)
            for key, array in spec.observations.items()
        }
        arrays["state_draws"] = ((num_envs, spec.action.num_draws), "float64")
        return arrays

    def put(self, rows: slice, observation: dict[Key, Array], draws: Array) -> None:
        """Write the slots of ``rows``; the caller announces them afterwards."""
        for key, slots in self.observations.items():
            slots[rows] = observation[key]
        self.draws[rows] = draws
