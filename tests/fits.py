"""Small, quiet runs of Lightning's Trainer, and callbacks that watch them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from hts_torchrl import A2C, PPO, GymEnvs, HTSDataModule
from hts_torchrl.learner import Learner

RESUMES = [
    # The callback that saved is not always there when a run is resumed.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
"""Marks of tests that go on from checkpoints."""


def saving(folder: Path, **when: Any) -> ModelCheckpoint:
    """Keeps all checkpoints of a run, by their steps."""
    return ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **when)


def checkpoints(folder: Path) -> list[Path]:
    """Those of :func:`saving`, in their order."""
    return sorted(folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))


def quiet_trainer(**settings: Any) -> Trainer:
    """A Trainer that writes nothing and evaluates nothing, unless asked to."""
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    return Trainer(**{**defaults, **settings})


def cartpole(rounds: int = 3, **settings: Any) -> HTSDataModule:
    """Rounds of 4 CartPoles, 8 steps each, in the test's own process."""
    defaults = {"num_envs": 4, "num_actors": 0, "frames_per_batch": 32}
    settings = {**defaults, **settings}
    env = settings.pop("env", GymEnvs("CartPole-v1"))
    settings.setdefault("total_frames", rounds * settings["frames_per_batch"])
    return HTSDataModule(env, **settings)


class SGDA2C(A2C):
    """A2C whose optimiser is ``weights -= learning_rate * gradient`` and nothing else."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.policy.parameters(), self.learning_rate)


class SGDPPO(PPO):
    """PPO with plain gradient descent."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.policy.parameters(), self.learning_rate)


class Comparing(A2C):
    """Compares log-probabilities with those that actors stored, at the weights that acted."""

    def __init__(self, policy: nn.Module | None = None, **settings: Any) -> None:
        super().__init__(policy, **settings)
        self.distances: list[float] = []

    def loss(self, batch):
        samples = self.samples_of(batch)
        policy, _ = self.evaluate(samples)
        distance = policy.log_prob(samples["action"]).detach() - samples["behaviour_log_prob"]
        self.distances.append(float(distance.abs().max()))
        return super().loss(batch)


class A2CWithTargets(A2C):
    """A2C that keeps advantages and returns of the last loss as ``targets``, ``[N, T]`` each."""

    def gae(self, *args, **settings):
        self.targets = super().gae(*args, **settings)
        return self.targets


def flat(policy: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in policy.parameters()]).clone()


def flat_gradient(policy: nn.Module) -> Tensor:
    """All gradients as one vector."""
    gradients = [p.grad for p in policy.parameters() if p.requires_grad]
    return torch.cat([gradient.flatten() for gradient in gradients]).clone()


class Watch(Callback):
    """Keeps what happened at each round and at each step of the optimiser."""

    def __init__(self) -> None:
        self.rounds: list[Any] = []
        self.versions: list[int] = []
        self.updates: list[int] = []
        self.round_weights: list[Tensor] = []
        self.step_weights: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.learning_rates: list[float] = []
        self.final_weights: Tensor | None = None

    def on_train_batch_start(self, trainer, pl_module: Learner, batch, batch_idx):  # noqa: ARG002
        if batch.is_first:
            self.rounds.append(batch.round.clone())
            self.versions.append(int(batch.round["collector", "policy_version"][0, 0]))
            self.updates.append(pl_module.updates)
            self.round_weights.append(flat(pl_module.policy))

    def on_before_optimizer_step(self, trainer, pl_module: Learner, optimizer):  # noqa: ARG002
        self.step_weights.append(flat(pl_module.policy))
        self.gradients.append(flat_gradient(pl_module.policy))
        self.learning_rates.append(optimizer.param_groups[0]["lr"])

    def on_fit_end(self, trainer, pl_module: Learner):  # noqa: ARG002
        self.final_weights = flat(pl_module.policy)


def watched_fit(
    learner: Learner, data: HTSDataModule, ckpt_path: Path | None = None, **settings: Any
) -> Watch:
    """Train to the end, and tell what happened."""
    watch = Watch()
    settings["callbacks"] = [*settings.get("callbacks", []), watch]
    quiet_trainer(**settings).fit(learner, datamodule=data, ckpt_path=ckpt_path)
    return watch
