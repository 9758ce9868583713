"""Short runs of CartPole whose every batch is known: a stand-in for learning, digests."""

from __future__ import annotations

import copy
import hashlib
from functools import cache
from typing import Any

import torch
from tensordict import TensorDictBase

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
    generator = torch.Generator().manual_seed(update)
    return {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in policy().state_dict().items()
    }


def learn(collector: HTSCollector) -> list[str]:
    """Go through the rounds and publish weights; returns a digest of each round."""
    digests = []
    for batch in collector:
        digests.append(digest(batch))
        collector.update_policy_weights_(weights(len(digests)))
    return digests


def digest(batch: TensorDictBase) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(batch.flatten_keys(".").items()):
        total.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


@cache
def undisturbed() -> list[str]:
    return learn(make(num_actors=0))
