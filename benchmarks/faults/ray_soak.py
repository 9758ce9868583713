"""A long training on a Ray cluster whose nodes and machines are killed at random: the same bits.

Run: python benchmarks/faults/ray_soak.py [--minutes 60] [--every 60]

Four machines, all of them this one, hold four rollout nodes of one process and four environments
each: CartPole whose steps take 5 ms, so that most of the time is sleep. A2C trains for some minutes
from the first update. Every 60 s (exponentially distributed) a node is killed, or one time in four
a whole machine, in whose place an empty one is added after the update. Then the serial twin trains
as many updates, without Ray and without sleep. The exit status is 1 if a batch, a weight or the
optimiser's state differs, or if a process or a file is left. It needs the extras ``ray`` and
``test``.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, seed_everything

# Also where this is a script, and the folder above is not where modules are looked for.
sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.determinism import Digest, quiet
from benchmarks.timed_envs import timed_cartpole
from tests import ray_machines
from tests.fits import quiet_trainer

from hts_torchrl import A2C, HTSDataModule, env_spec_of, make_actor_critic

NODES, ENVS, STEPS = 4, 16, 32
MOST_ROUNDS = 1_000_000
STEP_S = 5e-3
MACHINES_LOST = 0.25


class Until(Callback):
    """Stops the training after an update for which a condition holds.

    Args:
        over: the condition, asked after each update with the number of updates.
    """

    def __init__(self, over: Callable[[int], bool]) -> None:
        self.over = over

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop |= batch.is_last and self.over(pl_module.updates)


class Killer(threading.Thread):
    """Kills rollout nodes and machines, until it is told to end.

    Args:
        cluster: with the machines.
        machines: those that hold nodes.
        every_s: mean time from a kill to the next.
        dice: decides when, and whom.
    """

    def __init__(self, cluster: Any, machines: list, every_s: float, dice: random.Random) -> None:
        super().__init__(daemon=True)
        self.cluster, self.machines, self.every_s, self.dice = cluster, machines, every_s, dice
        self.killed = {"nodes": 0, "machines": 0}
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(self.dice.expovariate(1 / self.every_s)):
            if len(self.machines) == NODES and self.dice.random() < MACHINES_LOST:
                self.cluster.lose(self.machines.pop(self.dice.randrange(NODES)))
                self.killed["machines"] += 1
            elif nodes := sorted(self.cluster.rollout_processes()):
                try:
                    os.kill(self.dice.choice(nodes), signal.SIGKILL)
                except ProcessLookupError:  # its machine was lost, or it has ended by itself
                    continue
                self.killed["nodes"] += 1

    def replace(self) -> None:
        """Add a machine for one that was lost: Ray starts machines in the main thread alone."""
        if len(self.machines) < NODES:
            self.machines.append(self.cluster.add(num_cpus=2))

    def end(self) -> None:
        """Let it finish what it does."""
        self.over.set()
        if self.is_alive():
            self.join()


def train(over: Callable[[int], bool], step_s: float, **place: Any) -> tuple[str, int]:
    """Return the digest of a training, and its number of updates."""
    seed_everything(1, verbose=False)
    envs = partial(timed_cartpole, case="constant", mean_s=step_s, seed=0)
    digest = Digest()
    data = HTSDataModule(
        envs, num_envs=ENVS, frames_per_batch=ENVS * STEPS, total_frames=ENVS * STEPS * MOST_ROUNDS,
        seed=1, **{"recover": "replay", **place},
    )  # fmt: skip
    trainer = quiet_trainer(gradient_clip_val=0.5, callbacks=[digest, Until(over)])
    trainer.fit(A2C(make_actor_critic("mlp", env_spec_of(envs))), data)
    return digest.sha.hexdigest(), digest.updates


def soak(minutes: float, every_s: float, seed: int) -> bool:
    """Train on a cluster that is disturbed, and again in this process; whether both agree."""
    told = BufferingHandler(10**6)
    log = logging.getLogger("hts_torchrl")
    log.addHandler(told)
    log.propagate = False
    until_s: list[float] = []
    with ray_machines.machines() as cluster:
        machines = [cluster.add(num_cpus=2) for _ in range(NODES)]
        killer = Killer(cluster, machines, every_s, random.Random(seed))

        def over(updates: int) -> bool:
            if updates == 1:
                until_s.append(time.monotonic() + 60 * minutes)
                killer.start()
            killer.replace()
            return time.monotonic() > until_s[0]

        options = {"ray_init_config": {"address": cluster.address, "log_to_driver": False}}
        try:
            on_nodes, updates = train(
                over, STEP_S, backend="ray", num_collectors=NODES, num_actors=0,
                envs_per_executor=ENVS // NODES, backend_options=options,
            )  # fmt: skip
        finally:
            killer.end()
    killed = " and ".join(f"{count} {what}" for what, count in killer.killed.items())
    recoveries = sum("is repeated by a new" in record.getMessage() for record in told.buffer)
    print(f"{updates} updates; killed: {killed}; {recoveries} recoveries", flush=True)
    alone, _ = train(lambda done: done == updates, 0.0, num_actors=0)
    verdict = "the same bits" if on_nodes == alone else "OTHER BITS"
    print(f"on nodes {on_nodes[:16]}, the serial twin {alone[:16]}: {verdict}", flush=True)
    return on_nodes == alone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=60.0, help="mean seconds from kill to kill")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    arguments = parser.parse_args()
    quiet()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return 0 if soak(arguments.minutes, arguments.every, arguments.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
