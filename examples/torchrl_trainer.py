"""The collector in TorchRL's Trainer: PPO on CartPole.

Run: python examples/torchrl_trainer.py [total_frames]
"""

import sys

import torch
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.trainers import Trainer, UpdateWeights

from hts_torchrl import GymEnvs, HTSCollector, env_spec_of, make_actor_critic


def main(total_frames: int = 102_400) -> Trainer:
    torch.manual_seed(0)
    envs = GymEnvs("CartPole-v1")
    policy = make_actor_critic("mlp", env_spec_of(envs))
    actor, critic = policy.get_policy_operator(), policy.get_value_operator()
    collector = HTSCollector(  # only the actor: GAE computes the values itself
        envs, actor, num_envs=8, frames_per_batch=1024, total_frames=total_frames
    )
    trainer = Trainer(
        collector=collector,
        total_frames=total_frames,
        frame_skip=1,
        optim_steps_per_batch=16,
        loss_module=ClipPPOLoss(actor, critic, entropy_coeff=0.0, normalize_advantage=True),
        optimizer=torch.optim.Adam(policy.parameters(), lr=1e-3),
        progress_bar=False,
    )
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    trainer.register_op("batch_process", torch.no_grad()(advantage))
    UpdateWeights(collector, 1).register(trainer)
    trainer.train()
    return trainer


if __name__ == "__main__":
    print(f"{main(*map(int, sys.argv[1:])).collected_frames} frames")
