"""Who spends the time of a step, and what the machinery adds to environments and network.

Run: python benchmarks/overhead.py [--quick] [--only work parts passes optimizer executor start]

Every measurement is a fresh process; rows take turns; medians, with the smallest and the largest:

- *work*: CPU time of executors, actors and learner, by the operating system's account, while they
  train A2C on Breakout; the steps a second that this work would allow if no core ever idled, and
  the share of it that is reached;
- *parts*: the same parts by themselves, with and without ``keep_freed_memory``: an environment's
  step, a row of an actor's passes of 8 and of 16, a sample of the update's forward pass, and of its
  forward and backward pass;
- *passes*: an actor's pass of 8 rows, plain and compiled, in CPU time; and the seconds to compile
  it with an empty cache of torch's, and again with what it then holds, as each actor does;
- *optimizer*: a step for the Nature network in one thread, as learners make it and by torch's own
  loop over the parameters;
- *executor*: CPU time of the executor processes for each step of an environment that does nothing;
- *start*: seconds from ``start()`` to the first batch of 16 executors. The first collector of a
  process (cold) starts the fork server too, a second one (warm) finds it. Where passes are
  compiled, actors find what an earlier process has compiled, if there was one.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from harness import (
    CORES,
    Stopwatch,
    cpu_s,
    cpu_us,
    in_fresh_process,
    keep_freed_memory,
    machine,
    markdown,
    options,
    spread,
)
from lightning.pytorch import Trainer
from throughput import Run
from timed_envs import StillEnv
from trainer import Watch, environments, train

from hts_torchrl import AtariEnvs, HTSCollector, env_spec_of, make_actor_critic
from hts_torchrl.learner.optimizers import make_optimizer
from hts_torchrl.policy.compiled_pass import CompiledPass
from hts_torchrl.policy.forward import evaluate
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.policy.memory import with_memory
from hts_torchrl.workers.actor_settings import ActorSettings, make_inference

ROLES = ("executor", "actor", "learner")
NUM_ENVS = 16


class Account(Watch):
    """Reads every role's CPU time when the measurement begins and when it ends."""

    def read(self) -> dict[str, float]:
        totals = dict.fromkeys(ROLES, 0.0) | {"learner": cpu_s(os.getpid())}
        for process in multiprocessing.active_children():
            totals[process.name.split("-")[1]] += cpu_s(process.pid)
        return totals

    def on_train_batch_end(self, trainer: Trainer, *arguments: object) -> None:
        super().on_train_batch_end(trainer, *arguments)
        if self.watch.rounds == 0:
            self.before = self.read()
        elif trainer.should_stop:
            steps, used = self.watch.rounds * self.watch.frames, self.read()
            self.microseconds = {r: 1e6 * (used[r] - self.before[r]) / steps for r in ROLES}


