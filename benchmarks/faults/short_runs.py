"""Short runs whose every batch is known: tasks, a stand-in for learning, digests."""

from __future__ import annotations

import copy
import hashlib
from functools import cache
from typing import Any

import torch
from tensordict import TensorDictBase

from hts_torchrl import GymEnvs, HTSCollector, make_actor_critic

ROUNDS = 12
TASKS: dict[str, tuple[Any, str]] = {
    "CartPole": (GymEnvs("CartPole-v1"), "mlp"),
}


@cache
def policy(task: str) -> torch.nn.Module:
    create, network = TASKS[task]
    torch.manual_seed(1)
    return make_actor_critic(network, create.group([0]).spec)


def make(task: str, **settings: Any) -> HTSCollector:
    defaults = {"num_envs": 4, "envs_per_executor": 2, "frames_per_batch": 40, "seed": 3}
    settings = {**defaults, "total_frames": 40 * ROUNDS, **settings}
    return HTSCollector(TASKS[task][0], copy.deepcopy(policy(task)), **settings)


def weights(task: str, update: int) -> dict[str, torch.Tensor]:
    """Stand for an update: noise that the update's number decides."""
    generator = torch.Generator().manual_seed(update)
    return {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in policy(task).state_dict().items()
    }


def learn(task: str, collector: HTSCollector) -> list[str]:
    """Go through the rounds and publish weights; returns a digest of each round."""
    digests = []
    for batch in collector:
        digests.append(digest(batch))
        collector.update_policy_weights_(weights(task, len(digests)))
    return digests


def digest(batch: TensorDictBase) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(batch.flatten_keys(".").items()):
        total.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


@cache
def undisturbed(task: str) -> list[str]:
    return learn(task, make(task, num_actors=0))
