"""A2C and PPO in one file on EnvPool's native Atari and CartPole, in the manner of CleanRL.

For ``throughput.py``, which makes its environment and calls it. The main process acts on all
environments at once, then learns.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import envpool
import numpy as np
import torch
from harness import Stopwatch, keep_freed_memory
from torch import Tensor, nn

GAMMA = 0.99


def layer(module: Any, gain: float = 2**0.5) -> Any:
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def nature() -> nn.Sequential:
    convolutions = [(4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
    layers = [m for sizes in convolutions for m in (layer(nn.Conv2d(*sizes)), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), layer(nn.Linear(3136, 512)), nn.ReLU())


def mlp(inputs: int) -> nn.Sequential:
    sizes = [(inputs, 64), (64, 64)]
    return nn.Sequential(*(m for size in sizes for m in (layer(nn.Linear(*size)), nn.Tanh())))


class Agent(nn.Module):
    """The Nature network with two heads, or a multilayer perceptron for each of them."""

    def __init__(
        self, shape: tuple[int, ...], num_actions: int, memory_format: torch.memory_format
    ) -> None:
        super().__init__()
        self.pixels, self.memory_format = len(shape) == 3, memory_format
        self.trunk = nature() if self.pixels else mlp(shape[0])
        self.critic_trunk = self.trunk if self.pixels else mlp(shape[0])
        width = 512 if self.pixels else 64
        self.actor = layer(nn.Linear(width, num_actions), 0.01)
        self.critic = layer(nn.Linear(width, 1), 1.0)
        self.to(memory_format=memory_format)

    def forward(self, observation: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        if self.pixels:
            observation = (observation / 255.0).contiguous(memory_format=self.memory_format)
        hidden = self.trunk(observation)
        value = self.critic(hidden if self.pixels else self.critic_trunk(observation))
        return torch.distributions.Categorical(logits=self.actor(hidden)), value.squeeze(-1)


class Rollouts:
    """Collects rounds ``[T, N]`` in lock step."""

    def __init__(
        self, envs: Any, agent: Agent, steps: int, num_envs: int, device: torch.device
    ) -> None:
        self.envs, self.agent, self.steps, self.device = envs, agent, steps, device
        self.observation = torch.from_numpy(envs.reset()[0]).to(device)
        shape = (steps, num_envs)
        self.observations = self.observation.new_zeros((*shape, *self.observation.shape[1:]))
        self.actions = torch.zeros(shape, dtype=torch.int64, device=device)
        self.log_probs, self.values, self.rewards, self.ends = torch.zeros(4, *shape, device=device)

    @torch.no_grad()
    def collect(self) -> None:
        for step in range(self.steps):
            dist, self.values[step] = self.agent(self.observation)
            self.observations[step] = self.observation
            self.actions[step] = dist.sample()
            self.log_probs[step] = dist.log_prob(self.actions[step])
            observation, reward, terminated, truncated, _ = self.envs.step(
                self.actions[step].cpu().numpy().astype(np.int32)
            )
            self.observation = torch.from_numpy(observation).to(self.device)
            self.rewards[step] = torch.from_numpy(reward)
            self.ends[step] = torch.from_numpy((terminated | truncated).astype(np.float32))

    @torch.no_grad()
    def advantages(self, gae_lambda: float) -> Tensor:
        advantages, last = torch.zeros_like(self.rewards), torch.zeros(self.rewards.shape[1])
        next_value = self.agent(self.observation)[1]
        for step in reversed(range(self.steps)):
            going_on = 1.0 - self.ends[step]
            delta = self.rewards[step] + GAMMA * next_value * going_on - self.values[step]
            advantages[step] = last = delta + GAMMA * gae_lambda * going_on * last
            next_value = self.values[step]
        return advantages


def loss_of(agent: Agent, batch: tuple[Tensor, ...], ppo: bool) -> Tensor:
    observations, actions, log_probs, advantages, returns = batch
    dist, values = agent(observations)
    new_log_probs = dist.log_prob(actions)
    if ppo:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = (new_log_probs - log_probs).exp()
        policy = -torch.min(advantages * ratio, advantages * ratio.clamp(0.9, 1.1)).mean()
    else:
        policy = -(advantages * new_log_probs).mean()
    value = 0.5 * (values - returns).square().mean()
    return policy + 0.5 * value - 0.01 * dist.entropy().mean()


def shuffled(count: int, device: torch.device) -> tuple[Tensor, ...]:
    return torch.randperm(count, device=device).chunk(4)


def main(run: dict[str, Any]) -> None:
    keep_freed_memory()
    torch.set_num_threads(run["main_threads"])
    ppo, num_envs, steps = run["algorithm"] == "ppo", run["num_envs"], run["steps"]
    pixels = run["game"] != "cartpole"
    name = f"{run['game'].title().replace('_', '')}-v5" if pixels else "CartPole-v1"
    atari = {"episodic_life": True, "reward_clip": True} if pixels else {}
    envs = envpool.make(
        name, env_type="gymnasium", num_envs=num_envs, num_threads=run["emulator_threads"], seed=1,
        **atari,
    )  # fmt: skip
    layout = torch.channels_last if run["channels_last"] and pixels else torch.contiguous_format
    device = torch.device(run["device"])
    agent = Agent(envs.observation_space.shape, envs.action_space.n, layout).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.RMSprop(agent.parameters(), 7e-4, eps=1e-5)
    if ppo:
        optimizer = torch.optim.Adam(agent.parameters(), 2.5e-4, eps=1e-5)
    rollouts = Rollouts(envs, agent, steps, num_envs, device)
    watch = Stopwatch(num_envs * steps, run["seconds"])
    while True:
        rollouts.collect()
        advantages = rollouts.advantages(0.95 if ppo else 1.0)
        columns = (
            rollouts.observations, rollouts.actions, rollouts.log_probs, advantages,
            advantages + rollouts.values,
        )  # fmt: skip
        batch = tuple(column.flatten(0, 1) for column in columns)
        for _ in range(4 if ppo else 1):
            for rows in shuffled(num_envs * steps, device) if ppo else [slice(None)]:
                optimizer.zero_grad()
                loss_of(agent, tuple(column[rows] for column in batch), ppo).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        if watch.round_ended():
            break
    print(watch.steps_per_s, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[2]))
