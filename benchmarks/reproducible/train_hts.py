"""This project under Lightning's ``Trainer``, for ``reproducibility.py``.

Workers: executors, and as many actors; 0 is the serial twin.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from training import EPOCHS, FRAMES, MINIBATCHES, NUM_ENVS, Training, tell

from hts_torchrl import PPO, AtariEnvs, GymEnvs, HTSDataModule


class Telling(Callback):
    """Tells the weights after each update, and ends the run where it is to end."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def on_train_batch_end(
        self, trainer: Trainer, learner: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if not batch.is_last:
            return
        tell(learner.updates, [p for p in learner.named_parameters() if p[1].requires_grad])
        if learner.updates == self.training.ends:
            if self.training.is_stopped:
                trainer.save_checkpoint(self.training.checkpoint)
            trainer.should_stop = True


def main(training: Training) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.backends.mkldnn.enabled = training.mkldnn  # of this process: for the serial twin
    seed_everything(training.seed, verbose=False)
    pixels = training.task != "cartpole"
    data = HTSDataModule(
        AtariEnvs(training.task) if pixels else GymEnvs("CartPole-v1"),
        num_envs=NUM_ENVS,
        num_actors=training.workers,
        envs_per_executor=training.envs_per_worker,
        frames_per_batch=FRAMES,
        total_frames=FRAMES * training.updates,
        seed=training.seed,
    )
    learner = PPO(
        network="nature" if pixels else "mlp",
        epochs=EPOCHS,
        minibatches=MINIBATCHES,
        num_threads=training.threads,
    )
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", devices=1, gradient_clip_val=0.5, limit_val_batches=0,
        callbacks=[Telling(training)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(learner, data, ckpt_path=training.checkpoint if training.resumed else None)


if __name__ == "__main__":
    main(Training.asked_for())
