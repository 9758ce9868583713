"""Stable-Baselines3 on Atari, CartPole, MuJoCo, Box2D and football, for two other programs.

``throughput.py`` and ``time_to_score.py`` make its environment and call it. For a time to a score
it has the settings of RL Zoo, its authors' own collection (``hyperparams/ppo.yml`` of
DLR-RM/rl-baselines3-zoo). Or it has those of a config of this repository, as ``recipes.py`` tells
them. On football, where it plays this repository's games, it always has these.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import ale_py
import gymnasium
import numpy as np
import torch
from harness import Stopwatch, keep_freed_memory
from pixel_moments import PixelMoments
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecEnv,
    VecFrameStack,
    VecNormalize,
)
from torch import Tensor, nn
from training_scores import TrainingScores

from hts_torchrl.envs.football.envs import FootballEnvs

VECTORISATIONS = {"subproc": SubprocVecEnv, "dummy": DummyVecEnv}


def falling(start: float) -> Callable[[float], float]:
    """Return a setting that falls to 0 in a straight line."""
    return lambda remaining: start * remaining


WIDE = {
    "log_std_init": -2, "ortho_init": False, "activation_fn": nn.ReLU,
    "net_arch": {"pi": [256, 256], "vf": [256, 256]},
}  # fmt: skip
PUBLISHED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "atari": (10_000_000, 8, {
        "n_steps": 128, "n_epochs": 4, "batch_size": 256, "learning_rate": falling(2.5e-4),
        "clip_range": falling(0.1), "vf_coef": 0.5, "ent_coef": 0.01,
    }),
    "cartpole": (100_000, 8, {
        "n_steps": 32, "n_epochs": 20, "batch_size": 256, "learning_rate": falling(1e-3),
        "clip_range": falling(0.2), "gae_lambda": 0.8, "gamma": 0.98, "ent_coef": 0.0,
    }),
    "box2d/LunarLander-v3": (1_000_000, 16, {
        "n_steps": 1024, "n_epochs": 4, "batch_size": 64,
        "gae_lambda": 0.98, "gamma": 0.999, "ent_coef": 0.01,
    }),
    "mujoco/HalfCheetah-v5": (1_000_000, 1, {
        "n_steps": 512, "n_epochs": 20, "batch_size": 64, "learning_rate": 2.0633e-5,
        "clip_range": 0.1, "gae_lambda": 0.92, "gamma": 0.98, "ent_coef": 0.000401762,
        "max_grad_norm": 0.8, "vf_coef": 0.58096, "policy_kwargs": WIDE,
    }),
    "mujoco/Hopper-v5": (1_000_000, 1, {
        "n_steps": 512, "n_epochs": 5, "batch_size": 32, "learning_rate": 9.80828e-5,
        "clip_range": 0.2, "gae_lambda": 0.99, "gamma": 0.999, "ent_coef": 0.00229519,
        "max_grad_norm": 0.7, "vf_coef": 0.835671, "policy_kwargs": WIDE,
    }),
}  # fmt: skip
"""Steps of the run, environments, and what differs from the library's defaults.

Those of MuJoCo and LunarLander are published for earlier versions of these environments.
"""


def settings_of(recipe: dict[str, Any]) -> tuple[int, int, dict[str, Any]]:
    """Return a config's settings in the form of ``PUBLISHED``."""
    rate, clip = recipe["learning_rate"], recipe["clip"]
    return recipe["total_steps"], recipe["num_envs"], {
        "n_steps": recipe["steps"], "n_epochs": recipe["epochs"],
        "batch_size": recipe["num_envs"] * recipe["steps"] // recipe["minibatches"],
        "learning_rate": falling(rate) if recipe["falls"] else rate,
        "clip_range": clip, "clip_range_vf": clip if recipe["clip_value"] else None,
        "gae_lambda": recipe["gae_lambda"], "vf_coef": recipe["value_coef"],
        "gamma": recipe["gamma"], "ent_coef": recipe["entropy_coef"],
        "max_grad_norm": recipe["max_grad_norm"],
    }  # fmt: skip


class SmallTrunk(BaseFeaturesExtractor):
    """The smaller network of pixels, whose mean and deviation take the place of 0 and 255."""

    def __init__(self, space: gymnasium.spaces.Box) -> None:
        super().__init__(space, features_dim=256)
        self.mean, self.deviation = 0.0, 255.0
        self.moments = PixelMoments()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(),
            nn.Flatten(), nn.Linear(2592, 256), nn.ReLU(),
        )  # fmt: skip

    def forward(self, observations: Tensor) -> Tensor:
        found: Tensor = self.layers((observations - self.mean) / self.deviation)
        return found

    def round_ended(self, observation: np.ndarray) -> None:
        """Add the newest observations, ``uint8 [N, 4, 84, 84]``."""
        self.mean, self.deviation = self.moments.of(torch.from_numpy(observation))


SMALL = {"features_extractor_class": SmallTrunk, "normalize_images": False, "net_arch": []}


