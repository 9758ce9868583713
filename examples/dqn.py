"""The collector off-policy: DQN on CartPole, with TorchRL's loss, replay buffer and exploration.

Run: python examples/dqn.py [total_frames]
"""

import sys

import torch
from tensordict.nn import TensorDictSequential
from torchrl.data import Categorical, LazyTensorStorage, ReplayBuffer
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from hts_torchrl import GymEnvs, HTSCollector
from hts_torchrl.training.evaluation import Evaluation


def main(total_frames: int = 60_000) -> float:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # of layers this small: more threads wait longer than they compute
    envs, spec = GymEnvs("CartPole-v1"), Categorical(2)
    actor = QValueActor(MLP(4, 2, num_cells=[128, 128]), in_keys=["observation"], spec=spec)
    explores = EGreedyModule(spec, eps_end=0.05, annealing_num_steps=total_frames // 4)
    policy = TensorDictSequential(actor, explores)
    loss_module = DQNLoss(actor, action_space=spec, delay_value=True)
    loss_module.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss_module, tau=0.005)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=5e-4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(50_000), batch_size=128)
    collector = HTSCollector(
        envs, policy, num_envs=8, envs_per_executor=8, frames_per_batch=64,
        total_frames=total_frames,
    )  # fmt: skip
    for batch in collector:  # the next 64 steps are being played meanwhile
        buffer.extend(batch.reshape(-1))
        explores.step(batch.numel())
        for _ in range(16 if len(buffer) > 1000 else 0):
            loss = loss_module(buffer.sample())["loss"]
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 10.0)
            optimizer.step()
            target.step()
        collector.update_policy_weights_()  # weights, and the epsilon of the round after the next
    score = float(Evaluation(envs, 20, seed=0, greedy=True).run(policy).scores.mean())
    print(f"{total_frames} frames, greedy score {score:.0f}")
    return score


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
