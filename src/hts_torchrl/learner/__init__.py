"""The learners: LightningModules that turn a finished round into one update."""

from hts_torchrl.learner.a2c import A2C
from hts_torchrl.learner.base import Learner
from hts_torchrl.learner.impala import Impala
from hts_torchrl.learner.ppo import PPO
from hts_torchrl.learner.pqn import PQN
from hts_torchrl.learner.rounds import RoundModule

__all__ = ["A2C", "PPO", "PQN", "Impala", "Learner", "RoundModule"]
