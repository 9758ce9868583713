"""A2C and PPO in one file on EnvPool's native Atari and CartPole, in the manner of CleanRL.

For ``throughput.py`` and ``time_to_score.py``, which make its environment and call it. The main
process acts on all environments at once, then learns. For a time to a score it has the settings
that CleanRL publishes: the defaults of its ``ppo_atari_envpool.py`` and, for CartPole, ``ppo.py``.
Or it has those of a config of this repository, as ``recipes.py`` tells them.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

import envpool
import numpy as np
import torch
from harness import Stopwatch, keep_freed_memory
from pixel_moments import PixelMoments
from torch import Tensor, nn
from training_scores import WINDOW, TrainingScores

GAMMA = 0.99


@dataclass(frozen=True)
class Settings:
    """How it learns; the defaults are A2C's."""

    num_envs: int
    steps: int
    ppo: bool = False
    epochs: int = 1
    minibatches: int = 1
    gae_lambda: float = 1.0
    learning_rate: float = 7e-4
    clip: float = 0.1
    clip_value: bool = False
    """Whether the loss of values is clipped as that of the policy is."""
    value_coef: float = 0.25
    """Weight of the mean squared error of values."""
    total_steps: int = 0
    falls: bool = True
    """Whether the learning rate falls in a straight line, to 0 at the last step."""
    network: str = "nature"
    """Or ``nips``, the smaller one; of pixels."""
    normalize: bool = False
    """Whether one mean and deviation of all pixels so far take the place of 0 and 255."""


PPO = {"ppo": True, "epochs": 4, "minibatches": 4, "gae_lambda": 0.95, "learning_rate": 2.5e-4}
PUBLISHED = {
    "atari": Settings(8, 128, **PPO, clip=0.1, clip_value=True, total_steps=10_000_000),
    "cartpole": Settings(4, 128, **PPO, clip=0.2, clip_value=True, total_steps=500_000),
}


def layer(module: Any, gain: float = 2**0.5) -> Any:
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def pixel_trunk(network: str) -> tuple[nn.Sequential, int]:
    """Return it and the number of its features."""
    convolutions, inputs, width = {
        "nature": ([(4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)], 3136, 512),
        "nips": ([(4, 16, 8, 4), (16, 32, 4, 2)], 2592, 256),
    }[network]
    layers = [m for sizes in convolutions for m in (layer(nn.Conv2d(*sizes)), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), layer(nn.Linear(inputs, width)), nn.ReLU()), width


def mlp(inputs: int) -> nn.Sequential:
    sizes = [(inputs, 64), (64, 64)]
    return nn.Sequential(*(m for size in sizes for m in (layer(nn.Linear(*size)), nn.Tanh())))


