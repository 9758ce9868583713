"""Short runs of CartPole whose every batch is known: a stand-in for learning, digests."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from tests.runs import digest, perturbed

from hts_torchrl import GymEnvs, HTSCollector, env_spec_of, make_actor_critic

ROUNDS = 12
ENVS = GymEnvs("CartPole-v1")


@cache
def policy() -> torch.nn.Module:
    torch.manual_seed(1)
    return make_actor_critic("mlp", env_spec_of(ENVS))


def make(**settings: Any) -> HTSCollector:
    defaults = {"num_envs": 4, "envs_per_executor": 2, "frames_per_batch": 40, "seed": 3}
    settings = {**defaults, "total_frames": 40 * ROUNDS, **settings}
    return HTSCollector(ENVS, copy.deepcopy(policy()), **settings)


def weights(update: int) -> dict[str, torch.Tensor]:
    """Stand for an update: noise that the update's number decides."""
    return perturbed(policy(), 0.05)(update)


def learn(collector: HTSCollector) -> list[str]:
    """Go through the rounds and publish weights; returns a digest of each round."""
    digests = []
    for batch in collector:
        digests.append(digest([batch]))
        collector.update_policy_weights_(weights(len(digests)))
    return digests


@cache
def undisturbed() -> list[str]:
    return learn(make(num_actors=0))
