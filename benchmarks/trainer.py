"""This project under Lightning's ``Trainer``: the contestant of ``throughput.py``.

Only public names are imported, so that an older checkout can take part (``source=PATH/src``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from harness import Stopwatch, keep_freed_memory
from lightning.pytorch import Callback, Trainer

from hts_torchrl import A2C, PPO, AtariEnvs, FootballEnvs, GymEnvs, HTSDataModule

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


class Watch(Callback):
    """Ends the Trainer's run when enough was measured."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def on_train_batch_end(self, trainer: Trainer, _: object, __: object, part, ___: int) -> None:
        if part.is_last:
            trainer.should_stop = self.watch.round_ended()


def environments(game: str, threads: int = 1) -> Any:
    kind, _, name = game.partition("/")
    if name:
        return FootballEnvs(name) if kind == "football" else GymEnvs(name)
    if game == "cartpole":
        return GymEnvs("CartPole-v1")
    several = {"num_threads": threads} if threads > 1 else {}  # an older checkout has no such field
    return AtariEnvs(game, **several)


def learner(run: dict[str, Any]) -> A2C | PPO:
    kind, _, task = run["game"].partition("/")
    threads = {"num_threads": run["main_threads"], "gradient_chunks": run["gradient_chunks"]}
    if task:  # what all tasks of football, or of MuJoCo, share
        settings = yaml.safe_load((CONFIGS / kind / "ppo.yaml").read_text())["model"]["init_args"]
        return PPO(**settings | threads)
    network = "mlp" if run["game"] == "cartpole" else "nature"
    settings = {"network": network, **threads}
    ppo = run["algorithm"] == "ppo"
    if ppo:
        return PPO(epochs=4, minibatches=4, **settings)
    # An older checkout has no such setting.
    return A2C(**settings, **({"cudagraph_loss": True} if run["cudagraph_loss"] else {}))


def train(run: dict[str, Any], *callbacks: Callback) -> None:
    """Train under the Trainer until a callback ends it."""
    frames = run["num_envs"] * run["steps"]
    waiting = {"delay": run["delay"], "step_barrier": run["step_barrier"]}
    # An older checkout has no such settings.
    acting: dict[str, Any] = {"policy_device": run["policy_device"]} if run["policy_device"] else {}
    acting |= {"cudagraph_policy": True} if run["cudagraph"] else {}
    acting |= {"compile_policy": True} if run["compiled"] else {}
    if run["game"].startswith("mujoco/"):
        acting |= {"normalize_observation": True, "normalize_reward": True}
    data = HTSDataModule(
        environments(run["game"], run["emulator_threads"]),
        frames_per_batch=frames, total_frames=frames * 10**9,
        num_envs=run["num_envs"], num_actors=run["actors"], **waiting,
        envs_per_executor=run["num_envs"] // run["workers"],
        inference_batch_size=run["inference_batch"], **acting,
    )  # fmt: skip
    trainer = Trainer(
        accelerator="gpu" if run["device"].startswith("cuda") else "cpu", devices=1, max_epochs=1,
        limit_val_batches=0,
        gradient_clip_val=0.64 if run["game"].startswith("football/") else 0.5,
        precision="bf16-mixed" if run["bf16"] else "32-true", callbacks=[*callbacks],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(learner(run), data)


if __name__ == "__main__":
    keep_freed_memory()
    settings = json.loads(sys.argv[2])
    stopwatch = Stopwatch(settings["num_envs"] * settings["steps"], settings["seconds"])
    train(settings, Watch(stopwatch))
    print(stopwatch.steps_per_s, flush=True)
