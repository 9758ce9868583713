"""The learner with Lightning's Trainer, without the command line: A2C on CartPole.

Run: python examples/lightning_loop.py [total_frames]
"""

import sys

from lightning.pytorch import Trainer, seed_everything

from hts_torchrl import A2C, GymEnvs, HTSDataModule, TrainingStatistics


def main(total_frames: int = 200_000) -> float:
    seed_everything(0)
    data = HTSDataModule(
        GymEnvs("CartPole-v1"), num_envs=16, frames_per_batch=16 * 16, total_frames=total_frames
    )
    learner = A2C(network="mlp", learning_rate=1e-3, learning_rate_decay=True)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        gradient_clip_val=0.5,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        callbacks=[TrainingStatistics()],
    )
    trainer.fit(learner, data)
    return trainer.callback_metrics["eval/score"].item()


if __name__ == "__main__":
    print(f"score {main(*map(int, sys.argv[1:])):.0f}")
