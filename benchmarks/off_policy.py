"""DQN and TD3 by TorchRL's own parts on HTSCollector: runs whose digests can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import seed_everything
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Bounded, Categorical, LazyTensorStorage, ReplayBuffer
from torchrl.modules import (
    MLP,
    AdditiveGaussianModule,
    EGreedyModule,
    QValueActor,
    TanhModule,
    ValueOperator,
)
from torchrl.objectives import DQNLoss, SoftUpdate, TD3Loss

from hts_torchrl import GymEnvs, HTSCollector

NUM_ENVS, STEPS = 8, 8
TORQUE = Bounded(-2.0, 2.0, (1,))


class DQN:
    """CartPole with epsilon-greedy actions."""

    env = GymEnvs("CartPole-v1", {"max_episode_steps": 40})

    def __init__(self) -> None:
        choice = Categorical(2)
        actor = QValueActor(MLP(4, 2, num_cells=[32]), in_keys=["observation"], spec=choice)
        self.explores = EGreedyModule(choice, annealing_num_steps=500)
        self.policy = TensorDictSequential(actor, self.explores)
        self.loss_module: nn.Module = DQNLoss(actor, action_space=choice, delay_value=True)
        self.loss_module.make_value_estimator(gamma=0.99)

    def loss(self, sample):
        return self.loss_module(sample)["loss"]


class TD3:
    """Pendulum with Gaussian noise on the action."""

    env = GymEnvs("Pendulum-v1", {"max_episode_steps": 40})

    def __init__(self) -> None:
        actor = TensorDictSequential(
            TensorDictModule(MLP(3, 1, num_cells=[32]), ["observation"], ["action"]),
            TanhModule(in_keys=["action"], out_keys=["action"], low=-2.0, high=2.0),
        )
        critic = ValueOperator(
            MLP(4, 1, num_cells=[32]), ["observation", "action"], ["state_action_value"]
        )
        self.explores = AdditiveGaussianModule(TORQUE, annealing_num_steps=500)
        self.policy = TensorDictSequential(actor, self.explores)
        self.loss_module = TD3Loss(actor, critic, action_spec=TORQUE)
        self.loss_module.make_value_estimator(gamma=0.99)

    def loss(self, sample):
        losses = self.loss_module(sample)
        return losses["loss_actor"] + losses["loss_qvalue"]


AGENTS: dict[str, type] = {"DQN": DQN, "TD3": TD3}


def digest(name: str, *, updates: int, seed: int, resumed: bool = False, **pool: Any) -> str:
    """Train, and return the digest of all batches and of the weights at the end.

    Args:
        name: one of :data:`AGENTS`.
        updates: rounds to collect.
        seed: of everything.
        resumed: go on with another collector at half of the length.
        pool: settings of the collector, its environments among them.
    """
    seed_everything(seed, verbose=False)
    agent, sha = AGENTS[name](), hashlib.sha256()
    optimizer = torch.optim.Adam(agent.loss_module.parameters(), lr=1e-3)
    target = SoftUpdate(agent.loss_module, tau=0.01)
    buffer = ReplayBuffer(storage=LazyTensorStorage(updates * NUM_ENVS * STEPS), batch_size=32)
    frames = NUM_ENVS * STEPS
    settings = {"num_envs": NUM_ENVS, "frames_per_batch": frames, "seed": seed, **pool}
    parts = [updates // 2, updates - updates // 2] if resumed else [updates]
    state: dict[str, Any] | None = None
    for rounds in parts:
        collector = HTSCollector(policy=agent.policy, total_frames=updates * frames, **settings)
        if state is not None:
            collector.load_state_dict(state)
        for _, batch in zip(range(rounds), collector, strict=False):
            add(sha, dict(batch.items(True, True)))
            buffer.extend(batch.reshape(-1))
            loss = agent.loss(buffer.sample())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            target.step()
            agent.explores.step(frames)
            collector.update_policy_weights_()
            state = collector.state_dict()
        collector.shutdown()
    for value in agent.policy.state_dict().values():
        sha.update(value.numpy().tobytes())
    return sha.hexdigest()


def add(sha: Any, tensors: Mapping[Any, torch.Tensor]) -> None:
    for key in sorted(tensors, key=str):
        sha.update(str(key).encode())
        sha.update(tensors[key].detach().cpu().contiguous().numpy().tobytes())
