"""High-Throughput Synchronous RL: asynchronous speed, and the same bits in every run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hts_torchrl.allocator import keep_freed_memory
    from hts_torchrl.callbacks import LearningCurve, RoundTrace, StopTogether, TrainingStatistics
    from hts_torchrl.checkpoints import DurableCheckpointIO
    from hts_torchrl.collector import HTSCollector
    from hts_torchrl.data import HTSDataModule
    from hts_torchrl.envs.atari import AtariEnvs
    from hts_torchrl.envs.football import FootballEnvs
    from hts_torchrl.envs.group import EnvFactory
    from hts_torchrl.envs.gym import GymEnvs
    from hts_torchrl.errors import (
        CheckpointError,
        ConfigurationError,
        DifferenceError,
        NotFiniteError,
        ProtocolError,
        ReplayError,
        WorkerError,
    )
    from hts_torchrl.learner import A2C, PPO, Impala
    from hts_torchrl.models import ActorCritic, make_actor_critic
    from hts_torchrl.policy_file import load_policy, save_policy

_HOMES = {
    "A2C": "learner",
    "PPO": "learner",
    "ActorCritic": "models",
    "AtariEnvs": "envs.atari",
    "CheckpointError": "errors",
    "ConfigurationError": "errors",
    "DifferenceError": "errors",
    "DurableCheckpointIO": "checkpoints",
    "EnvFactory": "envs.group",
    "FootballEnvs": "envs.football",
    "GymEnvs": "envs.gym",
    "HTSCollector": "collector",
    "HTSDataModule": "data",
    "Impala": "learner",
    "LearningCurve": "callbacks",
    "NotFiniteError": "errors",
    "ProtocolError": "errors",
    "ReplayError": "errors",
    "RoundTrace": "callbacks",
    "StopTogether": "callbacks",
    "TrainingStatistics": "callbacks",
    "WorkerError": "errors",
    "keep_freed_memory": "allocator",
    "load_policy": "policy_file",
    "make_actor_critic": "models",
    "save_policy": "policy_file",
}

__all__ = [
    "A2C",
    "PPO",
    "ActorCritic",
    "AtariEnvs",
    "CheckpointError",
    "ConfigurationError",
    "DifferenceError",
    "DurableCheckpointIO",
    "EnvFactory",
    "FootballEnvs",
    "GymEnvs",
    "HTSCollector",
    "HTSDataModule",
    "Impala",
    "LearningCurve",
    "NotFiniteError",
    "ProtocolError",
    "ReplayError",
    "RoundTrace",
    "StopTogether",
    "TrainingStatistics",
    "WorkerError",
    "keep_freed_memory",
    "load_policy",
    "make_actor_critic",
    "save_policy",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: executors need neither torch nor lightning."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
