"""The runner of rounds: shared memory, worker pool and weights of one collector."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from hts_torchrl.collectors.progress import Progress
from hts_torchrl.collectors.run_times import RunTimes
from hts_torchrl.config import CollectorSettings
from hts_torchrl.errors import WorkerKilled
from hts_torchrl.policy.shared_weights import PolicyWeights
from hts_torchrl.shared.action_log import ActionLog
from hts_torchrl.shared.buffers import SharedBuffers
from hts_torchrl.specs import IS_INIT, Array, ArraySpec, EnvSpec, Key
from hts_torchrl.workers.pool import WorkerPool

_log = logging.getLogger(__name__)
# A worker that dies again and again, from want of memory say, would do so for ever.
_MOST_RECOVERIES = 3
_MANY_STEPS = 1000  # of an environment; Atari plays so many in half a second

MakePool: TypeAlias = Callable[[SharedBuffers, ActionLog], WorkerPool]
"""Makes a worker pool whose environments are where the action log says."""


class RoundRunner:
    """Carries out rounds one after another; workers run from its construction to its shutdown.

    Of each round, the collector does this::

        batch = runner.next_batch(hook, hand_out)
        runner.weights.publish(policy.state_dict())

    Args:
        settings: of the collector.
        env_spec: what the environments observe and accept.
        outputs: arrays that the policy answers with, by key.
        policy: whose weights act first: those that it has when the first batch is asked for.
        progress: where the run goes on; advanced in place.
        times: where it is noted who works and who waits.
        make_pool: called once, and again for each recovery.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        env_spec: EnvSpec,
        outputs: dict[Key, ArraySpec],
        policy: nn.Module,
        *,
        progress: Progress,
        times: RunTimes,
        make_pool: MakePool,
    ) -> None:
        self._settings, self._schedule, self._env_spec = settings, settings.schedule, env_spec
        self._progress, self._times, self._make_pool = progress, times, make_pool
        self.shared = SharedBuffers(env_spec, outputs, settings, PolicyWeights.layout(policy))
        try:
            self.weights = PolicyWeights(self.shared.arrays, policy)
            self._publish_first(policy)
            self._unpublished: nn.Module | None = policy
            """Whose weights act first, until some are published or a warning says that none are."""
            self._asked = False
            """Whether a batch was asked for."""
            self._ending = threading.RLock()  # a signal may end the thread that holds it
            self.pool = self._new_pool()
        except BaseException:
            self.shared.close()
            raise

    def next_batch(
        self,
        before_round: Callable[[], None] | None,
        hand_out: Callable[[TensorDictBase], TensorDictBase],
    ) -> TensorDictBase:
        """Finish the running round ``[N, T]``, start the following one and hand the former out.

        With a delay of 0 the round is started here first, and no other follows. A call that Ctrl-C
        has ended may be made again, and hands out the same round.
        """
        progress, round_index = self._progress, self._progress.round_index
        self._times.ask()
        self._heed_unpublished()
        if progress.started < round_index:
            self._start_round(round_index, before_round)
        if progress.started == round_index:  # else the call that Ctrl-C has ended has met them
            self._wait_round(round_index)
            self.shared.storage_of(round_index).check(round_index, self._settings.first_env)
            self._times.meet(round_index, self.shared.status)
        counted = progress.round_index, progress.frames
        progress.round_index += 1
        progress.frames += self._settings.frames_per_batch
        try:
            if self._schedule.starts_before_update() and progress.started == round_index:
                if self._schedule.exists(round_index + 1):
                    self._start_round(round_index + 1, before_round)
                else:  # those weights act with which a longer run would start it
                    self._exchange_weights(round_index + 1)
            storage, version = self.shared.storage_of(round_index), progress.versions[round_index]
            batch = batch_over(storage.arrays, self._env_spec, version=version)
            self._note(round_index)
            return hand_out(batch)
        except BaseException:  # such as Ctrl-C: the caller does not get it
            progress.round_index, progress.frames = counted
            raise

    def _start_round(self, round_index: int, before_round: Callable[[], None] | None) -> None:
        """Hand the published weights to the actors, then let the executors go."""
        if before_round is not None:
            before_round()
        self._exchange_weights(round_index)
        self._progress.started = round_index
        self._begin_round(round_index)

    def _exchange_weights(self, round_index: int) -> None:
        """Make the published weights those with which a round acts."""
        progress = self._progress
        if progress.acting_weights is None:
            self.weights.exchange()
        progress.acting_weights = None
        before = {r: v for r, v in progress.versions.items() if r == round_index - 1}
        progress.versions = {**before, round_index: self.weights.acting_version}

    def _begin_round(self, round_index: int) -> None:
        self.shared.begin_round(round_index)
        self.shared.status.trace(round_index == self._times.traced_round)
        self.pool.start_round(round_index)

    def _wait_round(self, round_index: int) -> None:
        """Wait for a round, with as many worker pools as it takes."""
        for recovery in range(1, _MOST_RECOVERIES + 2):
            try:
                self.pool.wait_round(round_index)
            except WorkerKilled as error:
                if self._settings.recover == "fail" or recovery > _MOST_RECOVERIES:
                    raise
                # All workers, where the pool cannot tell who else is harmed.
                whole = not self.pool.replace_dead_nodes(self._progress.action_logs[round_index])
                made = "worker pool" if whole else "node"
                _log.warning(
                    "%s: round %d is repeated by a new %s (recovery %d of at most %d)",
                    *(str(error), round_index, made, recovery, _MOST_RECOVERIES),
                )
                if whole:
                    self.renew_pool()
            else:
                return

    def _note(self, round_index: int) -> None:
        """Write a finished round into the action log, before the caller can write to it."""
        action_log = self._progress.action_logs[round_index]
        # New games may have been begun before the next round was started, by its hook.
        following = self._progress.action_logs.get(round_index + 1) or action_log.after(
            self._env_spec, self.shared.storage_of(round_index).arrays
        )
        self._progress.action_logs = {round_index: action_log, round_index + 1: following}

    def _publish_first(self, policy: nn.Module) -> None:
        """Publish the policy's weights; those of a loaded state act for one more round."""
        progress = self._progress
        if progress.acting_weights is not None:
            self.weights.publish(progress.acting_weights, progress.versions[progress.round_index])
            self.weights.exchange()
        self.weights.publish(policy.state_dict(), progress.first_version)
        if progress.acting_weights is None:
            self.weights.exchange()

    def _heed_unpublished(self) -> None:
        """Take what weights that nobody has published have become, before the first batch.

        No round has started then, so that no actor has loaded any. Later it is told that they do
        not act: TorchRL's actors have the policy itself, and need no publishing.
        """
        policy, progress = self._unpublished, self._progress
        if policy is None:
            return
        if self.weights.newest_version != progress.first_version:
            self._unpublished = None
        elif not self._asked:
            self.weights.replace_newest(policy.state_dict())
        elif not self.weights.are_newest(policy.state_dict()):
            self._unpublished = None
            _log.warning(
                "the policy's weights have changed since the first batch, but none were published: "
                "those of the start act until update_policy_weights_() is called"
            )
        self._asked = True

    def renew_pool(self) -> None:
        """Begin the next batch's round again, with other workers, where its action log says.

        Weights and storages stay where they are. A round that has not begun is not started here.
        """
        progress, round_index = self._progress, self._progress.round_index
        self.pool.shutdown()
        self.shared.renew_signals()
        self.pool = self._new_pool()
        if progress.started >= round_index:
            # A call that Ctrl-C has ended may have started the one after it, with newer weights.
            progress.started = round_index
            progress.versions[round_index] = self.weights.acting_version
            self._begin_round(round_index)

    def _new_pool(self) -> WorkerPool:
        """Start workers that begin where the action log says; tell if much is played again."""
        action_log = self._progress.action_logs[self._progress.round_index]
        if action_log.most_steps >= _MANY_STEPS:
            _log.warning(
                "before round %d the environments play again what they have played since their "
                "seeds: up to %d steps each, %d environments in an executor",
                *(action_log.round_index, action_log.most_steps, self._settings.envs_per_executor),
            )
        return self._make_pool(self.shared, action_log)

    def shutdown(self) -> None:
        """Stop all workers and free the shared memory; may be called twice, and by two threads."""
        with self._ending:
            self.pool.shutdown()
            self.shared.close()


def batch_over(arrays: Mapping[Key, Array], spec: EnvSpec, *, version: int = 0) -> TensorDict:
    """Lay a batch over the arrays of a round ``[N, T, ...]``, without copying.

    Flags that no array holds are False: a step before which a game ended is the next game's. The
    ``version`` is that of the acting weights.
    """
    shape = arrays["collector", "traj_ids"].shape
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    batch = TensorDict(tensors, shape, names=[None, "time"])
    flags: list[Key] = ["done", "terminated", "truncated"]
    if spec.memory.reads_is_init:  # as TorchRL's InitTracker: no step goes on anew
        flags.append(("next", IS_INIT))
    for key in flags:
        batch[key] = torch.zeros(*shape, 1, dtype=torch.bool)
    batch["next", "done"] = batch["next", "terminated"] | batch["next", "truncated"]
    batch["collector", "policy_version"] = torch.full(shape, version, dtype=torch.int64)
    return batch
