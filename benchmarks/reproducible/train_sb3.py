"""Stable-Baselines3's PPO, for ``reproducibility.py``.

Workers: 1 is ``DummyVecEnv``, all environments in the learner's process; 4 is ``SubprocVecEnv``, a
process for each. Seeds: that of model and environments. Checkpoint: ``save``, ``load(env=...)``,
``learn(reset_num_timesteps=False)``.
"""

from __future__ import annotations

from typing import Any

import ale_py
import gymnasium
import peer_stable_baselines3 as peer
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from training import EPOCHS, FRAMES, MINIBATCHES, NUM_ENVS, STEPS, Training, tell


class Telling(BaseCallback):
    """Tells the weights when an update has ended: before the next rollout, and at the end."""

    def _on_rollout_start(self) -> None:
        if self.model.num_timesteps:
            tell(self.model.num_timesteps // FRAMES, self.model.policy.named_parameters())

    def _on_training_end(self) -> None:
        self._on_rollout_start()

    def _on_step(self) -> bool:
        return True


def main(training: Training) -> None:
    gymnasium.register_envs(ale_py)
    torch.set_num_threads(training.threads)
    torch.use_deterministic_algorithms(True)
    run = {"game": training.task, "envs": "dummy" if training.workers == 1 else "subproc"}
    envs = peer.environments(run, NUM_ENVS, training.seed)
    model: Any
    if training.resumed:
        model = PPO.load(training.checkpoint, env=envs, device="cpu")
    else:
        model = PPO(
            peer.policy_of(run), envs, seed=training.seed, n_steps=STEPS, n_epochs=EPOCHS,
            batch_size=FRAMES // MINIBATCHES, device="cpu",
        )  # fmt: skip
    frames = FRAMES * (training.ends - training.begins)
    model.learn(frames, callback=Telling(), reset_num_timesteps=not training.resumed)
    if training.is_stopped:
        model.save(training.checkpoint)
    envs.close()


if __name__ == "__main__":
    main(Training.asked_for())
