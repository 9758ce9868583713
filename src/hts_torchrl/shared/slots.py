"""One slot for each environment: what the policy reads, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping

from hts_torchrl.shared.arrays import Layout, SharedArrays, array_name
from hts_torchrl.specs import Array, ArraySpec, EnvSpec, Key


class StateBuffer:
    """One slot for each environment: its observation and draws, and the policy's memory of it.

    **Writer**: slot ``n`` belongs to the executor of environment ``n`` until it announces ``n`` on
    the :class:`ReadyQueue`, then to the actor that took ``n``, until that actor answers.
    **Readers**: actors. **Visible when**: the slot is written before its number enters the queue.

    ``round``, int64 ``[1]``, is the round that they are in. **Writer**: the collector between
    rounds. **Readers**: actors. **Visible when**: it is written before the executors may begin.
    """

    def __init__(self, arrays: SharedArrays, spec: EnvSpec) -> None:
        self.inputs: dict[Key, Array] = {
            key: arrays[f"state/{array_name(key)}"] for key in spec.inputs
        }
        self.observations = {key: self.inputs[key] for key in spec.observations}
        self.memory = {key: self.inputs[key] for key in spec.memory.arrays}
        self.draws = arrays["state_draws"]
        self.round = arrays["state_round"]

    @staticmethod
    def layout(spec: EnvSpec, num_envs: int) -> Layout:
        """Shapes ``[N, ...]`` of what the policy reads, float64 draws ``[N, K]``, and the round."""
        arrays: Layout = {
            f"state/{array_name(key)}": ((num_envs, *array.shape), array.dtype.str)
            for key, array in spec.inputs.items()
        }
        arrays["state_draws"] = ((num_envs, spec.action.num_draws), "float64")
        arrays["state_round"] = ((1,), "int64")
        return arrays

    def put(self, rows: slice, observation: dict[Key, Array], draws: Array) -> None:
        """Write the slots of ``rows``; the caller announces them afterwards.

        Args:
            rows: the environments of one executor, which follow one another: R of them.
            observation: arrays ``[R, ...]`` by key.
            draws: float64 ``[R, K]``.
        """
        for key, slots in self.observations.items():
            slots[rows] = observation[key]
        self.draws[rows] = draws


class ActionBuffer:
    """One slot for each environment.

    **Writer**: the actor that took the environment from the :class:`ReadyQueue`. **Reader**: the
    environment's executor. **Visible when**: the slot is written before the executor's
    :class:`Doorbell` rings: ``action_ready``.
    """

    def __init__(self, arrays: SharedArrays, outputs: Mapping[Key, ArraySpec]) -> None:
        self.answers: dict[Key, Array] = {
            key: arrays[f"action/{array_name(key)}"] for key in outputs
        }

    @staticmethod
    def layout(outputs: Mapping[Key, ArraySpec], num_envs: int) -> Layout:
        """Shapes ``[N, ...]`` of all that the policy answers."""
        return {
            f"action/{array_name(key)}": ((num_envs, *array.shape), array.dtype.str)
            for key, array in outputs.items()
        }

    def put(self, envs: Array, answers: Mapping[Key, Array]) -> None:
        """Write the answers to ``envs``; the caller rings their executors afterwards.

        Args:
            envs: int32 ``[R]``.
            answers: arrays ``[R, ...]`` by key.
        """
        for key, answer in answers.items():
            self.answers[key][envs] = answer
