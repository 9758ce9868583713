"""The same bits from every crew: trains each task with many crews and compares SHA-256 digests.

Run: python benchmarks/determinism.py [--quick] [--updates 20]

Tasks: CartPole and Pendulum (MLP), Pong and football's 3 against 1 (Nature CNN), each with A2C, PPO
in both delayed forms. Where gfootball is installed: the same football on its engine, and with three
players.
Crews: the serial twin; 1, 2, 4 actors; 1, 2, 4 environments an executor; random delays in executors
and actors; forkserver and spawn. A digest covers every collected batch, the weights and the
optimiser's state. The exit status is 1 if a crew differs, or if another seed does not.
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
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from hts_torchrl import (
    A2C,
    PPO,
    AtariEnvs,
    FootballEnvs,
    GymEnvs,
    HTSDataModule,
    make_actor_critic,
)
from hts_torchrl.envs.group import EnvFactory, EnvGroup
from hts_torchrl.learner import Learner

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
class Crew:
    num_actors: int = 1
    envs_per_executor: int = 1
    start_method: str = "forkserver"
    jitter: bool = False

    def __str__(self) -> str:
        if self.num_actors == 0:
            return "serial twin"
        delays = ", random delays" if self.jitter else ""
        return f"{self.num_actors} x {self.envs_per_executor}, {self.start_method}{delays}"


CREWS = (
    Crew(0), Crew(), Crew(2), Crew(4), Crew(1, 2), Crew(2, 4),
    Crew(2, jitter=True), Crew(4, 2, jitter=True), Crew(start_method="spawn"),
)  # fmt: skip
QUICK_CREWS = (Crew(0), Crew(), Crew(2, 2, jitter=True))
ENVS = {
    "CartPole": (GymEnvs("CartPole-v1"), "mlp"),
    "Pendulum": (GymEnvs("Pendulum-v1"), "mlp"),
    "Pong": (AtariEnvs("pong"), "nature"),
    "Football": (FootballEnvs("3_vs_1_with_keeper"), "nature"),
}
if importlib.util.find_spec("gfootball_engine"):  # scripts/install_gfootball.sh
    ENVS["gfootball"] = (FootballEnvs("3_vs_1_with_keeper", engine="gfootball"), "nature")
    team = FootballEnvs("3_vs_1_with_keeper", engine="gfootball", num_players=3)
    ENVS["3 players"] = (team, "nature")
ALGORITHMS: dict[str, tuple[type[Learner], dict[str, Any]]] = {
    "A2C": (A2C, {}),
    "PPO ratio": (PPO, {"epochs": 2, "minibatches": 2}),
    "PPO displacement": (PPO, {"epochs": 2, "minibatches": 2, "delayed_step": "displacement"}),
}


@dataclass
class Digest(Callback):
    """SHA-256 over every round, and in the end over weights and optimiser state."""

    sha: Any = field(default_factory=hashlib.sha256)
    updates: int = 0

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


def train(env: str, algorithm: str, crew: Crew, *, updates: int, seed: int = 1) -> str:
    """Train with a crew and return the digest of all that came of it."""
    envs, network = ENVS[env]
    steps = 5 if algorithm == "A2C" else 16
    seed_everything(seed, verbose=False)
    policy = make_actor_critic(network, envs.group([0]).spec)
    if crew.jitter:
        policy.module[0].module.register_forward_pre_hook(late)
    learner_class, settings = ALGORITHMS[algorithm]
    data = HTSDataModule(
        JitterEnvs(envs) if crew.jitter else envs,
        num_envs=NUM_ENVS,
        num_actors=crew.num_actors,
        envs_per_executor=crew.envs_per_executor,
        start_method=crew.start_method,
        frames_per_batch=NUM_ENVS * steps,
        total_frames=NUM_ENVS * steps * updates,
        seed=seed,
    )
    digest = Digest()
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", gradient_clip_val=0.5, callbacks=[digest], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(learner_class(policy, **settings), data)
    assert digest.updates == updates
    return digest.sha.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three crews instead of nine")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--tasks", nargs="+", choices=ENVS, default=list(ENVS))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    failures = 0
    for env in arguments.tasks:
        for algorithm in ALGORITHMS:
            digests = {}
            for crew in QUICK_CREWS if arguments.quick else CREWS:
                digest = train(env, algorithm, crew, updates=arguments.updates)
                digests[crew] = digest
                same = digest == digests[Crew(0)]
                failures += not same
                verdict = "PASS" if same else "FAIL"
                print(f"{env:9} {algorithm:17} {crew!s:35} {digest[:16]} {verdict}", flush=True)
            other = train(env, algorithm, Crew(0), updates=arguments.updates, seed=2)
            differs = other != digests[Crew(0)]
            failures += not differs
            verdict = "PASS (differs)" if differs else "FAIL (is the same)"
            print(f"{env:9} {algorithm:17} {'another seed':35} {other[:16]} {verdict}", flush=True)
    print("all the same" if not failures else f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
