"""The same bits from every pool: trains each task with many pools and compares SHA-256 digests.

Run: python benchmarks/determinism.py [--quick] [--updates 20]

Tasks: CartPole and Pendulum (MLP), Pong and football's 3 against 1 (Nature CNN), each with A2C, PPO
in both delayed forms. Pendulum again with squashed actions, CartPole with a Dropout layer and in
bf16-mixed. Where gfootball is installed: the same football on its engine, and with three players.
pools: the serial twin; 1, 2, 4 actors; 1, 2, 4 environments an executor; random delays in executors
and actors; forkserver and spawn. One more run is resumed from a checkpoint at half its length, with
other states of the process's generators. A digest covers every collected batch, the weights and the
optimiser's state. The exit status is 1 if a pool or the resumed run differs, or another seed does
not.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import logging
import random
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import nn

from hts_torchrl import (
    A2C,
    PPO,
    ActorCritic,
    AtariEnvs,
    FootballEnvs,
    GymEnvs,
    HTSDataModule,
    env_spec_of,
    make_actor_critic,
)
from hts_torchrl.config import Precision
from hts_torchrl.envs.group import EnvFactory, EnvGroup
from hts_torchrl.learner import Learner
from hts_torchrl.models.mlp import MLP

NUM_ENVS = 8


class JitterEnvs(EnvFactory):
    """Environments that take up to 3 ms longer, at random."""

    def __init__(self, envs: EnvFactory) -> None:
        self.envs = envs

    def group(self, indices: Sequence[int], *, render: bool = False) -> EnvGroup:
        group = self.envs.group(indices, render=render)
        step, dice = group.step, random.Random()

        def late_step(actions):
            time.sleep(dice.random() * 3e-3)
            return step(actions)

        group.step = late_step
        return group


def late(*_: object) -> None:
    """Take up to 3 ms longer: a forward hook for actors."""
    time.sleep(random.SystemRandom().random() * 3e-3)


@dataclass(frozen=True)
class WorkerPool:
    num_actors: int = 1
    envs_per_executor: int = 1
    start_method: str = "forkserver"
    jitter: bool = False

    def __str__(self) -> str:
        if self.num_actors == 0:
            return "serial twin"
        delays = ", random delays" if self.jitter else ""
        return f"{self.num_actors} x {self.envs_per_executor}, {self.start_method}{delays}"


POOLS = (
    WorkerPool(0), WorkerPool(), WorkerPool(2), WorkerPool(4), WorkerPool(1, 2), WorkerPool(2, 4),
    WorkerPool(2, jitter=True), WorkerPool(4, 2, jitter=True), WorkerPool(start_method="spawn"),
)  # fmt: skip
QUICK_POOLS = (WorkerPool(0), WorkerPool(), WorkerPool(2, 2, jitter=True))


class DropoutMLP(MLP):
    """The built-in network, and a Dropout of its features."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self.dropout = nn.Dropout(0.1)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.dropout(super().forward(observation))


@dataclass(frozen=True)
class Task:
    envs: EnvFactory
    network: str
    squash: bool = False
    dropout: bool = False
    precision: Precision = "32-true"

    def policy(self) -> nn.Module:
        spec = env_spec_of(self.envs)
        if not self.dropout:
            return make_actor_critic(self.network, spec, squash=self.squash)
        shape = spec.observations["observation"].shape
        return ActorCritic(DropoutMLP(shape), spec, critic_trunk=DropoutMLP(shape))


TASKS = {
    "CartPole": Task(GymEnvs("CartPole-v1"), "mlp"),
    "Pendulum": Task(GymEnvs("Pendulum-v1"), "mlp"),
    "squashed": Task(GymEnvs("Pendulum-v1"), "mlp", squash=True),
    "Dropout": Task(GymEnvs("CartPole-v1"), "mlp", dropout=True),
    "bfloat16": Task(GymEnvs("CartPole-v1"), "mlp", precision="bf16-mixed"),
    "Pong": Task(AtariEnvs("pong"), "nature"),
    "Football": Task(FootballEnvs("3_vs_1_with_keeper"), "nature"),
}
if importlib.util.find_spec("gfootball_engine"):  # scripts/install_gfootball.sh
    TASKS["gfootball"] = Task(FootballEnvs("3_vs_1_with_keeper", engine="gfootball"), "nature")
    team = FootballEnvs("3_vs_1_with_keeper", engine="gfootball", num_players=3)
    TASKS["3 players"] = Task(team, "nature")
ALGORITHMS: dict[str, tuple[type[Learner], dict[str, Any]]] = {
    "A2C": (A2C, {}),
    "PPO ratio": (PPO, {"epochs": 2, "minibatches": 2}),
    "PPO displacement": (PPO, {"epochs": 2, "minibatches": 2, "delayed_step": "displacement"}),
}


