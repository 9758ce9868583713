"""From a collector's parts to its worker pool: the first, and any that must take its place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import cloudpickle
from torch import nn

from hts_torchrl.envs.group import CreateEnv, EnvFactory
from hts_torchrl.envs.registered import pickle_envs
from hts_torchrl.errors import ConfigurationError, in_one_line
from hts_torchrl.shared.action_log import ActionLog
from hts_torchrl.shared.buffers import SharedBuffers
from hts_torchrl.workers.actor import Actor, make_actor
from hts_torchrl.workers.actor_settings import ActorSettings
from hts_torchrl.workers.executor import Executor
from hts_torchrl.workers.pool import ProcessPool, WorkerPool
from hts_torchrl.workers.process import WorkerTask
from hts_torchrl.workers.serial_pool import SerialPool

_COMPILES_S = 300.0
"""More than all actors take to compile at once. They do it in seconds, from torch's cache."""


def make_pool(
    shared: SharedBuffers,
    action_log: ActionLog,
    *,
    create_env_fn: CreateEnv | EnvFactory,
    make_policy: Callable[[], nn.Module],
    settings: ActorSettings,
    seed: int,
) -> WorkerPool:
    """Make a worker pool whose environments are where the action log says, for its round.

    Every worker pool of the same arguments gives the same bits.

    Raises:
        ConfigurationError: if the policy cannot be pickled for actor processes, or read by them.
    """
    pickled = pickle_envs(create_env_fn)
    if shared.config.num_nodes:
        from hts_torchrl.workers.ray_pool import RayPool  # noqa: PLC0415 - its nodes call this

        parts = {"make_policy": make_policy, "settings": settings, "seed": seed}
        return RayPool(shared, action_log, cloudpickle.dumps({"create_env_fn": pickled, **parts}))
    make_executors = [
        partial(
            Executor,
            index=index,
            create_env_fn=pickled,
            seed=seed,
            segments=[action_log.segment(env) for env in shared.config.envs_of(index)],
        )
        for index in range(shared.config.num_executors)
    ]
    if shared.config.num_actors == 0:
        actor = Actor(shared, copy.deepcopy(make_policy()), settings)
        return SerialPool(shared, make_executors, actor)
    tasks = [
        WorkerTask(shared.for_executor(index), "executor", index, cloudpickle.dumps(make))
        for index, make in enumerate(make_executors)
    ]
    pickled_actor = _pickled_actor(make_policy, settings)
    tasks += [
        WorkerTask(shared.for_actor(), "actor", index, pickled_actor)
        for index in range(shared.config.num_actors)
    ]
    compiles = settings.compile_policy is not None
    preload = _preload(create_env_fn) + compiles * ["torch._inductor.compile_fx"]
    return ProcessPool(shared, tasks, preload, starts_s=compiles * _COMPILES_S)


def _pickled_actor(make_policy: Callable[[], nn.Module], settings: ActorSettings) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(partial(make_actor, make_policy, settings))
    except Exception as error:
        raise ConfigurationError(
            f"the policy cannot be sent to the actors ({type(error).__name__}: "
            f"{in_one_line(error)}); give the collector a policy_factory that makes it, or set "
            "num_actors=0"
        ) from error
    try:
        cloudpickle.loads(pickled)
    except Exception as error:
        raise ConfigurationError(
            f"actors cannot read the policy ({type(error).__name__}: {in_one_line(error)}); "
            "torch cannot read its own pickles of float8, uint16, uint32 and uint64: give it "
            "buffers of other types, or set num_actors=0"
        ) from error
    return pickled


def _preload(create_env_fn: CreateEnv | EnvFactory) -> list[str]:
    """Return the modules that the fork server imports once for all executors."""
    module = type(create_env_fn).__module__
    modules = [module] if module.startswith("hts_torchrl.envs.") else []
    if isinstance(create_env_fn, EnvFactory):
        modules += create_env_fn.preload
    return modules
