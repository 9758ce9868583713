"""PPO's settings of a config, for the programs of other systems in ``time_to_score.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hts_torchrl import PPO
from hts_torchrl.cli.config_files import expand_configs

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
FIXED = {"gamma": 0.99, "entropy_coef": 0.01, "max_grad_norm": 0.5}
"""What the program of EnvPool has at these values, and at no others."""
EPSILON = 1e-5
"""Of Adam, in all programs."""


def merged(task: str) -> dict[str, Any]:
    """Return a config with those that it builds on."""
    paths = expand_configs(["fit", f"--config={CONFIGS / task}.yaml"])[2:-1:2]
    config = OmegaConf.merge(*map(OmegaConf.load, paths))
    found: Any = OmegaConf.to_container(config, resolve=True)
    return found


def recipe_of(task: str, method: str) -> dict[str, Any]:
    """Return how a config plays Atari, football, Box2D or MuJoCo with PPO, in plain numbers.

    Raises:
        ValueError: if the config has a setting that the other system's program does not.
    """
    config = merged(task)
    data, model = config["data"], config["model"]
    numbers = task.startswith(("box2d/", "mujoco/")) and method == "stable_baselines3"
    pictures = data["env"]["class_path"] in ("AtariEnvs", "FootballEnvs")
    if not (numbers or pictures) or model["class_path"] != "PPO":
        raise ValueError(f"{task} is not PPO on Atari, football, Box2D or MuJoCo")
    settings = model["init_args"]
    learner = PPO(**settings)
    others = {name: getattr(learner, name) for name in ("gamma", "entropy_coef")}
    others["max_grad_norm"] = config["trainer"]["gradient_clip_val"]
    network, normalized = settings.get("network"), bool(data.get("normalize_observation"))
    if method == "cleanrl_envpool":
        known, others = network in ("nature", "nips") and others == FIXED, {}
    elif numbers:  # its wrapper normalises rewards as well
        known = network == "mlp" and normalized == bool(data.get("normalize_reward"))
    else:
        known = {"nature": False, "nips": True}.get(network) == normalized
    if not known or learner.epsilon != EPSILON:
        raise ValueError(f"{task} has settings that the program of {method} does not")
    return others | {
        "total_steps": data["total_frames"],
        "num_envs": data["num_envs"],
        "steps": data["frames_per_batch"] // data["num_envs"],
        "epochs": learner.epochs,
        "minibatches": learner.minibatches,
        "gae_lambda": learner.gae_lambda,
        "learning_rate": learner.learning_rate,
        "falls": learner.learning_rate_decay,
        "clip": learner.clip,
        "clip_value": learner.clip_value,
        "value_coef": learner.value_coef,
        "network": network,
        "normalize": normalized,
    }
