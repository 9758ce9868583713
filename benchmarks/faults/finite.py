"""NaN in a reward, an observation or a loss: no update is made with it."""

from __future__ import annotations

import itertools
import random
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.fits import quiet_trainer

from hts_torchrl import A2C, PPO, DurableCheckpointIO, HTSDataModule, NotFiniteError
from hts_torchrl.learner import Learner
from hts_torchrl.training.round_slice import RoundSlice

_ENVS, _STEPS, _ROUNDS = 4, 8, 6
_LEARNERS: dict[str, Callable[[], Learner]] = {
    "A2C": A2C,
    "PPO": partial(PPO, epochs=2, minibatches=2),
}


@dataclass(frozen=True)
class Pendulums:
    """Pendulums, of which one gives NaN for its reward or observation at one step."""

    what: str = ""
    env: int = -1
    step: int = -1

    def __call__(self, index: int) -> gymnasium.Env[Any, Any]:
        env = gymnasium.make("Pendulum-v1")
        return _Spoiled(env, self) if index == self.env else env


class _Spoiled(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any], how: Pendulums) -> None:
        super().__init__(env)
        self.how, self.steps = how, 0

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, *rest = self.env.step(action)
        if self.steps == self.how.step:
            if self.how.what == "reward":
                reward = np.nan
            else:
                observation = np.full_like(observation, np.nan)
        self.steps += 1
        return observation, reward, *rest


class Before(Callback):
    """Keeps the weights before each round."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: RoundSlice, batch_idx: int
    ) -> None:
        if batch.is_first:
            self.weights.append({k: v.clone() for k, v in pl_module.state_dict().items()})


def stopped(what: str, dice: random.Random) -> bool:
    """Spoil one value of one round; what is saved are the weights before that round."""
    algorithm, spoiled = dice.choice(list(_LEARNERS)), dice.randrange(1, _ROUNDS)
    learner, envs = _LEARNERS[algorithm](), Pendulums()
    if what == "loss":
        parts = 1 if algorithm == "A2C" else 4
        _spoil_loss(learner, spoiled * parts + dice.randrange(parts))
    else:
        step = spoiled * _STEPS + dice.randrange(_STEPS)
        envs = Pendulums(what, dice.randrange(_ENVS), step)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _train(learner, envs, Path(folder))
        except NotFiniteError:
            saved = DurableCheckpointIO().load_checkpoint(Path(folder, "last.ckpt"))
            before = _undisturbed(algorithm)[spoiled]
            return saved["updates"] == spoiled and all(
                torch.equal(saved["state_dict"][name], tensor) for name, tensor in before.items()
            )
        return False


def _spoil_loss(learner: Learner, call: int) -> None:
    original, calls = learner.loss, itertools.count()
    learner.loss = lambda *arguments: (  # type: ignore[method-assign]
        original(*arguments) * (torch.nan if next(calls) == call else 1.0)
    )


@cache
def _undisturbed(algorithm: str) -> list[dict[str, torch.Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        # The serial twin, which has the same bits.
        return _train(_LEARNERS[algorithm](), Pendulums(), Path(folder), num_actors=0)


def _train(
    learner: Learner, envs: Pendulums, folder: Path, *, num_actors: int = 1
) -> list[dict[str, torch.Tensor]]:
    """Train from fixed weights, saving when something is wrong; returns those of each round."""
    before = Before()
    last = ModelCheckpoint(folder, "last", save_on_exception=True, every_n_epochs=2)
    trainer = quiet_trainer(
        callbacks=[before, last], plugins=[DurableCheckpointIO()], enable_checkpointing=True
    )
    frames = _ENVS * _STEPS
    data = HTSDataModule(
        envs,
        frames_per_batch=frames,
        total_frames=frames * _ROUNDS,
        num_envs=_ENVS,
        num_actors=num_actors,
        envs_per_executor=2,
    )
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(learner, data)
    return before.weights


ROWS = {
    f"NaN in {what}: stopped before the update, the weights before it saved": (
        4,
        partial(stopped, what.split()[1]),
    )
    for what in ("a reward", "an observation", "a loss")
}
