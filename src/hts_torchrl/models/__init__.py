"""Policies as TensorDict modules, and the trunks they are built on."""

from hts_torchrl.models.actor_critic import ActorCritic, make_actor_critic
from hts_torchrl.models.combined import CombinedTrunk
from hts_torchrl.models.distributions import MultiCategorical
from hts_torchrl.models.mlp import MLP
from hts_torchrl.models.pixel_trunks import ImpalaResNet, NatureCNN, NipsCNN, SeedResNet
from hts_torchrl.models.q_policy import QPolicy, make_q_policy

__all__ = [
    "MLP",
    "ActorCritic",
    "CombinedTrunk",
    "ImpalaResNet",
    "MultiCategorical",
    "NatureCNN",
    "NipsCNN",
    "QPolicy",
    "SeedResNet",
    "make_actor_critic",
    "make_q_policy",
]
