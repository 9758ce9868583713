"""The collector off-policy: SAC on Pendulum, with TorchRL's loss and replay buffer.

Run: python examples/sac.py [total_frames]
"""

import sys

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from hts_torchrl import GymEnvs, HTSCollector
from hts_torchrl.training.evaluation import Evaluation


def main(total_frames: int = 20_000) -> float:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # of layers this small: more threads wait longer than they compute
    envs = GymEnvs("Pendulum-v1")
    net = nn.Sequential(MLP(3, 2, num_cells=[64, 64]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]), ["loc", "scale"],
        distribution_class=TanhNormal, distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
    )  # fmt: skip
    critic = ValueOperator(
        MLP(4, 1, num_cells=[64, 64]), ["observation", "action"], ["state_action_value"]
    )
    loss_module = SACLoss(actor, critic, action_spec=torch.ones(1), target_entropy=-1.0)
    loss_module.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss_module, tau=0.01)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=128)
    collector = HTSCollector(
        envs, actor, num_envs=4, envs_per_executor=4, frames_per_batch=32,
        total_frames=total_frames, init_random_frames=1000,
    )  # fmt: skip
    for batch in collector:  # the next 32 steps are being played meanwhile
        buffer.extend(batch.reshape(-1))
        for _ in range(16 if len(buffer) >= collector.init_random_frames else 0):
            losses = loss_module(buffer.sample())
            optimizer.zero_grad()
            sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
            optimizer.step()
            target.step()
        collector.update_policy_weights_()
    score = float(Evaluation(envs, 20, seed=0, greedy=True).run(actor).scores.mean())
    print(f"{total_frames} frames, greedy score {score:.0f}")
    return score


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
