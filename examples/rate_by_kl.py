"""PPO on CartPole with a learning rate that follows the KL divergence of its updates.

Run: python examples/rate_by_kl.py [total_frames]
"""

import sys

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from hts_torchrl import PPO, ConfigurationError, GymEnvs, HTSDataModule, TrainingStatistics


class RateByKL(Callback):
    """Raises PPO's learning rate after small changes of the policy, and lowers it after large ones.

    After each round it takes the mean ``loss/approx_kl`` of the last epoch. Above twice the target
    the rate is divided by ``factor``, below half of it multiplied. This is the rule of
    ``KLAdaptiveLR`` in skrl and of ``lr_schedule: adaptive`` in rl_games, applied once a round. The
    rate is saved with the optimizer. A divergence of 0, as with one epoch of ``decoupled``,
    changes nothing.

    Args:
        target_kl: desired divergence.
        factor: by which the rate changes.
        smallest, largest: bounds of the rate.
    """

    def __init__(
        self,
        target_kl: float = 0.008,
        factor: float = 1.5,
        smallest: float = 1e-6,
        largest: float = 1e-2,
    ) -> None:
        self.target_kl, self.factor = target_kl, factor
        self.smallest, self.largest = smallest, largest

    def on_fit_start(self, trainer, pl_module):  # noqa: ARG002
        if trainer.lr_scheduler_configs:
            raise ConfigurationError("RateByKL beside a schedule: set learning_rate_decay=False")

    def on_train_batch_end(self, trainer, pl_module, outputs, part, index):  # noqa: ARG002
        if part.is_first:
            self.divergences = []
        if part.index >= part.count - pl_module.minibatches:  # the last epoch
            self.divergences.append(trainer.callback_metrics["loss/approx_kl"])
        if not part.is_last:
            return
        own = torch.stack(self.divergences).mean()
        kl = float(trainer.strategy.reduce(own, reduce_op="mean"))  # the same on all ranks
        for group in trainer.optimizers[0].param_groups:
            if kl > 2 * self.target_kl:
                group["lr"] = max(group["lr"] / self.factor, self.smallest)
            elif 0 < kl < self.target_kl / 2:
                group["lr"] = min(group["lr"] * self.factor, self.largest)


def main(total_frames: int = 102_400) -> float:
    seed_everything(1)
    envs = GymEnvs("CartPole-v1")
    data = HTSDataModule(envs, num_envs=8, frames_per_batch=512, total_frames=total_frames)
    learner = PPO(learning_rate=1e-3, gamma=0.98, gae_lambda=0.9, clip=0.2, clip_value=False)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        gradient_clip_val=0.5,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        callbacks=[RateByKL(), TrainingStatistics()],
    )
    trainer.fit(learner, data)
    print(f"learning rate {trainer.optimizers[0].param_groups[0]['lr']:.1e}")
    return trainer.callback_metrics["eval/score"].item()


if __name__ == "__main__":
    print(f"score {main(*map(int, sys.argv[1:])):.0f}")