class Digest(Callback):
    """SHA-256 over every round, and in the end over weights and optimiser state.

    Args:
        sha: of the rounds before the first.
    """

    def __init__(self, sha: Any = None) -> None:
        self.sha = sha or hashlib.sha256()
        self.updates = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch.is_first:
            leaves = dict(batch.round.items(include_nested=True, leaves_only=True))
            for key in sorted(leaves, key=str):
                self.add(str(key), leaves[key])

    def on_train_end(self, trainer, pl_module):
        self.updates = pl_module.updates
        for name, tensor in pl_module.state_dict().items():
            self.add(name, tensor)
        for index, state in trainer.optimizers[0].state_dict()["state"].items():
            for name, value in state.items():
                self.add(f"{index}.{name}", torch.as_tensor(value))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.sha.update(name.encode())
        self.sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())


class Saving(Callback):
    """Saves a checkpoint after an update, and the digest of the rounds until then."""

    def __init__(self, path: Path, update: int, digest: Digest) -> None:
        self.path, self.update, self.digest = path, update, digest

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch.is_last and pl_module.updates == self.update:
            trainer.save_checkpoint(self.path)
            self.sha = self.digest.sha.copy()


def train(env: str, algorithm: str, pool: WorkerPool, *, updates: int, seed: int = 1) -> str:
    """Train with a worker pool and return the digest of all that came of it."""
    digest = Digest()
    fit(TASKS[env], algorithm, pool, [digest], updates=updates, seed=seed)
    assert digest.updates == updates
    return digest.sha.hexdigest()


def train_and_resume(env: str, algorithm: str, *, updates: int, seed: int = 1) -> str:
    """Do the same with the serial twin, resumed from a checkpoint at half its length."""
    with TemporaryDirectory() as folder:
        before = Digest()
        saving = Saving(Path(folder, "half.ckpt"), updates // 2, before)
        settings = {"updates": updates, "seed": seed}
        fit(TASKS[env], algorithm, WorkerPool(0), [before, saving], **settings)
        after = Digest(saving.sha)
        fit(TASKS[env], algorithm, WorkerPool(0), [after], path=saving.path, **settings)
    assert after.updates == updates
    return after.sha.hexdigest()


def fit(
    task: Task,
    algorithm: str,
    pool: WorkerPool,
    callbacks: list[Callback],
    *,
    updates: int,
    seed: int,
    path: Path | None = None,
) -> None:
    steps = 5 if algorithm == "A2C" else 16
    # A process that resumes has other states of all generators than the one that was stopped.
    seed_everything(seed if path is None else seed + 1000, verbose=False)
    policy = task.policy()
    if pool.jitter:
        policy.module[0].module.register_forward_pre_hook(late)
    learner_class, settings = ALGORITHMS[algorithm]
    data = HTSDataModule(
        JitterEnvs(task.envs) if pool.jitter else task.envs,
        num_envs=NUM_ENVS,
        num_actors=pool.num_actors,
        envs_per_executor=pool.envs_per_executor,
        start_method=pool.start_method,
        frames_per_batch=NUM_ENVS * steps,
        total_frames=NUM_ENVS * steps * updates,
        seed=seed,
    )
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", gradient_clip_val=0.5, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0, precision=task.precision,
    )  # fmt: skip
    trainer.fit(learner_class(policy, **settings), data, ckpt_path=path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three worker pools instead of nine")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    failures = 0
    for env in arguments.tasks:
        for algorithm in ALGORITHMS:
            digests = {}
            for pool in QUICK_POOLS if arguments.quick else POOLS:
                digest = train(env, algorithm, pool, updates=arguments.updates)
                digests[pool] = digest
                same = digest == digests[WorkerPool(0)]
                failures += not same
                verdict = "PASS" if same else "FAIL"
                print(f"{env:9} {algorithm:17} {pool!s:35} {digest[:16]} {verdict}", flush=True)
            resumed = train_and_resume(env, algorithm, updates=arguments.updates)
            same = resumed == digests[WorkerPool(0)]
            failures += not same
            verdict = "PASS" if same else "FAIL"
            print(f"{env:9} {algorithm:17} {'resumed':35} {resumed[:16]} {verdict}", flush=True)
            other = train(env, algorithm, WorkerPool(0), updates=arguments.updates, seed=2)
            differs = other != digests[WorkerPool(0)]
            failures += not differs
            verdict = "PASS (differs)" if differs else "FAIL (is the same)"
            print(f"{env:9} {algorithm:17} {'another seed':35} {other[:16]} {verdict}", flush=True)
    print("all the same" if not failures else f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
