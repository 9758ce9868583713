"""The policy's answer to each environment: action, log-probability, value."""

from __future__ import annotations

from collections.abc import Mapping

from hts_torchrl.buffers.arena import Array, Layout, SharedArena
from hts_torchrl.buffers.keys import array_name
from hts_torchrl.config import ArraySpec, Key


class ActionBuffer:
    """One slot for each environment.

    **Writer**: the actor that took the environment from the :class:`ReadyQueue`. **Reader**: the
    environment's executor. **Visible when**: the slot is written before the executor's
    :class:`Doorbell` rings: ``action_ready``.
    """

    def __init__(self, arena: SharedArena, outputs: Mapping[Key, ArraySpec]) -> None:
        self.answers: dict[Key, Array] = {
            key: arena[f"action/{array_name(key)}"] for key in outputs
        }

    @staticmethod
    def layout(outputs: Mapping[Key, ArraySpec], num_envs: int) -> Layout:
        """Shapes ``[N, ...]`` of all that the policy answers."""
        return {
            f"action/{array_name(key)}": ((num_envs, *array.shape), array.dtype.str)
            for key, array in outputs.items()
        }

    def put(self, envs: Array, answers: Mapping[Key, Array]) -> None:
        """Write the answers to ``envs``; the caller rings their executors afterwards."""
        for key, answer in answers.items():
            self.answers[key][envs] = answer
