"""Training that is stopped and goes on from its checkpoint."""

from __future__ import annotations

import random
import tempfile
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.fits import quiet_trainer
from tests.runs import digest

from hts_torchrl import (
    A2C,
    AtariEnvs,
    DurableCheckpointIO,
    EnvFactory,
    FootballEnvs,
    GymEnvs,
    HTSDataModule,
)

TASKS: dict[str, tuple[EnvFactory, str]] = {
    "CartPole": (GymEnvs("CartPole-v1"), "mlp"),
    "Pendulum": (GymEnvs("Pendulum-v1"), "mlp"),
    "Pong": (AtariEnvs("pong"), "nips"),
    "football": (FootballEnvs("3_vs_1_with_keeper"), "nips"),
}
POOLS: list[dict[str, int]] = [
    {"num_actors": 0},
    {"num_actors": 1, "envs_per_executor": 2},
    {"num_actors": 2, "envs_per_executor": 1},
]
LATEST_STOP, AFTER_IT, FRAMES = 20, 50, 40


class Bits(Callback):
    """What was collected for each update and what came of it; ends training after the last."""

    def __init__(self, updates: int) -> None:
        self.of_updates: list[tuple[str, str]] = []
        self._updates = updates

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, _: object, batch: Any, *__: object
    ) -> None:
        learned = sha256()
        for tensor in pl_module.policy.state_dict().values():
            learned.update(tensor.numpy().tobytes())
        for values in trainer.optimizers[0].state_dict()["state"].values():
            for name, value in sorted(values.items()):
                learned.update(name.encode() + torch.as_tensor(value).numpy().tobytes())
        self.of_updates.append((digest([batch.round]), learned.hexdigest()))
        trainer.should_stop = pl_module.updates == self._updates


def train(
    task: str, updates: int, pool: dict[str, int], *callbacks: Callback, ckpt_path: Any = None
) -> list[tuple[str, str]]:
    """Train from the start, or from a checkpoint, until so many updates have been made."""
    env, network = TASKS[task]
    torch.manual_seed(1)
    data = HTSDataModule(
        env, num_envs=4, frames_per_batch=FRAMES, seed=3, **pool,
        total_frames=FRAMES * (LATEST_STOP + AFTER_IT),
    )  # fmt: skip
    bits = Bits(updates)
    trainer = quiet_trainer(
        gradient_clip_val=0.5, callbacks=[bits, *callbacks], plugins=[DurableCheckpointIO()],
        enable_checkpointing=bool(callbacks),
    )  # fmt: skip
    trainer.fit(A2C(network=network, learning_rate_decay=True), data, ckpt_path=ckpt_path)
    return bits.of_updates


@cache
def whole(task: str) -> list[tuple[str, str]]:
    return train(task, LATEST_STOP + AFTER_IT, POOLS[0])


def resumed(task: str, dice: random.Random) -> bool:
    """Stop after 1 to 20 updates, and go on for 50 with another worker pool from the checkpoint."""
    stop = dice.randint(1, LATEST_STOP)
    with tempfile.TemporaryDirectory() as folder:
        saving = ModelCheckpoint(folder, "stopped", every_n_train_steps=stop)
        begin = train(task, stop, dice.choice(POOLS), saving)
        path = Path(folder, "stopped.ckpt")
        rest = train(task, stop + AFTER_IT, dice.choice(POOLS), ckpt_path=path)
    return len(rest) == AFTER_IT and begin + rest == whole(task)[: stop + AFTER_IT]


ROWS = {
    f"stop and resume, {task}: the same bits 50 updates later": (20, partial(resumed, task))
    for task in TASKS
}
