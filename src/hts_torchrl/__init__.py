"""High-Throughput Synchronous RL: asynchronous speed, and the same bits in every run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hts_torchrl.moved import find_old_names

# For type checkers, to which `as` marks a name as public; at run time `_NAMES` says the same.
if TYPE_CHECKING:
    from hts_torchrl.allocator import keep_freed_memory as keep_freed_memory
    from hts_torchrl.collectors.hts import HTSCollector as HTSCollector
    from hts_torchrl.envs.atari import AtariEnvs as AtariEnvs
    from hts_torchrl.envs.envpool import EnvPoolEnvs as EnvPoolEnvs
    from hts_torchrl.envs.football import FootballEnvs as FootballEnvs
    from hts_torchrl.envs.group import EnvFactory as EnvFactory
    from hts_torchrl.envs.group import EnvGroup as EnvGroup
    from hts_torchrl.envs.group import SeededGroup as SeededGroup
    from hts_torchrl.envs.group import Transition as Transition
    from hts_torchrl.envs.gym import GymEnvs as GymEnvs
    from hts_torchrl.envs.make_group import env_spec_of as env_spec_of
    from hts_torchrl.envs.pettingzoo import PettingZooEnvs as PettingZooEnvs
    from hts_torchrl.errors import CheckpointError as CheckpointError
    from hts_torchrl.errors import ConfigurationError as ConfigurationError
    from hts_torchrl.errors import DifferenceError as DifferenceError
    from hts_torchrl.errors import NotFiniteError as NotFiniteError
    from hts_torchrl.errors import ProtocolError as ProtocolError
    from hts_torchrl.errors import ReplayError as ReplayError
    from hts_torchrl.errors import WorkerError as WorkerError
    from hts_torchrl.errors import WorkerPlace as WorkerPlace
    from hts_torchrl.learner import A2C as A2C
    from hts_torchrl.learner import PPO as PPO
    from hts_torchrl.learner import PQN as PQN
    from hts_torchrl.learner import Impala as Impala
    from hts_torchrl.learner import Learner as Learner
    from hts_torchrl.learner import RoundModule as RoundModule
    from hts_torchrl.models import ActorCritic as ActorCritic
    from hts_torchrl.models import QPolicy as QPolicy
    from hts_torchrl.models import make_actor_critic as make_actor_critic
    from hts_torchrl.models import make_q_policy as make_q_policy
    from hts_torchrl.objectives.returns import Targets as Targets
    from hts_torchrl.policy.export import load_policy as load_policy
    from hts_torchrl.policy.export import save_policy as save_policy
    from hts_torchrl.policy.normalization import NormalizedPolicy as NormalizedPolicy
    from hts_torchrl.policy.onnx_file import save_onnx as save_onnx
    from hts_torchrl.specs import ActionSpec as ActionSpec
    from hts_torchrl.specs import ArraySpec as ArraySpec
    from hts_torchrl.specs import EnvSpec as EnvSpec
    from hts_torchrl.specs import MemorySpec as MemorySpec
    from hts_torchrl.training.callbacks import LearningCurve as LearningCurve
    from hts_torchrl.training.callbacks import RoundTrace as RoundTrace
    from hts_torchrl.training.callbacks import StopTogether as StopTogether
    from hts_torchrl.training.callbacks import TrainingStatistics as TrainingStatistics
    from hts_torchrl.training.checkpoints import DurableCheckpointIO as DurableCheckpointIO
    from hts_torchrl.training.datamodule import HTSDataModule as HTSDataModule
    from hts_torchrl.training.evaluation import Evaluation as Evaluation
    from hts_torchrl.training.round_slice import RoundSlice as RoundSlice

_NAMES = {
    "allocator": ["keep_freed_memory"],
    "collectors.hts": ["HTSCollector"],
    "envs.atari": ["AtariEnvs"],
    "envs.envpool": ["EnvPoolEnvs"],
    "envs.football": ["FootballEnvs"],
    "envs.group": ["EnvFactory", "EnvGroup", "SeededGroup", "Transition"],
    "envs.gym": ["GymEnvs"],
    "envs.make_group": ["env_spec_of"],
    "envs.pettingzoo": ["PettingZooEnvs"],
    "errors": [
        "CheckpointError",
        "ConfigurationError",
        "DifferenceError",
        "NotFiniteError",
        "ProtocolError",
        "ReplayError",
        "WorkerError",
        "WorkerPlace",
    ],
    "learner": ["A2C", "PPO", "PQN", "Impala", "Learner", "RoundModule"],
    "models": ["ActorCritic", "QPolicy", "make_actor_critic", "make_q_policy"],
    "objectives.returns": ["Targets"],
    "policy.export": ["load_policy", "save_policy"],
    "policy.normalization": ["NormalizedPolicy"],
    "policy.onnx_file": ["save_onnx"],
    "specs": ["ActionSpec", "ArraySpec", "EnvSpec", "MemorySpec"],
    "training.callbacks": ["LearningCurve", "RoundTrace", "StopTogether", "TrainingStatistics"],
    "training.checkpoints": ["DurableCheckpointIO"],
    "training.datamodule": ["HTSDataModule"],
    "training.evaluation": ["Evaluation"],
    "training.round_slice": ["RoundSlice"],
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)


find_old_names()


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: executors need neither torch nor lightning."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, for completion in a shell."""
    return [*globals(), *_HOMES]
