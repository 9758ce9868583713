"""The collector in a plain TorchRL loop: PPO on CartPole with TorchRL's own loss.

Run: python examples/torchrl_loop.py [total_frames]
"""

import sys

import torch
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from hts_torchrl import GymEnvs, HTSCollector, env_spec_of, make_actor_critic


def main(total_frames: int = 102_400) -> float:
    torch.manual_seed(0)
    envs = GymEnvs("CartPole-v1")
    policy = make_actor_critic("mlp", env_spec_of(envs))
    actor, critic = policy.get_policy_operator(), policy.get_value_operator()
    loss_module = ClipPPOLoss(actor, critic, entropy_coeff=0.0, normalize_advantage=True)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    collector = HTSCollector(  # only the actor: GAE computes the values itself
        envs, actor, num_envs=8, frames_per_batch=1024, total_frames=total_frames
    )
    score = 0.0
    for batch in collector:  # meanwhile, the next round is collected
        with torch.no_grad():
            advantage(batch)
        samples = batch.reshape(-1)
        for _ in range(4):
            for rows in torch.randperm(len(samples)).chunk(4):
                losses = loss_module(samples[rows])
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                optimizer.step()
        collector.update_policy_weights_()  # they act from the next rendezvous on
        ended = batch["next", "episode_end"]
        if ended.any():
            score = batch["next", "episode_reward"][ended].mean().item()
            print(f"{collector.stats()['frames']} frames, score {score:.0f}")
    return score


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