class Agent(nn.Module):
    """A network of pixels with two heads, or a multilayer perceptron for each of them."""

    def __init__(
        self, shape: tuple[int, ...], num_actions: int, memory_format: torch.memory_format,
        network: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.pixels, self.memory_format = len(shape) == 3, memory_format
        self.mean, self.deviation = 0.0, 255.0
        self.trunk, width = pixel_trunk(network) if self.pixels else (mlp(shape[0]), 64)
        self.critic_trunk = self.trunk if self.pixels else mlp(shape[0])
        self.actor = layer(nn.Linear(width, num_actions), 0.01)
        self.critic = layer(nn.Linear(width, 1), 1.0)
        self.to(memory_format=memory_format)

    def forward(self, observation: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        if self.pixels:
            if self.mean:
                observation = observation - self.mean
            observation = observation / self.deviation
            observation = observation.contiguous(memory_format=self.memory_format)
        hidden = self.trunk(observation)
        value = self.critic(hidden if self.pixels else self.critic_trunk(observation))
        return torch.distributions.Categorical(logits=self.actor(hidden)), value.squeeze(-1)


class Games:
    """Raw returns of whole games, the last 100: neither clipped nor of one life."""

    def __init__(self, num_envs: int) -> None:
        self.returns: deque[float] = deque(maxlen=WINDOW)
        self.running = np.zeros(num_envs)

    def add(self, reward: Any, terminated: Any, truncated: Any, info: dict[str, Any]) -> None:
        """Add a step; Atari tells the raw reward, and whether the game ended with that life."""
        self.running += info.get("reward", reward)
        ended = info.get("terminated", terminated).astype(bool) | truncated
        self.returns.extend(self.running[ended].tolist())
        self.running[ended] = 0.0


class Rollouts:
    """Collects rounds ``[T, N]`` in lock step."""

    def __init__(
        self, envs: Any, agent: Agent, steps: int, num_envs: int, device: torch.device,
        games: Games | None = None,
    ) -> None:  # fmt: skip
        self.envs, self.agent, self.steps, self.device = envs, agent, steps, device
        self.games = games
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
            observation, reward, terminated, truncated, info = self.envs.step(
                self.actions[step].cpu().numpy().astype(np.int32)
            )
            self.observation = torch.from_numpy(observation).to(self.device)
            self.rewards[step] = torch.from_numpy(reward)
            self.ends[step] = torch.from_numpy((terminated | truncated).astype(np.float32))
            if self.games is not None:
                self.games.add(reward, terminated, truncated, info)

    @torch.no_grad()
    def advantages(self, gae_lambda: float) -> Tensor:
        advantages, last = torch.zeros_like(self.rewards), torch.zeros_like(self.rewards[0])
        next_value = self.agent(self.observation)[1]
        for step in reversed(range(self.steps)):
            going_on = 1.0 - self.ends[step]
            delta = self.rewards[step] + GAMMA * next_value * going_on - self.values[step]
            advantages[step] = last = delta + GAMMA * gae_lambda * going_on * last
            next_value = self.values[step]
        return advantages


def loss_of(agent: Agent, batch: tuple[Tensor, ...], settings: Settings) -> Tensor:
    observations, actions, log_probs, advantages, returns = batch
    dist, values = agent(observations)
    new_log_probs = dist.log_prob(actions)
    errors = (values - returns).square()
    if settings.clip_value:
        old = returns - advantages
        near = old + (values - old).clamp(-settings.clip, settings.clip)
        errors = torch.max(errors, (near - returns).square())
    if settings.ppo:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = (new_log_probs - log_probs).exp()
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        policy = -torch.min(advantages * ratio, advantages * clipped).mean()
    else:
        policy = -(advantages * new_log_probs).mean()
    return policy + settings.value_coef * errors.mean() - 0.01 * dist.entropy().mean()


class Training:
    """A rollout and its update, as often as it is asked for."""

    def __init__(self, run: dict[str, Any], settings: Settings, *, scored: bool) -> None:
        self.settings = settings
        pixels = run["game"] != "cartpole"
        name = f"{run['game'].title().replace('_', '')}-v5" if pixels else "CartPole-v1"
        atari = {"episodic_life": True, "reward_clip": True} if pixels else {}
        envs = envpool.make(
            name, env_type="gymnasium", num_envs=settings.num_envs,
            num_threads=run["emulator_threads"], seed=run.get("seed", 1), **atari,
        )  # fmt: skip
        layout = torch.channels_last if run["channels_last"] and pixels else torch.contiguous_format
        self.device = torch.device(run["device"])
        self.agent = Agent(
            envs.observation_space.shape, envs.action_space.n, layout, settings.network
        )
        self.moments = PixelMoments() if settings.normalize else None
        self.agent.to(self.device)
        optimizer = torch.optim.Adam if settings.ppo else torch.optim.RMSprop
        self.optimizer: torch.optim.Optimizer = optimizer(
            self.agent.parameters(), settings.learning_rate, eps=1e-5
        )
        games = Games(settings.num_envs) if scored else None
        self.rollouts = Rollouts(
            envs, self.agent, settings.steps, settings.num_envs, self.device, games
        )

    def round(self) -> None:
        self.rollouts.collect()
        # Ours learns nothing from what was not normalised yet, either.
        if self.moments is None or self.moments.count:
            self._learn()
        if self.moments is not None:
            pixels = self.rollouts.observations[-1]
            self.agent.mean, self.agent.deviation = self.moments.of(pixels)

    def _learn(self) -> None:
        rollouts, settings = self.rollouts, self.settings
        advantages = rollouts.advantages(settings.gae_lambda)
        columns = (
            rollouts.observations, rollouts.actions, rollouts.log_probs, advantages,
            advantages + rollouts.values,
        )  # fmt: skip
        batch = tuple(column.flatten(0, 1) for column in columns)
        count = settings.num_envs * settings.steps
        for _ in range(settings.epochs):
            parts: tuple[Any, ...] = (slice(None),)
            if settings.ppo:
                parts = torch.randperm(count, device=self.device).chunk(settings.minibatches)
            for rows in parts:
                self.optimizer.zero_grad()
                loss_of(self.agent, tuple(column[rows] for column in batch), settings).backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
                self.optimizer.step()


def measure_speed(run: dict[str, Any]) -> None:
    ppo = PPO if run["algorithm"] == "ppo" else {}
    training = Training(run, Settings(run["num_envs"], run["steps"], **ppo), scored=False)
    watch = Stopwatch(run["num_envs"] * run["steps"], run["seconds"])
    while True:
        training.round()
        if watch.round_ended():
            break
    print(watch.steps_per_s, flush=True)


def train(run: dict[str, Any], scores: TrainingScores) -> None:
    torch.manual_seed(run["seed"])
    settings = PUBLISHED["cartpole" if run["game"] == "cartpole" else "atari"]
    if "recipe" in run:
        settings = Settings(**run["recipe"], ppo=True)
    training = Training(run, settings, scored=True)
    games, frames = training.rollouts.games, settings.num_envs * settings.steps
    assert games is not None
    rounds = settings.total_steps // frames
    scores.begin()
    for number in range(rounds):
        if settings.falls:
            rate = settings.learning_rate * (1 - number / rounds)
            training.optimizer.param_groups[0]["lr"] = rate
        training.round()
        if scores.add((number + 1) * frames, games.returns):
            break
    scores.end()


def main(run: dict[str, Any]) -> None:
    keep_freed_memory()
    torch.set_num_threads(run["main_threads"])
    scores = TrainingScores.of(run)
    if scores is None:
        measure_speed(run)
    else:
        train(run, scores)


if __name__ == "__main__":
    main(json.loads(sys.argv[2]))
