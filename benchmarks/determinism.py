"""The same bits from every pool: trains each task with many pools and compares SHA-256 digests.

Run: python benchmarks/determinism.py [--quick] [--ray] [--ranks] [--updates 20]

Tasks: CartPole and Pendulum (MLP), Pong and football's 3 against 1 (Nature CNN), each with A2C, PPO
in both delayed forms, and PQN where an action is one choice. Pendulum again with squashed actions,
CartPole with a Dropout layer and in bf16-mixed. What users bring: an LSTM, normalised observations,
rewards and values, a Dict with a picture, nested actions, masks, and two agents. DQN and TD3,
off-policy, in a TorchRL loop. Where gfootball is installed: the same football on its engine, and
with three players.
pools: the serial twin; 1, 2, 4 actors; 1, 2, 4 environments an executor; random delays in executors
and actors; forkserver and spawn; an executor that is killed in the middle of the run and replaced;
with --ray, 2 and 4 rollout nodes, and one that is killed with its node and replaced.
One more run is resumed from a checkpoint at half its length, with other states of the process's
generators. A digest covers every collected batch, the weights and the optimiser's state.
--ranks compares 1, 2 and 4 ranks instead, with 4 gradient chunks, by weights and optimiser's state.
The exit status is 1 if a pool, a rank or the resumed run differs, or another seed does not.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import logging
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from torch import nn

# Also where this is a script, and the folder above is not where modules are looked for.
sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import off_policy, own_envs
from tests.fakes import DictEnv, MaskedEnvs
from tests.fits import quiet_trainer
from tests.policies import policy_with
from tests.ranks import run_ranks

from hts_torchrl import (
    A2C,
    PPO,
    PQN,
    AtariEnvs,
    FootballEnvs,
    GymEnvs,
    HTSDataModule,
    PettingZooEnvs,
    env_spec_of,
    make_actor_critic,
    make_q_policy,
)
from hts_torchrl.config import Precision
from hts_torchrl.envs.group import EnvFactory, EnvGroup
from hts_torchrl.learner import Learner

NUM_ENVS = 8
CHUNKS = 4


class DisturbedEnvs(EnvFactory):
    """Environments before each of whose steps something else happens.

    Args:
        before: is given the index of an executor's first environment, and its steps so far.
    """

    def __init__(self, envs: EnvFactory, before: Callable[[int, int], None]) -> None:
        self.envs, self.before = envs, before

    def group(self, indices: Sequence[int], *, render: bool = False) -> EnvGroup:
        group = self.envs.group(indices, render=render)
        step, steps = group.step, itertools.count()

        def disturbed_step(actions):
            self.before(indices[0], next(steps))
            return step(actions)

        group.step = disturbed_step
        return group


def die_once(death: Path, at: int, env: int, step: int) -> None:
    """Kill the first executor before a step; a file tells its successor that it has happened."""
    if (env, step) == (0, at) and not death.exists():
        death.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def late(*_: object) -> None:
    """Take up to 3 ms longer: before a step, and a forward hook for actors."""
    time.sleep(random.SystemRandom().random() * 3e-3)


@dataclass(frozen=True)
class WorkerPool:
    num_actors: int = 1
    envs_per_executor: int = 1
    start_method: str = "forkserver"
    jitter: bool = False
    killed: bool = False
    nodes: int = 0
    """Rollout nodes on a Ray cluster of this machine; 0 is none."""
    ranks: int = 0
    """Ranks that share four gradient chunks; 0 is one rank without chunks."""

    def __str__(self) -> str:
        if self.ranks:
            return f"{self.ranks} ranks, {CHUNKS} chunks"
        if self.nodes:
            return f"Ray, {self.nodes} nodes{', killed' if self.killed else ''}"
        if self.num_actors == 0:
            return "serial twin"
        disturbed = ", random delays" if self.jitter else ", killed" if self.killed else ""
        return f"{self.num_actors} x {self.envs_per_executor}, {self.start_method}{disturbed}"

    def settings(self, agents: int = 1) -> dict[str, Any]:
        """Return a collector's settings of workers; agents of a game share an executor."""
        settings = {
            "num_actors": self.num_actors,
            "envs_per_executor": max(self.envs_per_executor, agents),
            "start_method": self.start_method,
            "recover": "replay",
        }
        if self.nodes:
            init = {"num_cpus": self.nodes, "object_store_memory": 10**8}
            options = {"ray_init_config": init}
            settings |= {"backend": "ray", "num_collectors": self.nodes, "backend_options": options}
        return settings

    @contextmanager
    def disturb(self, envs: EnvFactory, steps: int) -> Iterator[EnvFactory]:
        """Yield environments with the delays or the death of this pool.

        Args:
            envs: as they are.
            steps: of an environment in a run; a death comes after five eighths of them.
        """
        with TemporaryDirectory() as folder:
            if self.killed:
                death = Path(folder, "killed")
                yield DisturbedEnvs(envs, partial(die_once, death, 5 * steps // 8))
                assert death.exists()
            else:
                yield DisturbedEnvs(envs, late) if self.jitter else envs


POOLS = (
    WorkerPool(0), WorkerPool(), WorkerPool(2), WorkerPool(4), WorkerPool(1, 2), WorkerPool(2, 4),
    WorkerPool(2, jitter=True), WorkerPool(4, 2, jitter=True), WorkerPool(start_method="spawn"),
    WorkerPool(2, killed=True),
)  # fmt: skip
RAY_POOLS = (WorkerPool(0, nodes=2), WorkerPool(0, nodes=4), WorkerPool(0, nodes=2, killed=True))
RANKS = (WorkerPool(0, ranks=1), WorkerPool(0, ranks=2), WorkerPool(0, ranks=4))
QUICK_POOLS = (WorkerPool(0), WorkerPool(), WorkerPool(2, 2, jitter=True), WorkerPool(killed=True))


@dataclass(frozen=True)
class Task:
    envs: EnvFactory
    network: str
    squash: bool = False
    dropout: bool = False
    precision: Precision = "32-true"
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    agents: int = 1
    """Of a game, whose environments are in one executor."""

    def algorithms(self) -> list[str]:
        """PQN needs one choice, and normalises layers that it knows."""
        one_choice = env_spec_of(self.envs).action.kind == "discrete"
        return [name for name in ALGORITHMS if name != "PQN" or (one_choice and not self.dropout)]

    def policy(self, learner: type[Learner]) -> nn.Module:
        spec = env_spec_of(self.envs)
        if issubclass(learner, PQN):
            return make_q_policy(self.network, spec)
        if self.dropout:
            return policy_with(nn.Dropout(), self.envs)
        return make_actor_critic(self.network, spec, squash=self.squash)


STATISTICS = {"normalize_observation": True, "normalize_reward": True}
TASKS = {
    "CartPole": Task(GymEnvs("CartPole-v1"), "mlp"),
    "Pendulum": Task(GymEnvs("Pendulum-v1"), "mlp"),
    "squashed": Task(GymEnvs("Pendulum-v1"), "mlp", squash=True),
    "Dropout": Task(GymEnvs("CartPole-v1"), "mlp", dropout=True),
    "bfloat16": Task(GymEnvs("CartPole-v1"), "mlp", precision="bf16-mixed"),
    "threads": Task(GymEnvs("CartPole-v1"), "mlp", model={"gradient_chunks": 2, "num_threads": 2}),
    "LSTM": Task(own_envs.OwnEnvs(own_envs.HiddenVelocities), "lstm"),
    "normalised": Task(
        GymEnvs("Pendulum-v1"), "mlp", data=STATISTICS, model={"normalize_value": True}
    ),
    "Dict": Task(own_envs.OwnEnvs(DictEnv), "impala"),
    "nested": Task(own_envs.OwnEnvs(own_envs.TorqueAndGear), "mlp"),
    "masked": Task(own_envs.OwnEnvs(MaskedEnvs()), "mlp"),
    "2 agents": Task(PettingZooEnvs("tests.fakes:Duel"), "mlp", agents=2),
    "Pong": Task(AtariEnvs("pong"), "nature"),
    "Football": Task(FootballEnvs("3_vs_1_with_keeper"), "nature"),
}
if importlib.util.find_spec("gfootball_engine"):  # scripts/install_gfootball.sh
    TASKS["gfootball"] = Task(FootballEnvs("3_vs_1_with_keeper", engine="gfootball"), "nature")
    team = FootballEnvs("3_vs_1_with_keeper", engine="gfootball", num_players=3)
    TASKS["3 players"] = Task(team, "nature")
ALGORITHMS: dict[str, tuple[type[Learner], dict[str, Any]]] = {
    "A2C": (A2C, {}),
    "A2C gradient": (A2C, {"delayed_step": "gradient"}),
    "PPO ratio": (PPO, {"epochs": 2, "minibatches": 2, "delayed_step": "ratio"}),
    "PPO displacement": (PPO, {"epochs": 2, "minibatches": 2, "delayed_step": "displacement"}),
    "PPO decoupled": (PPO, {"epochs": 2, "minibatches": 2, "delayed_step": "decoupled"}),
    "PQN": (PQN, {"epochs": 2, "minibatches": 2, "exploration_fraction": 1.0}),
}
OFF_POLICY = "off-policy"


class Digest(Callback):
    """SHA-256 over every round, and in the end over weights and optimiser state.

    Args:
        sha: of the rounds before the first.
        rounds: whether rounds count; those of a rank have its environments alone.
    """

    def __init__(self, sha: Any = None, *, rounds: bool = True) -> None:
        self.sha = sha or hashlib.sha256()
        self.rounds = rounds
        self.updates = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.rounds and batch.is_first:
            off_policy.add(self.sha, dict(batch.round.items(True, True)))

    def on_train_end(self, trainer, pl_module):
        self.updates = pl_module.updates
        for name, tensor in pl_module.state_dict().items():
            off_policy.add(self.sha, {name: tensor})
        for index, state in trainer.optimizers[0].state_dict()["state"].items():
            for name, value in state.items():
                off_policy.add(self.sha, {f"{index}.{name}": torch.as_tensor(value)})


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


def train_on_ranks(env: str, algorithm: str, pool: WorkerPool, *, updates: int) -> str:
    """Do the same in so many processes; the digest is of weights and optimiser's state alone."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "digest")
        run_ranks(pool.ranks, _train_on_rank, env, algorithm, pool, updates, path, limit_s=3600)
        return path.read_text()


def _train_on_rank(env: str, algorithm: str, pool: WorkerPool, updates: int, path: Path) -> None:
    quiet()
    digest = Digest(rounds=False)
    fit(TASKS[env], algorithm, pool, [digest], updates=updates, seed=1)
    if os.environ["RANK"] == "0":
        path.write_text(digest.sha.hexdigest())


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
    steps = 5 if algorithm.startswith("A2C") else 16
    # A process that resumes has other states of all generators than the one that was stopped.
    seed_everything(seed if path is None else seed + 1000, verbose=False)
    learner_class, settings = ALGORITHMS[algorithm]
    policy = task.policy(learner_class)
    if pool.jitter:
        policy.module[0].module.register_forward_pre_hook(late)
    model, of_trainer = dict(task.model), dict(task.trainer)
    if pool.ranks:
        model["gradient_chunks"] = CHUNKS
    if pool.ranks > 1:
        of_trainer |= {"devices": pool.ranks, "strategy": "ddp"}
    trainer = quiet_trainer(
        gradient_clip_val=0.5, callbacks=callbacks, precision=task.precision, **of_trainer
    )
    with pool.disturb(task.envs, steps * updates) as envs:
        data = HTSDataModule(
            envs,
            num_envs=NUM_ENVS,
            **pool.settings(task.agents),
            frames_per_batch=NUM_ENVS * steps,
            total_frames=NUM_ENVS * steps * updates,
            seed=seed,
            **task.data,
        )
        trainer.fit(learner_class(policy, **settings, **model), data, ckpt_path=path)


def compare(env: str, algorithm: str, pools: Sequence[WorkerPool], updates: int) -> int:
    """Print a row for each pool, the resumed run and another seed; returns how many fail."""
    if env in TASKS:
        run, resume = partial(train, env, algorithm), partial(train_and_resume, env, algorithm)
    else:
        run = partial(train_off_policy, env)
        resume = partial(train_off_policy, env, WorkerPool(0), resumed=True)
    rows = [(str(pool), run(pool, updates=updates), True) for pool in pools]
    rows.append(("resumed", resume(updates=updates), True))
    rows.append(("another seed", run(WorkerPool(0), updates=updates, seed=2), False))
    return report(env, algorithm, rows)


def compare_ranks(env: str, algorithm: str, updates: int) -> int:
    """Print a row for each number of ranks; returns how many fail."""
    run = partial(train_on_ranks, env, algorithm, updates=updates)
    return report(env, algorithm, [(str(pool), run(pool), True) for pool in RANKS])


def report(env: str, algorithm: str, rows: Sequence[tuple[str, str, bool]]) -> int:
    """Print rows of names, digests, and whether they should be the first; return the failures."""
    failures = 0
    for name, digest, wanted in rows:
        good = (digest == rows[0][1]) is wanted
        failures += not good
        verdict = "PASS" if good else "FAIL"
        print(f"{env:10} {algorithm:17} {name:35} {digest[:16]} {verdict}", flush=True)
    return failures


def train_off_policy(
    name: str, pool: WorkerPool, *, updates: int, seed: int = 1, resumed: bool = False
) -> str:
    """Do the same off-policy, in a TorchRL loop; random delays are those of environments."""
    with pool.disturb(off_policy.AGENTS[name].env, off_policy.STEPS * updates) as envs:
        run = {"updates": updates, "seed": seed, "resumed": resumed}
        return off_policy.digest(name, **run, create_env_fn=envs, **pool.settings())


def quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four worker pools instead of ten")
    parser.add_argument("--ray", action="store_true", help="rollout nodes on Ray, too")
    parser.add_argument("--ranks", action="store_true", help="1, 2 and 4 ranks, not pools")
    parser.add_argument("--updates", type=int, default=20)
    tasks = [*TASKS, *off_policy.AGENTS]
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks)
    known = [*ALGORITHMS, OFF_POLICY]
    parser.add_argument("--algorithms", nargs="+", choices=known, default=known)
    arguments = parser.parse_args()
    if arguments.updates < 2 and not arguments.ranks:
        parser.error("--updates: 2 or more, as a run is resumed at half its length")
    quiet()
    failures = 0
    pools = QUICK_POOLS if arguments.quick else POOLS
    if arguments.ray:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        pools += RAY_POOLS
    compared = [
        (env, algorithm)
        for env in arguments.tasks
        for algorithm in (TASKS[env].algorithms() if env in TASKS else [OFF_POLICY])
        if algorithm in arguments.algorithms and not (arguments.ranks and env not in TASKS)
    ]
    if not compared:
        parser.error("none of these tasks has one of these algorithms")
    for env, algorithm in compared:
        if arguments.ranks:
            failures += compare_ranks(env, algorithm, arguments.updates)
        else:
            failures += compare(env, algorithm, pools, arguments.updates)
    print("all the same" if not failures else f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
