"""What the transport of rollout nodes costs: steps a second on Ray, on one machine, and ideally.

Run: python benchmarks/scale.py [--nodes 2 4 8] [--rounds 12] [--step-ms 20]

Each node has one environment, which sleeps for the time of a step: many machines, simulated on
few cores. ``ideal`` is what the sleep alone allows. ``nodes`` are ours, on a Ray cluster that is
started here, without actor processes: each steps its environment and runs its passes. ``pool`` is
the local worker pool with as many environments. ``torchrl`` is TorchRL's ``Collector(backend="ray",
sync=True)`` with as many collectors, which waits for the update; so does ``nodes, delay 0``. The
learner publishes its weights after each batch, and does nothing else. The overhead is the time of
a round beyond the ideal one, divided by the steps of one environment in it.

``pixels`` is an environment whose observations have 28 KB, so that a round of a node is large.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper

# Also where this is a script, and the folder above is not where modules are looked for.
sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.timed_envs import StillEnv, TimedEnv, step_times

from hts_torchrl import HTSCollector, env_spec_of, make_actor_critic

UNCOUNTED_ROUNDS = 2
"""The pipeline fills in them, and workers import what they need."""


FRAMES = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
MAKERS: dict[str, tuple[Callable[[], gymnasium.Env], str]] = {
    "cartpole": (partial(gymnasium.make, "CartPole-v1"), "mlp"),
    "pixels": (partial(StillEnv, FRAMES, 6), "nature"),
}


def make(env: str, step_s: float) -> gymnasium.Env:
    return TimedEnv(MAKERS[env][0](), step_times("constant", step_s))


def make_torchrl(env: str, step_s: float) -> GymWrapper:
    return GymWrapper(make(env, step_s), device="cpu")


def seconds_a_round(collector: Any, batches: Iterable[Any], rounds: int) -> float:
    """Return the median time from batch to batch."""
    times_s, since_s = [], time.perf_counter()
    for _ in zip(range(UNCOUNTED_ROUNDS + rounds), batches, strict=False):
        collector.update_policy_weights_()
        now_s = time.perf_counter()
        times_s.append(now_s - since_s)
        since_s = now_s
    collector.shutdown()
    return statistics.median(times_s[UNCOUNTED_ROUNDS:])


def ours(env: str, nodes: int, arguments: argparse.Namespace, **place: Any) -> float:
    create = partial(make, env, arguments.step_ms / 1000)
    frames = nodes * arguments.steps
    policy = make_actor_critic(MAKERS[env][1], env_spec_of(create))
    rounds = UNCOUNTED_ROUNDS + arguments.rounds
    collector = HTSCollector(
        create, policy, num_envs=nodes, frames_per_batch=frames, total_frames=frames * rounds,
        inference_batch_size=1, clone=False, **place,
    )  # fmt: skip
    return seconds_a_round(collector, collector, arguments.rounds)


def on_nodes(env: str, nodes: int, arguments: argparse.Namespace, **settings: Any) -> float:
    place = {"backend": "ray", "num_collectors": nodes, "num_actors": 0}
    options = {"ray_init_config": ray_of(nodes)}
    return ours(env, nodes, arguments, **place, backend_options=options, **settings)


def ray_of(nodes: int) -> dict[str, Any]:
    """Return the arguments of a cluster on this machine that has places for the nodes."""
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "warning"}
    return {"num_cpus": nodes, "object_store_memory": 3 * 10**8, **quiet}


def torchrl(env: str, nodes: int, arguments: argparse.Namespace) -> float:
    create = partial(make_torchrl, env, arguments.step_ms / 1000)
    policy = make_actor_critic(MAKERS[env][1], env_spec_of(partial(make, env, 0.0)))
    # Its transport refuses the first convolution's channels-last weights.
    for parameter in policy.parameters():
        parameter.data = parameter.data.contiguous()
    frames, rounds = nodes * arguments.steps, UNCOUNTED_ROUNDS + arguments.rounds
    collector = Collector(
        create, policy, backend="ray", num_collectors=nodes, sync=True,
        frames_per_batch=frames, total_frames=frames * rounds,
        backend_options={
            "ray_init_config": ray_of(nodes),
            "remote_configs": {"num_cpus": 1, "num_gpus": 0},
            "collector_class": "single",
        },
    )  # fmt: skip
    return seconds_a_round(collector, collector, arguments.rounds)


SYSTEMS = {
    "nodes": on_nodes,
    "nodes, delay 0": partial(on_nodes, delay=0),
    "pool": ours,
    "torchrl": torchrl,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--envs", nargs="+", choices=MAKERS, default=list(MAKERS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=12, help="that are timed")
    parser.add_argument("--steps", type=int, default=32, help="of an environment in a round")
    parser.add_argument("--step-ms", type=float, default=20.0)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.pop("RAY_ADDRESS", None)
    torch.set_num_threads(1)
    ideal_s = arguments.steps * arguments.step_ms / 1000
    print("| environment | nodes | system | steps/s | ideal | overhead a step |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="hts", dir="/tmp") as folder:
        os.environ["RAY_TMPDIR"] = folder
        for env in arguments.envs:
            for nodes in arguments.nodes:
                for name in arguments.systems:
                    round_s = SYSTEMS[name](env, nodes, arguments)
                    overhead_ms = 1000 * (round_s - ideal_s) / arguments.steps
                    frames = nodes * arguments.steps
                    print(
                        f"| {env} | {nodes} | {name} | {frames / round_s:.0f} "
                        f"| {frames / ideal_s:.0f} | {overhead_ms:.2f} ms |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