def work(steps: int, workers: int, bf16: bool, seconds: float) -> dict[str, float]:
    """Return the microseconds of CPU that each role takes for a step."""
    keep_freed_memory()
    account = Account(Stopwatch(NUM_ENVS * steps, seconds))
    run = Run(
        "trainer", "breakout", NUM_ENVS, steps, seconds, workers=workers, bf16=bf16,
        inference_batch=max(8, NUM_ENVS // workers),
    )  # fmt: skip
    train(asdict(run), account)
    bound, speed = 1e6 * CORES / sum(account.microseconds.values()), account.watch.steps_per_s
    shares = {"bound": bound, "% of it": 100 * speed / bound}
    return {"steps/s": speed, **account.microseconds, **shares}


def parts(steps: int, bf16: bool, keep: bool, seconds: float) -> dict[str, float]:
    """Return microseconds of a step, of a row of a pass, of a sample of an update."""
    if keep:
        keep_freed_memory()
    torch.set_num_threads(1)
    frames, random = NUM_ENVS * steps, np.random.default_rng(0)
    group = AtariEnvs("breakout").group(range(4))
    observation = group.reset([0, 1, 2, 3])["observation"]
    policy = make_actor_critic("nature", group.spec)
    pixels = torch.from_numpy(observation).repeat(frames // 4, 1, 1, 1)

    def actors_pass(rows: int) -> Callable[[], object]:
        actor = make_actor_critic("nature", group.spec)
        precision = "bf16-mixed" if bf16 else "32-true"
        inference = PolicyInference(actor, group.spec, batch_size=rows, precision=precision)
        observations = {"observation": np.tile(observation, (rows // 4, 1, 1, 1))}
        return lambda: inference.answer(observations, random.random((rows, 1)))

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            result = evaluate(policy, {"observation": pixels}, frames)
        return result.distribution.entropy().mean() + result.value.float().square().mean()

    works = {
        "environment step": (4, lambda: group.step(random.integers(2, size=4))),
        "actor's row of 8": (8, actors_pass(8)),
        "of 16": (16, actors_pass(16)),
        "update's sample, forward": (frames, forward),
        "forward and backward": (frames, lambda: forward().backward()),
    }
    figures = {name: cpu_us(call, seconds / 4) / count for name, (count, call) in works.items()}
    group.close()
    return figures


COMPILES = {
    "plain": None,
    "compiled": {},
    "compiled with cpp_wrapper": {"options": {"cpp_wrapper": True}},
}


def passes(game: str, network: str, how: str, seconds: float) -> dict[str, float]:
    """Return the microseconds of a pass, and the seconds to compile it (0 where nothing is)."""
    torch.set_num_threads(1)
    policy = make_actor_critic(network, env_spec_of(environments(game)))
    spec = with_memory(policy, env_spec_of(environments(game)))
    draws = np.random.default_rng(0).random((8, spec.action.num_draws))
    inputs = {key: np.zeros((8, *each.shape), each.dtype) for key, each in spec.inputs.items()}
    settings = ActorSettings(batch_size=8, device="cpu", precision="32-true")
    inference = make_inference(policy, spec, settings)
    compile_s = dict.fromkeys(("empty", "filled"), 0.0)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for turn in compile_s if COMPILES[how] is not None else ():
            torch._dynamo.reset()
            inference.compiled = CompiledPass(inference, COMPILES[how])
            began_s = time.perf_counter()
            inference.answer(inputs, draws)
            compile_s[turn] = time.perf_counter() - began_s
        pass_us = cpu_us(lambda: inference.answer(inputs, draws), seconds)
    times = {f"s to compile, cache {turn}": value for turn, value in compile_s.items()}
    return {"us a pass": pass_us, **times}


def optimizer(name: str, seconds: float) -> dict[str, float]:
    """Return the milliseconds of a step."""
    torch.set_num_threads(1)
    figures = {}
    for form, arguments in (("as made, ms", {}), ("by torch's loop, ms", {"foreach": False})):
        policy = make_actor_critic("nature", env_spec_of(environments("breakout")))
        for parameter in policy.parameters():
            parameter.grad = torch.randn_like(parameter)
        made = make_optimizer(name, policy, learning_rate=1e-4, epsilon=1e-5, arguments=arguments)
        figures[form] = cpu_us(made.step, seconds / 2) / 1e3
    return figures


def collect(
    envs: Any, game: str, num_envs: int, steps: int, per_executor: int = 1, **settings: Any
) -> HTSCollector:
    spec = env_spec_of(environments(game))
    policy = make_actor_critic("mlp" if game == "cartpole" else "nature", spec)
    return HTSCollector(
        envs, policy, num_envs=num_envs, envs_per_executor=per_executor,
        frames_per_batch=num_envs * steps, clone=False, **settings,
    )  # fmt: skip


def executor(executors: int, per_executor: int, seconds: float) -> dict[str, float]:
    """Return the microseconds of CPU that an executor takes for an environment's step."""
    num_envs, steps = executors * per_executor, 64
    envs = partial(StillEnv, Box(-1.0, 1.0, (4,)), 2)
    collector = collect(envs, "cartpole", num_envs, steps, per_executor)
    batches, rounds = iter(collector), 0
    for _ in range(5):
        next(batches)
    pids = [p.pid for p in multiprocessing.active_children() if "executor" in p.name]
    used_s, began_s = sum(map(cpu_s, pids)), time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        next(batches)
        rounds += 1
    used_s = sum(map(cpu_s, pids)) - used_s
    speed = rounds * num_envs * steps / (time.perf_counter() - began_s)
    collector.shutdown()
    return {"us a step": 1e6 * used_s / (rounds * num_envs * steps), "steps/s": speed}


def start(game: str, compiles: bool) -> dict[str, float]:
    """Return the seconds to the first batch, of a process's first collector and of its second."""
    figures = {}
    for kind in ("cold", "warm"):
        collector = collect(environments(game), game, 16, 5, compile_policy=compiles)
        began_s = time.perf_counter()
        collector.start()
        next(iter(collector))
        figures[f"{kind}, s"] = time.perf_counter() - began_s
        collector.shutdown()
    return figures


KINDS: dict[str, Callable[..., dict[str, float]]] = {
    "work": work, "parts": parts, "passes": passes, "optimizer": optimizer, "executor": executor,
    "start": start,
}  # fmt: skip


def rows_of(kind: str, seconds: float) -> dict[str, list[Any]]:
    """Return the arguments of a table's rows."""
    both = {"float32": False, "bfloat16": True}.items()
    if kind == "work":
        return {
            f"{name}, {steps} steps a round, executors: {workers}": [steps, workers, bf16, seconds]
            for steps, workers, (name, bf16) in product((5, 20), (16, 2, 1), both)
        }
    if kind == "parts":
        return {
            f"{name}, batch of {NUM_ENVS * steps}{', memory kept' * keep}": [
                steps,
                bf16,
                keep,
                seconds,
            ]
            for steps, (name, bf16), keep in product((5, 20), both, (False, True))
        }
    if kind == "passes":
        nets = [("cartpole", "mlp"), ("cartpole", "lstm"), ("breakout", "nature")]
        return {
            f"{network}, {game}, {how}": [game, network, how, seconds / 4]
            for (game, network), how in product(nets, COMPILES)
        }
    if kind == "optimizer":
        return {name: [name, seconds] for name in ("adam", "rmsprop")}
    if kind == "executor":
        shapes = [(8, 1), (16, 1), (32, 1), (64, 1), (8, 2), (8, 4), (1, 16)]
        return {
            f"executors: {n}, environments of each: {per}": [n, per, seconds] for n, per in shapes
        }
    both = [("cartpole", False), ("cartpole", True), ("breakout", False)]
    return {f"{game}{', compiled' * compiles}": [game, compiles] for game, compiles in both}


def table(kind: str, seconds: float, repeats: int, *, few: bool) -> str:
    """Measure the rows in turns, or only the first of them."""
    rows = dict(list(rows_of(kind, seconds).items())[: 1 if few else None])
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
    for _ in range(repeats):
        for name, arguments in rows.items():
            measured[name].append(in_fresh_process(__file__, [kind, arguments]))
    return markdown([
        {kind: name} | {c: spread(turn[c] for turn in turns) for c in turns[0]}
        for name, turns in measured.items()
    ])  # fmt: skip


def main() -> None:
    parser = options(__doc__, "one repeat of 1 s of the first row")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a measurement")
    args = parser.parse_args()
    if args.child:
        kind, arguments = args.child
        print(json.dumps(KINDS[kind](*arguments)))
        return
    if args.quick:
        args.repeats, args.seconds = 1, 1.0
    text = [machine()]
    print(text[0])
    for kind in args.only:
        text.append(table(kind, args.seconds, args.repeats, few=args.quick))
        print(text[-1], flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "overhead.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
