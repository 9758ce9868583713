"""What workers share: a slot for each environment, and all else that is allocated once."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, Self

from hts_torchrl.config import CollectorSettings
from hts_torchrl.machine import require_descriptors
from hts_torchrl.shared.arrays import Layout, SharedArrays, layout_of
from hts_torchrl.shared.pipes import Doorbell, ReadyQueue
from hts_torchrl.shared.rollout import DoubleStorage, RolloutStorage, storage_specs
from hts_torchrl.shared.worker_status import WorkerStatus
from hts_torchrl.specs import Array, ArraySpec, EnvSpec, Key

# Other pipes, the memory, and what starting a process takes for a moment.
_OTHER_DESCRIPTORS = 24


class StateBuffer:
    """One slot for each environment: its observation and draws, and the policy's memory of it.

    **Writer**: slot ``n`` belongs to the executor of environment ``n`` until it announces ``n`` on
    the :class:`ReadyQueue`, then to the actor that took ``n``, until that actor answers.
    **Readers**: actors. **Visible when**: the slot is written before its number enters the queue.

    ``round``, int64 ``[1]``, is the round that they are in. **Writer**: the collector between
    rounds. **Readers**: executors and actors. **Visible when**: it is written before the ring that
    starts it.
    """

    def __init__(self, arrays: SharedArrays, spec: EnvSpec) -> None:
        self.inputs = arrays.by_key("state", spec.inputs)
        self.observations = {key: self.inputs[key] for key in spec.observations}
        self.draws = arrays["state_draws"]
        self.round = arrays["state_round"]

    @staticmethod
    def layout(spec: EnvSpec, num_envs: int) -> Layout:
        """Shapes ``[N, ...]`` of what the policy reads, float64 draws ``[N, K]``, and the round."""
        return layout_of("state", spec.inputs, num_envs) | {
            "state_draws": ((num_envs, spec.action.num_draws), "float64"),
            "state_round": ((1,), "int64"),
        }

    def put(self, rows: slice, observation: dict[Key, Array], draws: Array) -> None:
        """Write the slots of ``rows``, ``[R, ...]`` each; the caller announces them afterwards."""
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
        self.answers = arrays.by_key("action", outputs)

    @staticmethod
    def layout(outputs: Mapping[Key, ArraySpec], num_envs: int) -> Layout:
        """Shapes ``[N, ...]`` of all that the policy answers."""
        return layout_of("action", outputs, num_envs)

    def put(self, envs: Array, answers: Mapping[Key, Array]) -> None:
        """Write answers ``[R, ...]`` to R ``envs``; the caller rings their executors afterwards."""
        for key, answer in answers.items():
            self.answers[key][envs] = answer


class SharedBuffers:
    """The shared buffers, and the settings that give them their shapes.

    Made by the collector before the workers start; a worker gets the part it needs
    (:meth:`for_executor`, :meth:`for_actor`) as a process argument and sees the same memory.
    """

    def __init__(
        self,
        spec: EnvSpec,
        outputs: Mapping[Key, ArraySpec],
        config: CollectorSettings,
        weights_layout: Layout,
    ) -> None:
        self.spec = spec
        self.outputs = dict(outputs)
        self.config = config
        self.schedule = schedule = config.schedule
        num_envs = config.num_envs
        discounted = config.reward_discount is not None
        self._cells = storage_specs(spec, outputs, discounted=discounted)
        # Two ends of a bell for each executor, two descriptors of multiprocessing for each process.
        # Where they are on rollout nodes, each of these has buffers of its own for its slice.
        if not config.num_nodes:
            workers = config.num_executors + config.num_actors if config.num_actors else 0
            require_descriptors(
                2 * config.num_executors + 2 * workers + _OTHER_DESCRIPTORS,
                f"{config.num_executors} executors and {config.num_actors} actors need",
            )
        self.arrays = SharedArrays(
            StateBuffer.layout(spec, num_envs)
            | ActionBuffer.layout(outputs, num_envs)
            | DoubleStorage.layout(
                self._cells, num_envs, schedule.steps_per_round, debug=config.debug
            )
            | WorkerStatus.layout(
                config.num_executors + config.num_actors,
                most_spans=schedule.frames_per_round + 2,  # an actor may run a pass for each frame
            )
            | weights_layout
        )
        self._make_pipes()
        self._attach()

    def _make_pipes(self) -> None:
        self.ready = ReadyQueue()
        self.finished = ReadyQueue()
        executors = 0 if self.config.num_nodes else self.config.num_executors
        self.doorbells = {index: Doorbell() for index in range(executors)}

    def _attach(self) -> None:
        self.state = StateBuffer(self.arrays, self.spec)
        self.actions = ActionBuffer(self.arrays, self.outputs)
        self.storages = DoubleStorage(self.arrays, self._cells, debug=self.config.debug)
        self.status = WorkerStatus(self.arrays)

    def storage_of(self, round_index: int) -> RolloutStorage:
        """Return the storage that a round writes."""
        return self.storages[self.schedule.storage_of(round_index)]

    def begin_round(self, round_index: int) -> None:
        """Name the round that follows, and poison its storage in debug mode; no executor runs."""
        self.state.round[0] = round_index
        self.storage_of(round_index).poison()

    def renew_signals(self) -> None:
        """Replace all pipes, and empty the worker status, for another pool; the arrays stay."""
        self._close_pipes()
        self._make_pipes()
        self.status.clear()

    def for_executor(self, executor: int) -> Self:
        """Return the shared buffers with this executor's doorbell only."""
        shared = copy(self)
        shared.doorbells = {executor: self.doorbells[executor]}
        return shared

    def for_actor(self) -> Self:
        """Return the shared buffers with doorbells that can be rung only."""
        shared = copy(self)
        shared.doorbells = {index: bell.for_ringing() for index, bell in self.doorbells.items()}
        return shared

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is rebuilt from the shared arrays."""
        built = ("state", "actions", "storages", "status")
        return {name: value for name, value in self.__dict__.items() if name not in built}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Attach to the same memory in a worker."""
        self.__dict__.update(state)
        self._attach()

    def close(self) -> None:
        """Close pipes and the memory's descriptor here; arrays live on while they are used."""
        self._close_pipes()
        self.arrays.close()

    def _close_pipes(self) -> None:
        for bell in self.doorbells.values():
            bell.close()
        self.ready.close()
        self.finished.close()
