"""The actor: answers whatever observations are ready, one batched pass at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection

from torch import nn

from hts_torchrl.policy.compiled_pass import CompiledPass
from hts_torchrl.policy.shared_weights import PolicyWeights
from hts_torchrl.shared.buffers import SharedBuffers
from hts_torchrl.shared.worker_status import BusyTimer
from hts_torchrl.specs import Array
from hts_torchrl.workers.actor_settings import ActorSettings, make_inference


class Actor:
    """Owns a copy of the policy, and loads the acting weights when a round has brought new ones.

    In a process of its own it does :meth:`run`; the serial worker pool calls :meth:`answer`.
    """

    def __init__(self, shared: SharedBuffers, policy: nn.Module, settings: ActorSettings) -> None:
        self._shared = shared
        self.batch_size, self._random_rounds = settings.batch_size, settings.random_rounds
        self._weights = PolicyWeights(shared.arrays, policy)
        self._inference = make_inference(policy, shared.spec, settings)
        if settings.compile_policy is not None:
            self._inference.compiled = CompiledPass(self._inference, settings.compile_policy)
            self._inference.run_batch()  # now, and not while environments wait

    def run(self, lifeline: Connection, timer: BusyTimer) -> None:
        """Serve until stopped: observation ready -> newest weights -> pass -> action ready."""
        shared, config = self._shared, self._shared.config
        group = config.envs_per_executor
        timer.waits()
        while True:
            if config.step_barrier:
                envs = shared.ready.take_all(config.num_envs, lifeline)
            else:
                envs = shared.ready.take(self.batch_size, lifeline)
            timer.works()
            self.answer(envs)
            timer.waits()  # before the round can end
            for executor, answers in sorted(Counter((envs // group).tolist()).items()):
                shared.doorbells[executor].ring(answers)

    def answer(self, envs: Array) -> None:
        """Answer the environments ``envs`` (int32): state buffer to action buffer."""
        self._weights.load(self._inference.policy)
        state = self._shared.state
        inputs = {key: slots[envs] for key, slots in state.inputs.items()}
        draws = state.draws[envs]
        random = int(state.round[0]) < self._random_rounds
        answers = self._inference.answer(inputs, draws, random=random)
        self._shared.actions.put(envs, answers)

    def close(self) -> None:
        """Do nothing: a policy holds nothing that outlives its process."""


def make_actor(
    make_policy: Callable[[], nn.Module], settings: ActorSettings, shared: SharedBuffers
) -> Actor:
    """Make the one actor of a process, and set what is global to it."""
    settings.apply()
    return Actor(shared, make_policy(), settings)
