"""Off-policy training with the collector: DQN on CartPole or MinAtar, with TorchRL's loss.

Run: python examples/dqn.py [--env MinAtar/Breakout-v1] [--total_frames 200000] [--seed 1]
"""

import argparse

import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.data import Categorical, LazyTensorStorage, ReplayBuffer
from torchrl.modules import MLP, ConvNet, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate

from hts_torchrl import Evaluation, GymEnvs, HTSCollector, env_spec_of


class OfImages(nn.Sequential):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image.float().movedim(-1, -3))  # MinAtar's channels are last


def main(env: str = "CartPole-v1", total_frames: int = 51_200, seed: int = 0) -> float:
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # for layers this small, more threads wait longer than they compute
    envs = GymEnvs(env)
    choices = env_spec_of(envs).action.sizes[0]
    if env.startswith("MinAtar"):
        conv = ConvNet(num_cells=[16], kernel_sizes=3, strides=1, activation_class=nn.ReLU)
        net = OfImages(conv, MLP(1024, choices, num_cells=[128], activation_class=nn.ReLU))
        learning_rate, updates_per_round = 1e-3, 32
    else:
        net = MLP(4, choices, num_cells=[256, 256], activation_class=nn.ReLU)
        learning_rate, updates_per_round = 2.3e-3, 128
    spec = Categorical(choices)
    actor = QValueActor(net, in_keys=["observation"], spec=spec)
    explores = EGreedyModule(spec, eps_end=0.04, annealing_num_steps=total_frames // 6)
    policy = TensorDictSequential(actor, explores)
    collector = HTSCollector(
        envs, policy, num_envs=8, envs_per_executor=8, frames_per_batch=256,
        total_frames=total_frames, seed=seed,
    )  # fmt: skip
    loss_module = DQNLoss(actor, action_space=spec, delay_value=True, double_dqn=True)
    loss_module.make_value_estimator(gamma=0.99)
    target = HardUpdate(loss_module, value_network_update_interval=128)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=learning_rate, fused=True)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=len(collector))
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=64)
    for batch in collector:  # the next 256 steps are being played meanwhile
        buffer.extend(batch.reshape(-1))
        explores.step(batch.numel())
        if len(buffer) > 1000:
            for _ in range(updates_per_round):
                loss = loss_module(buffer.sample())["loss"]
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 10.0)
                optimizer.step()
                target.step()
            decay.step()
        collector.update_policy_weights_()  # weights, and the epsilon of the round after the next
    score = float(Evaluation(envs, 20, seed=0, greedy=True).run(policy).scores.mean())
    print(f"{total_frames} frames, greedy score {score:.1f}")
    return score


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--env", default="CartPole-v1")
    arguments.add_argument("--total_frames", type=int, default=51_200)
    arguments.add_argument("--seed", type=int, default=0)
    main(**vars(arguments.parse_args()))
