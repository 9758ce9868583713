"""Trajectories from workers that nobody waits for: IMPALA's and SEED RL's way to collect.

A baseline, built on TorchRL's asynchronous collectors. Nothing here is reproducible: which weights
chose an action, and which trajectories make up a batch, depends on timing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, Literal, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.collectors import AsyncBatchedCollector, BaseCollector, MultiAsyncCollector

from hts_torchrl.collectors.run_times import RunTimes
from hts_torchrl.compat.processes import answer_failed_puts, get_temp_dir
from hts_torchrl.compat.torchrl import WatchedWeights, set_queue_patience, start_workers
from hts_torchrl.config import CollectorSettings, Precision
from hts_torchrl.envs.group import EnvFactory
from hts_torchrl.envs.group_env import GroupEnv
from hts_torchrl.envs.kept_process import process_kept
from hts_torchrl.errors import NO_ROOM, ConfigurationError, in_one_line
from hts_torchrl.policy.forward import evaluate, is_composite, memory_keys, probabilistic_module
from hts_torchrl.policy.limits import copied
from hts_torchrl.rng import env_seed
from hts_torchrl.shared.arrays import SharedArrays
from hts_torchrl.shared.worker_status import WorkerStatus
from hts_torchrl.specs import Key
from hts_torchrl.workers.starting import children_environment

Asynchronous: TypeAlias = Literal["actors", "server"]
_PATIENCE_S = 1e6
_SHARED_TENSOR = "</torch_"
"""In an error of torch's: what names a tensor that was to be shared."""
_GAME: list[Key] = ["reward", "done", "terminated", "truncated", "episode_end", "episode_reward"]