class Football(gymnasium.Env[Any, Any]):
    """One of this repository's games; ``score`` in the last step's info is the goals of a game."""

    def __init__(self, scenario: str) -> None:
        self._group = FootballEnvs(scenario).group([0])
        array, action = self._group.spec.observations["observation"], self._group.spec.action
        self.observation_space = gymnasium.spaces.Box(0, 255, array.shape, np.uint8)
        self.action_space = gymnasium.spaces.Discrete(action.sizes[0])
        self._following: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None or self._following is None:
            self._following = self._group.reset([seed or 0])["observation"][0]
        self._score = 0.0
        return self._following.copy(), {}

    def step(self, action: Any) -> Any:
        found = self._group.step(np.array([action]))
        self._score += float(found.score[0])
        self._following = found.next_observation["observation"][0]  # of the next game, at an end
        ends = bool(found.terminated[0]), bool(found.truncated[0])
        info = {"score": self._score} if any(ends) else {}
        return found.observation["observation"][0].copy(), float(found.reward[0]), *ends, info

    def close(self) -> None:
        self._group.close()


class Watch(BaseCallback):
    """Ends the training when enough was measured."""

    def __init__(self, round_ended: Callable[[], bool]) -> None:
        super().__init__()
        self.round_ended, self.enough = round_ended, False

    def _on_rollout_start(self) -> None:
        """Count a round where its update has ended: before the next rollout."""
        self.enough = self.round_ended()

    def _on_step(self) -> bool:
        return not self.enough


def environments(
    run: dict[str, Any], count: int, seed: int | None = None, gamma: float = 0.99
) -> VecEnv:
    how: dict[str, Any] = {"vec_env_cls": VECTORISATIONS[run["envs"]], "seed": seed}
    kind, _, name = run["game"].partition("/")
    if kind == "cartpole":
        return make_vec_env("CartPole-v1", count, **how)
    if kind == "football":
        watched = {"info_keywords": ("score",)}  # beside the sum of rewards
        return make_vec_env(lambda: Football(name), count, monitor_kwargs=watched, **how)
    if kind in ("mujoco", "box2d"):
        envs = make_vec_env(name, count, **how)
        normalizes = run["recipe"]["normalize"] if "recipe" in run else kind == "mujoco"
        return VecNormalize(envs, gamma=gamma) if normalizes else envs
    game = f"{run['game'].title().replace('_', '')}NoFrameskip-v4"
    return VecFrameStack(make_atari_env(game, count, **how), 4)


def sees_pixels(run: dict[str, Any]) -> bool:
    return not run["game"].startswith(("cartpole", "mujoco/", "box2d/"))


def policy_of(run: dict[str, Any]) -> str:
    return "CnnPolicy" if sees_pixels(run) else "MlpPolicy"


def set_layout(model: Any, run: dict[str, Any]) -> None:
    if run["channels_last"] and sees_pixels(run):
        model.policy.to(memory_format=torch.channels_last)


def measure_speed(run: dict[str, Any]) -> None:
    count = run["num_envs"]
    envs = environments(run, count)
    shared = {
        "n_steps": run["steps"], "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5,
        "device": run["device"],
    }  # fmt: skip
    if run["algorithm"] == "ppo":
        own = {"mujoco": (10, 32), "football": (2, 8)}
        epochs, minibatches = own.get(run["game"].partition("/")[0], (4, 4))
        size = count * run["steps"] // minibatches
        model: Any = PPO(policy_of(run), envs, n_epochs=epochs, batch_size=size, **shared)
    else:
        model = A2C(policy_of(run), envs, **shared)
    set_layout(model, run)
    watch = Stopwatch(count * run["steps"], run["seconds"])
    model.learn(10**9, callback=Watch(watch.round_ended))
    envs.close()
    print(watch.steps_per_s, flush=True)


def train(run: dict[str, Any], scores: TrainingScores) -> None:
    if "recipe" in run:
        total, count, settings = settings_of(run["recipe"])
    else:
        total, count, settings = PUBLISHED["atari" if sees_pixels(run) else run["game"]]
    if sees_pixels(run) and run.get("recipe", {}).get("normalize"):
        settings["policy_kwargs"] = SMALL
    envs = environments(run, count, run["seed"], settings.get("gamma", 0.99))
    model = PPO(policy_of(run), envs, seed=run["seed"], device=run["device"], **settings)
    set_layout(model, run)

    def round_ended() -> bool:
        if isinstance(trunk := model.policy.features_extractor, SmallTrunk):
            trunk.round_ended(model._last_obs)
        games = model.ep_info_buffer or ()  # the last 100, with raw returns
        # Football is rewarded for more than goals.
        name = "score" if run["game"].startswith("football/") else "r"
        return scores.add(model.num_timesteps, [game[name] for game in games])

    scores.begin()
    model.learn(total, callback=Watch(round_ended))
    round_ended()
    scores.end()
    envs.close()


def main(run: dict[str, Any]) -> None:
    keep_freed_memory()
    gymnasium.register_envs(ale_py)
    torch.set_num_threads(run["main_threads"])
    scores = TrainingScores.of(run)
    if scores is None:
        measure_speed(run)
    else:
        train(run, scores)


if __name__ == "__main__":
    main(json.loads(sys.argv[2]))
