"""Off-policy training with the collector: SAC on Pendulum or HalfCheetah, with TorchRL's loss.

Run: python examples/sac.py [--env HalfCheetah-v5] [--total_frames 51200] [--seed 1]
"""

import argparse
from functools import partial

import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, LazyTensorStorage, ReplayBuffer
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from hts_torchrl import Evaluation, HTSCollector, env_spec_of


def make_env(env: str) -> gymnasium.Env:
    made = gymnasium.make(env)
    space = gymnasium.spaces.Box(-np.inf, np.inf, made.observation_space.shape, np.float32)
    return gymnasium.wrappers.TransformObservation(made, np.float32, space)  # MuJoCo's are float64


def main(env: str = "Pendulum-v1", total_frames: int = 20_480, seed: int = 0) -> float:
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # for layers this small, more threads wait longer than they compute
    envs = partial(make_env, env)
    spec = env_spec_of(envs)
    observed, actions = spec.observations["observation"].shape[0], spec.action.array.shape[0]
    bounds = {"low": torch.as_tensor(spec.action.low), "high": torch.as_tensor(spec.action.high)}
    small = env == "Pendulum-v1"
    large = {"num_cells": [256, 256], "activation_class": nn.ReLU}
    layers = {"num_cells": [64, 64]} if small else large
    net = nn.Sequential(MLP(observed, 2 * actions, **layers), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]), ["loc", "scale"],
        distribution_class=TanhNormal, distribution_kwargs=bounds, return_log_prob=True,
    )  # fmt: skip
    critic = ValueOperator(
        MLP(observed + actions, 1, **layers), ["observation", "action"], ["state_action_value"]
    )
    collector = HTSCollector(
        envs, actor, num_envs=4, envs_per_executor=4, frames_per_batch=32,
        total_frames=total_frames, init_random_frames=1000, seed=seed,
    )  # fmt: skip
    loss_module = SACLoss(actor, critic, action_spec=Bounded(**bounds))
    loss_module.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss_module, tau=0.01)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3, fused=True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=128)
    updates_per_round = 16 if small else 8
    for batch in collector:  # the next 32 steps are being played meanwhile
        buffer.extend(batch.reshape(-1))
        for _ in range(updates_per_round if len(buffer) >= collector.init_random_frames else 0):
            losses = loss_module(buffer.sample())
            optimizer.zero_grad()
            sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
            optimizer.step()
            target.step()
        collector.update_policy_weights_()
    score = float(Evaluation(envs, 10, seed=0, greedy=True).run(actor).scores.mean())
    print(f"{total_frames} frames, greedy score {score:.1f}")
    return score


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--env", default="Pendulum-v1")
    arguments.add_argument("--total_frames", type=int, default=20_480)
    arguments.add_argument("--seed", type=int, default=0)
    main(**vars(arguments.parse_args()))