class ActingPolicy(TensorDictModuleBase):
    """Samples actions by torch's own generator, and says by which version of the weights.

    It writes the action, its log-probability ``[...]``, ``state_value`` ``[..., 1]`` and
    ``policy_version`` ``[...]`` (int64), which is a buffer and so travels with the weights.
    """

    def __init__(self, policy: TensorDictModuleBase, precision: Precision) -> None:
        super().__init__()
        self.policy = copied(policy).cpu().eval().requires_grad_(False)
        self._bf16 = precision == "bf16-mixed"
        head = probabilistic_module(policy)
        self._action, self._log_prob = head.dist_sample_keys[0], head.log_prob_key
        self.in_keys = list(policy.in_keys)
        self.out_keys = [self._action, self._log_prob, "state_value", "policy_version"]
        self.register_buffer("version", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Answer a batch of observations of any shape."""
        rows = tensordict.select(*self.in_keys).reshape(-1)
        observations = {key: rows[key] for key in self.in_keys}
        with torch.autocast("cpu", torch.bfloat16, enabled=self._bf16):
            result = evaluate(self.policy, observations, len(rows))
        if result.value is None:
            raise ConfigurationError("V-trace needs a policy with a value")
        action = result.distribution.sample()
        answers = {
            self._action: action,
            self._log_prob: result.distribution.log_prob(action).float(),
            "state_value": result.value.float(),
            "policy_version": self.version.expand(len(rows)).clone(),
        }
        shape = tensordict.batch_size
        return tensordict.update({k: v.reshape(*shape, *v.shape[1:]) for k, v in answers.items()})

    def load(self, policy: nn.Module, version: int) -> None:
        """Take newer weights, in place."""
        self.policy.load_state_dict(policy.state_dict())
        self.version.fill_(version)


class AsynchronousCollector:
    """Batches ``[N, T]`` of whatever trajectories are finished first, from workers that run ahead.

    It takes the place of :class:`HTSCollector` in the data module, and its batches have the same
    entries; ``("collector", "policy_version")`` differs from step to step. How far data may be
    behind is bounded by the queue alone: see ``form``.

    Args:
        env: factory of the environments.
        policy: the learner's policy, with a value.
        form: ``actors``: each worker has environments and a copy of the policy, whose weights are
            replaced while it plays, and runs ahead by one trajectory of T steps, which waits for
            the learner (IMPALA: Espeholt et al., 2018; TorchRL's ``MultiAsyncCollector``).
            ``server``: workers have environments only, and one further process answers whatever
            is ready; as many as two trajectories a worker are played or wait (SEED RL: Espeholt
            et al., 2020; TorchRL's ``AsyncBatchedCollector``).
        settings: N, T and the number of batches; ``envs_per_executor`` environments step in lock
            step in each worker; ``seed`` decides their first games, and nothing else for certain.
        precision: of the actors.

    Raises:
        ConfigurationError: if the policy has a memory, or a ``CompositeDistribution``.
    """

    acting_weights: dict[str, torch.Tensor] | None = None
    """None: a run that goes on begins with the newest weights."""

    def __init__(
        self,
        env: EnvFactory,
        policy: TensorDictModuleBase,
        *,
        form: Asynchronous,
        settings: CollectorSettings,
        precision: Precision,
    ) -> None:
        if keys := memory_keys(policy):
            raise ConfigurationError(
                f"collection={form}: the policy remembers {keys[0]!r}; give collection=rounds, or "
                "a policy without a memory"
            )
        if is_composite(probabilistic_module(policy)):
            raise ConfigurationError(
                f"collection={form}: the policy writes the parts of an action apart; give "
                "collection=rounds, or a policy with one action"
            )
        self._env, self._form = env, form
        self._settings, self._schedule = settings, settings.schedule
        self._acting = ActingPolicy(policy, precision)
        self._collector: BaseCollector | None = None
        workers = WorkerStatus.layout(settings.num_executors, most_spans=0)
        self._told = SharedArrays(workers)
        self._times = RunTimes(settings)
        self.rounds = 0
        """Batches that have been handed out since the start of the run."""

    def __len__(self) -> int:
        """Return the batches of the whole run, which has an end."""
        assert self._schedule.num_rounds is not None
        return self._schedule.num_rounds

    def start(self) -> None:
        """Start the workers, if they are not yet running."""
        self._running()

    def _running(self) -> BaseCollector:
        if self._collector is None:
            get_temp_dir()  # for the workers too: they are killed, and would leave their own
            with self._naming_memory(), children_environment() as variables:
                self._collector = self._make(variables)
        return self._collector

    @contextlib.contextmanager
    def _naming_memory(self) -> Iterator[None]:
        """Say of TorchRL's errors which are for want of shared memory, or of descriptors for it.

        Raises:
            ConfigurationError: instead of them.
        """
        try:
            yield
        except (RuntimeError, OSError) as error:
            status = WorkerStatus(self._told)
            told = next(filter(None, map(status.read_error, range(len(status.steps)))), "")
            told = told or in_one_line(error)
            no_room = isinstance(error, OSError) and error.errno in NO_ROOM
            if not no_room and _SHARED_TENSOR not in told:
                raise
            size = f"{shutil.disk_usage('/dev/shm').total / 1e6:.1f} MB"
            raise ConfigurationError(
                f"collection={self._form} keeps its data in /dev/shm: is that too small ({size}; "
                f"docker run --shm-size=1g), or the number of open files (ulimit -n)? ({told})"
            ) from error

    def _make(self, variables: dict[str, str]) -> BaseCollector:
        settings, steps = self._settings, self._schedule.steps_per_round
        envs = [
            partial(
                _make_env,
                self._env,
                settings.global_envs_of(executor),
                settings.seed,
                variables,
                (self._told, executor),
            )
            for executor in range(settings.num_executors)
        ]
        if self._form == "actors":
            return MultiAsyncCollector(
                envs, self._acting, frames_per_batch=settings.envs_per_executor * steps,
                total_frames=-1, num_threads=torch.get_num_threads(), num_sub_threads=1,
                weight_sync_schemes={"policy": WatchedWeights()},
            )  # fmt: skip
        # It tries environment and policy here first.
        with process_kept(), torch.random.fork_rng(devices=[]):
            return AsyncBatchedCollector(
                envs, policy_factory=partial(_make_server, self._acting, settings.seed),
                frames_per_batch=self._schedule.frames_per_round, transition_chunk_size=steps,
                max_batch_size=settings.num_executors, server_timeout=0.001,
                env_backend="multiprocessing", transport="auto", policy_version_key=None,
            )  # fmt: skip

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches; going on after a ``break`` continues the run."""
        collector = self._running()
        with self._naming_memory(), children_environment():
            start_workers(collector)
        parts = iter(collector)
        self._times.begin()
        while self._schedule.exists(self.rounds):
            self._times.ask()
            rows: list[TensorDictBase] = []
            while sum(len(row) for row in rows) < self._schedule.num_envs:
                with self._naming_memory():
                    part = next(parts)
                rows.append(self._rows(part))
            self.rounds += 1
            batch = self._batch(torch.cat(rows))
            self._times.hand_out()
            yield batch
        self.shutdown()

    def _rows(self, part: TensorDictBase) -> TensorDictBase:
        """Return trajectories ``[n, T]``: of one actor, or of all that the server has answered."""
        if self._form == "actors":
            return part
        steps, group = self._schedule.steps_per_round, self._settings.envs_per_executor
        return part.reshape(-1, steps, group).permute(0, 2, 1).reshape(-1, steps)

    def _batch(self, rows: TensorDictBase) -> TensorDictBase:
        observations: list[Key] = list(self._acting.in_keys)
        batch = rows.select(*observations, *self._acting.out_keys)
        batch["collector"] = TensorDict({"policy_version": batch.pop("policy_version")}, rows.shape)
        batch["next"] = rows["next"].select(*observations, *_GAME, "step_count")
        return batch

    def update_policy_weights_(self, policy: nn.Module) -> None:
        """Hand newer weights to whoever acts, at once."""
        self._acting.load(policy, int(self._acting.version) + 1)
        collector = self._running()
        with self._naming_memory():
            collector.update_policy_weights_(self._acting)

    def stats(self) -> dict[str, int | float | bool]:
        """Return the learner's seconds at work and waiting; TorchRL's workers count none."""
        return self._times.learner_stats()

    def state_at(self, round_index: int, *, envs: bool = True) -> dict[str, Any]:  # noqa: ARG002
        """Return how far the run has come; the games are not kept."""
        frames = round_index * self._schedule.frames_per_round
        version = int(self._acting.version)
        return {"policy_version": version, "frames": frames, "round": round_index}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting; new games begin."""
        self.rounds = int(state_dict.get("round", 0))
        self._acting.version.fill_(int(state_dict["policy_version"]))

    def shutdown(self) -> None:
        """Stop all workers; may be called twice."""
        collector, self._collector = self._collector, None
        if collector is None:
            return
        if isinstance(collector, MultiAsyncCollector) and not collector.closed:
            for process in collector.procs:
                with contextlib.suppress(ValueError):  # TorchRL has closed it: another has failed
                    process.terminate()  # it may wait for a place in the queue
        collector.shutdown()


def _make_env(
    env: EnvFactory,
    indices: list[int],
    seed: int,
    variables: dict[str, str],
    tell: tuple[SharedArrays, int],
) -> GroupEnv:
    """Make a worker's environments, in its process, which gets the variables of a worker."""
    # What is thrown away is work that is lost, and that takes the learner's core.
    set_queue_patience(_PATIENCE_S)
    parent = multiprocessing.parent_process()
    if parent is not None:
        os.environ.clear()
        os.environ.update(variables)
        answer_failed_puts(partial(_end_without_sending, *tell))
        threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    torch.manual_seed(env_seed(seed, indices[0], "actions"))
    return GroupEnv(env, indices, [env_seed(seed, index) for index in indices])


def _leave_with(parent: BaseProcess) -> None:
    """End this process soon after its parent, also where it waits for a place in the queue."""
    parent.join()
    os._exit(1)


def _end_without_sending(told: SharedArrays, worker: int, error: BaseException) -> None:
    """End this process, whose trajectory would be waited for without end."""
    WorkerStatus(told).write_error(worker, in_one_line(error))
    os._exit(1)


def _make_server(acting: ActingPolicy, seed: int) -> ActingPolicy:
    """Take over the policy, in the server's process."""
    torch.set_num_threads(1)
    torch.manual_seed(env_seed(seed, 0, "actions"))
    return acting
