"""Training throughput on Atari: this project beside its peers.

A figure is environment steps a second of rollout *and* learning together, on one game with the
Nature network and the same batch: A2C, or PPO with 4 epochs of 4 minibatches. The rows take turns
of a few seconds (``contest.py``), and ratios are taken within a turn. ``--games cartpole`` has next
to no work in environment and network (two of 64x64 units): what remains is everybody's overhead.

Stable-Baselines3, SheepRL, Sample Factory (PPO only) and a single-file learner in the manner of
CleanRL on EnvPool's emulators have programs of their own (``peer_*.py``) and, made at their first
use, environments of their own.
This project's second row and TorchRL's collectors (A2C only) run the same loop, in which TorchRL
has the fastest of what was tried:

- one EnvBase around one native vector environment, without transforms. Serial and parallel ones,
  and Gymnasium's Python wrappers, were slower;
- values stored while acting: only the last observations are evaluated again, where GAE with a value
  network evaluates all of them, or twice as many without ``shifted``;
- ``A2CLoss`` on the two heads after one pass of the trunk: on the policy and value operators, as in
  TorchRL's examples, it runs the trunk twice for the same gradient;
- no ``update_policy_weights_``: local workers share the parameters' memory, so it would copy them
  onto themselves and wait for all workers. No trajectory ids; ``compact_obs`` gained nothing.

The *plain* rows learn as TorchRL's own A2C example for Atari does: single environments in
processes, ``GAE`` with the value network, ``A2CLoss`` on the policy and the value operator, weights
sent after each update. Gymnasium's wrapper (OpenCV) preprocesses the pixels.

``--tune`` measures for each row, this project's too: torch threads of the main process and of the
workers, emulator threads, number of workers, vectorisation, memory format, and for the common loop
``torch.compile`` of the update (the policy compiled as well was slower); the best four of each row
take turns, and the fastest are compared. ``--settings`` compares the given ones instead.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import torch
from ale_py.vector_env import AtariVectorEnv
from contest import take_turns
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformReward
from lightning.pytorch import Callback, Trainer
from matplotlib.figure import Figure
from measurement import CORES, PASSIVE, confidence, machine
from stopwatch import Stopwatch, keep_freed_memory
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import AsyncBatchedCollector, BaseCollector, Collector, MultiCollector
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, GymWrapper, ParallelEnv, SerialEnv
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

from hts_torchrl import (
    A2C,
    PPO,
    ActorCritic,
    AtariEnvs,
    EnvFactory,
    GymEnvs,
    HTSCollector,
    HTSDataModule,
    make_actor_critic,
)
from hts_torchrl.envs.atari import AtariGroup
from hts_torchrl.envs.group import EnvGroup
from hts_torchrl.models import NatureCNN

NAMES = {
    "trainer": "hts_torchrl, Trainer",
    "loop": "hts_torchrl, TorchRL loop",
    "collector": "TorchRL Collector",
    "sync": "TorchRL MultiCollector(sync)",
    "async": "TorchRL MultiCollector(async)",
    "async_batched": "TorchRL AsyncBatchedCollector",
    "plain": "TorchRL Collector, plain",
    "plain_sync": "TorchRL MultiCollector(sync), plain",
    "stable_baselines3": "Stable-Baselines3",
    "envpool": "CleanRL-style on EnvPool",
    "sheeprl": "SheepRL",
    "sample_factory": "Sample Factory, synchronous",
    "sample_factory_async": "Sample Factory, asynchronous",
}
PEERS = {
    "stable_baselines3": ["stable-baselines3>=2.7", "ale-py", "opencv-python-headless"],
    "envpool": ["envpool>=1.2.5"],
    "sheeprl": ["sheeprl[atari]>=0.8"],
    "sample_factory": ["sample-factory>=2.1,<2.2", "gymnasium<1", "numpy<2", "ale-py<0.11"],
}
CARTPOLE = "cartpole"
CARTPOLE_ROWS = ("trainer", "loop", "collector", "sync", "async", "stable_baselines3", "envpool")
ENVIRONMENTS = Path(__file__).parent / ".venvs"
FINALISTS, FINAL_TURNS = 4, 5
LEARNS_DURING_ROLLOUT = ("trainer", "loop", "async", "async_batched", "sample_factory_async")


def peer_of(system: str) -> str | None:
    """Return which of ``PEERS`` a row runs, if any."""
    peer = system.removesuffix("_async")
    return peer if peer in PEERS else None


@dataclass(frozen=True)
class Run:
    """What is measured: one of ``NAMES``, the task (up to ``seconds``), and how it is run."""

    system: str
    game: str
    num_envs: int
    steps: int
    seconds: float
    algorithm: str = "a2c"
    envs: str = "native"
    workers: int = 1
    actors: int = 1
    main_threads: int = 1
    inference_batch: int = 8
    worker_threads: int = 1
    emulator_threads: int = 1
    channels_last: bool = True
    double_buffered: bool = False
    compiled: bool = False
    bf16: bool = False

    @property
    def frames(self) -> int:
        return self.num_envs * self.steps

    @property
    def name(self) -> str:
        return NAMES[self.system] + ", bf16" * self.bf16

    @property
    def plain(self) -> bool:
        return self.system.startswith("plain")

    @property
    def setting(self) -> str:
        values = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        return " ".join(f"{name}={value}" for name, value, usual in values[6:] if value != usual)


def environments(run: Run) -> EnvFactory:
    return GymEnvs("CartPole-v1") if run.game == CARTPOLE else AtariEnvs(run.game)


def candidates(system: str, task: Run) -> list[Run]:
    """Return what ``--tune`` measures for a row; the first is used without it."""
    threads = list(dict.fromkeys([min(2, CORES), 1, CORES]))
    workers = [count for count in (1, 2, 4, 8, 16, 32) if task.num_envs % count == 0]
    workers.sort(key=lambda count: abs(count - CORES))
    learner: dict[str, list] = {"main_threads": threads}
    native = learner | {"emulator_threads": threads}
    layouts = {} if task.game == CARTPOLE else {"channels_last": [True, False]}
    actors = [1] if CORES <= 2 else [1, 2]
    batches = list(dict.fromkeys([min(8, task.num_envs), task.num_envs]))
    executors = {"workers": workers, "actors": actors, "main_threads": [1, 2]}
    executors |= {"inference_batch": batches}
    vectorisations = {"envs": ["subproc", "dummy"]}
    several = [count for count in workers if count < task.num_envs]
    samplers = [
        layouts | {"workers": several, "double_buffered": [True, False]},
        layouts | {"workers": [task.num_envs]},
    ]
    grids = {
        "collector": [native],
        "sync": [learner | {"worker_threads": [1, 2], "workers": workers}],
        "async": [native | {"workers": [1, 2], "main_threads": threads[::-1]}],
        "plain": [learner],
        "plain_sync": [{"main_threads": threads[::-1], "workers": workers}],
        "async_batched": [
            learner | {"envs": ["driver"], "workers": workers},
            learner | {"envs": ["server", "server-short-messages"]},
            learner | {"envs": ["threads"]},
        ],
        "stable_baselines3": [learner | layouts | vectorisations],
        "envpool": [native | layouts],
        "sheeprl": [learner | layouts | vectorisations | {"compiled": [False, True]}],
        "sample_factory": samplers,
        "sample_factory_async": samplers,
    }
    return [
        replace(task, system=system, **dict(zip(grid, values, strict=True)))
        for grid in grids.get(system, [executors])
        for values in product(*grid.values())
    ]


def given(text: str, task: Run) -> Run:
    """Return the run of ``system name=value ...``, as tables have it.

    Raises:
        ValueError: if a name or a value is none of ``Run``'s.
    """
    system, *pairs = text.split()
    kinds = {field.name: type(field.default) for field in fields(Run)[6:]}
    values = dict(pair.split("=", 1) for pair in pairs)
    if system not in NAMES or not values.keys() <= kinds.keys():
        raise ValueError(text)
    typed = {
        name: value == "True" if kinds[name] is bool else kinds[name](value)
        for name, value in values.items()
    }
    return replace(task, system=system, **typed)


def native_group(game: str, num_envs: int, num_threads: int) -> EnvGroup:
    if game == CARTPOLE:
        return GymEnvs("CartPole-v1").group(range(num_envs))
    kwargs = {"autoreset_mode": "SameStep", "life_loss_info": True, "reward_clipping": False}
    vector_env = partial(AtariVectorEnv, num_threads=num_threads, **kwargs)
    make = SimpleNamespace(vector_env=vector_env, clip_reward=True)
    return AtariGroup(make, game, num_envs, render=False)


class NativeEnv(EnvBase):
    """The environments of all rows as one of TorchRL's; seeds are drawn, as only speed counts.

    Leaner than the package's ``GroupEnv``: nothing is copied, and no scores are told.
    """

    def __init__(self, game: str, num_envs: int = 1, num_threads: int = 1) -> None:
        super().__init__(batch_size=[num_envs] if num_envs > 1 else [])
        self._group = native_group(game, num_envs, num_threads)
        # Gymnasium's single environments write each step over the last one.
        self._kept = np.copy if game == CARTPOLE else np.asarray
        seeds = np.random.default_rng().integers(2**31, size=num_envs)
        self._following = self._group.reset(seeds)["observation"]
        shape, dtype = self.batch_size, torch.from_numpy(self._following).dtype
        observations = Unbounded((*shape, *self._following.shape[1:]), dtype=dtype)
        self.observation_spec = Composite(observation=observations, shape=shape)
        self.action_spec = Categorical(self._group.spec.action.sizes[0], shape=shape)
        self.reward_spec = Unbounded((*shape, 1))

    def _tensordict(self, **arrays: np.ndarray) -> TensorDict:
        tensors = {key: torch.from_numpy(self._kept(array)) for key, array in arrays.items()}
        views = {k: t.view(*self.batch_size, *(t.shape[1:] or (1,))) for k, t in tensors.items()}
        return TensorDict(views, self.batch_size)

    def _reset(self, _: TensorDictBase | None = None, **__: object) -> TensorDict:
        return self._tensordict(observation=self._following)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        step = self._group.step(tensordict["action"].view(-1).numpy())
        self._following, after = step.next_observation["observation"], step.observation
        ends = {"terminated": step.terminated, "done": step.terminated | step.truncated}
        return self._tensordict(**after, reward=step.reward, **ends)

    def _set_seed(self, seed: int | None) -> None: ...


def plain_atari_env(game: str) -> GymWrapper:
    """One environment with Gymnasium's own preprocessing, as TorchRL's users wrap it."""
    env = AtariPreprocessing(gymnasium.make(f"ale_py:ALE/{game.title()}-v5", frameskip=1))
    env = TransformReward(FrameStackObservation(env, 4), np.sign)
    return GymWrapper(env, categorical_action_encoding=True)


class Trunk(NatureCNN):
    """The Nature trunk for any leading dimensions; ``bf16`` decides its precision."""

    def forward(self, pixels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            features = super().forward(pixels.reshape(-1, *pixels.shape[-3:]))
        return features.float().view(*pixels.shape[:-3], -1)


class Watch(Callback):
    """Ends the Trainer's run when enough was measured."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def on_train_batch_end(self, trainer: Trainer, _: object, __: object, part, ___: int) -> None:
        if part.is_last:
            trainer.should_stop = self.watch.round_ended()


def train(run: Run, *callbacks: Callback) -> None:
    """Train under the Trainer until a callback ends it."""
    data = HTSDataModule(
        environments(run), frames_per_batch=run.frames, total_frames=run.frames * 10**9,
        num_envs=run.num_envs, num_actors=run.actors,
        envs_per_executor=run.num_envs // run.workers, inference_batch_size=run.inference_batch,
    )  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, limit_val_batches=0, gradient_clip_val=0.5,
        precision="bf16-mixed" if run.bf16 else "32-true", callbacks=[*callbacks], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    network = "mlp" if run.game == CARTPOLE else "nature"
    settings = {"network": network, "num_threads": run.main_threads}
    ppo = run.algorithm == "ppo"
    trainer.fit(PPO(epochs=4, minibatches=4, **settings) if ppo else A2C(**settings), data)


def run_trainer(run: Run) -> float:
    watch = Stopwatch(run.frames, run.seconds)
    train(run, Watch(watch))
    return watch.steps_per_s


def make_model(run: Run) -> ActorCritic:
    spec = environments(run).group([0]).spec
    if run.game == CARTPOLE:
        return make_actor_critic("mlp", spec)
    model = ActorCritic(Trunk(spec.observations["observation"].shape), spec)
    model.module[0].module.bf16 = run.bf16
    return model


def make_served_model(run: Run) -> ActorCritic:
    """Make the policy, in the process that serves it."""
    if multiprocessing.parent_process():
        torch.set_num_threads(run.worker_threads)
    return make_model(run)


def make_async_batched(run: Run, policy: nn.Module, env: partial) -> AsyncBatchedCollector:
    """Environments in threads or processes; the policy in a thread, or in a process of its own."""
    kwargs = {"frames_per_batch": run.frames, "max_batch_size": run.num_envs}
    if run.envs.startswith("server"):
        chunk = run.steps if run.envs.endswith("short-messages") else "auto"
        kwargs |= {"policy_factory": partial(make_served_model, run), "transport": "auto"}
        kwargs |= {"env_backend": "multiprocessing", "transition_chunk_size": chunk}
    else:
        backend = "threading" if run.envs == "threads" else "multiprocessing"
        per_worker = 1 if run.envs == "threads" else run.num_envs // run.workers
        kwargs |= {"policy": policy, "transport": "driver"}
        kwargs |= {"env_backend": backend, "envs_per_worker": per_worker}
    return AsyncBatchedCollector([env] * run.num_envs, policy_version_key=None, **kwargs)


def by_environment(batch: TensorDictBase) -> TensorDictBase:
    """Order the transitions of an AsyncBatchedCollector, which come as they were finished.

    Where another environment's begin, the returns are cut as at a time limit.
    """
    envs = torch.as_tensor(batch["env_index"]).view(-1)
    order = envs.argsort(stable=True)
    batch = batch.exclude("env_index").contiguous()[order]
    batch["next", "done"][:-1] |= envs[order].diff().bool()[:, None]
    return batch


def make_collector(run: Run, policy: nn.Module) -> BaseCollector:
    share = run.num_envs if run.system == "async" else run.num_envs // run.workers
    frames = {"frames_per_batch": run.frames, "total_frames": -1}
    env = partial(NativeEnv, run.game, share, run.emulator_threads)
    if run.system == "loop":
        return HTSCollector(
            environments(run), policy, num_envs=run.num_envs, num_actors=run.actors,
            envs_per_executor=share, inference_batch_size=run.inference_batch, **frames,
        )  # fmt: skip
    if run.system == "async_batched":
        return make_async_batched(run, policy, partial(NativeEnv, run.game))
    if run.system == "plain":
        envs = ParallelEnv(run.num_envs, partial(plain_atari_env, run.game))
        return Collector(envs, policy, **frames)
    if run.system == "plain_sync":
        env = partial(SerialEnv, share, partial(plain_atari_env, run.game))
    if run.system == "collector":
        envs = {
            "native": env,
            "serial": partial(SerialEnv, run.num_envs, partial(NativeEnv, run.game)),
            "parallel": partial(ParallelEnv, run.workers, env, num_threads=run.main_threads),
        }
        return Collector(envs[run.envs](), policy, track_traj_ids=False, **frames)
    return MultiCollector(
        [env] * run.workers, policy, sync=run.system == "sync", num_threads=run.main_threads,
        num_sub_threads=run.worker_threads, **frames,
    )  # fmt: skip


def run_loop(run: Run) -> float:
    torch.set_num_threads(run.main_threads)
    model = make_model(run)
    trunk, heads = model.module[0], (model.get_policy_head(), model.get_value_head())
    actor, critic, plain = model.get_policy_operator(), model.get_value_operator(), run.plain
    network = critic if plain else None
    gae = GAE(gamma=0.99, lmbda=1.0, value_network=network, deactivate_vmap=True)
    networks = (actor, critic) if plain else heads
    loss = A2CLoss(*networks, loss_critic_type="l2", entropy_coeff=0.01, critic_coeff=0.5)
    optimizer = torch.optim.RMSprop(model.parameters(), 7e-4, alpha=0.99, eps=1e-5)
    collector = make_collector(run, actor if plain else model)
    watch = Stopwatch(run.frames, run.seconds)

    @torch.no_grad()
    def targets(batch: TensorDictBase) -> TensorDictBase:
        if plain:
            return gae(batch).reshape(-1)
        next_value = batch["state_value"].roll(-1, -2)
        unseen = (batch["next", "done"] & ~batch["next", "terminated"]).squeeze(-1)
        unseen[..., -1] = True
        next_value[unseen] = critic(batch["next"].select("observation")[unseen])["state_value"]
        batch["next", "state_value"] = next_value
        return gae(batch).select("observation", "action", "advantage", "value_target").reshape(-1)

    def objective(samples: TensorDictBase) -> Tensor:
        losses = loss(samples if plain else trunk(samples))
        return losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]

    objective = torch.compile(objective) if run.compiled else objective
    for batch in collector:
        if run.system == "async_batched":
            batch = by_environment(batch)
        optimizer.zero_grad()
        objective(targets(batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if run.envs.startswith("server"):
            collector.update_policy_weights_(model)
        elif plain or isinstance(collector, HTSCollector):
            collector.update_policy_weights_()
        if watch.round_ended():
            break
    return watch.steps_per_s


def interpreter(peer: str | None) -> str:
    """Return the Python that a row runs with; a peer's environment is made here."""
    if peer is None:
        return sys.executable
    folder = ENVIRONMENTS / peer
    python = str(folder / "bin" / "python")
    if not (folder / "complete").exists():
        print(f"making {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        packages = [f"torch=={version('torch').partition('+')[0]}", *PEERS[peer]]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "complete").touch()
    return python


def command(run: Run) -> list[str | Path]:
    """Return what runs it.

    Learner threads that spin while they wait for each other take the cores of all who act
    meanwhile. Where nobody acts during an update, they wait as OpenMP has it.
    """
    passive = PASSIVE if run.system in LEARNS_DURING_ROLLOUT else ()
    peer = peer_of(run.system)
    program = Path(__file__).with_name(f"peer_{peer}.py") if peer else Path(__file__)
    return [*passive, interpreter(peer), program, "--child", json.dumps(asdict(run))]


def measure(run: Run) -> float:
    """Return steps a second, measured by itself in a fresh process; 0 if that fails."""
    result = subprocess.run(
        ["timeout", "900", *command(run)], capture_output=True, text=True, check=False
    )
    last = "0" if result.returncode else result.stdout.splitlines()[-1]
    speed, remark = float(last.split()[0]), last.partition(" ")[2]
    print(f"{speed:8.0f}  {run.name:31} {run.setting} {remark}", flush=True)
    print(result.stderr[-3000:] if result.returncode else "", file=sys.stderr, end="")
    return speed


def contest(runs: Sequence[Run], turns: int, seconds: float) -> dict[Run, list[float]]:
    """Return the steps a second of each run in each of its turns."""
    taken = take_turns({run: command(run) for run in runs}, turns, seconds)
    return {
        run: [turn.rounds * run.frames / turn.seconds for turn in each]
        for run, each in taken.items()
    }


def tune(system: str, task: Run) -> Run:
    """Return the fastest setting of a row.

    Each is measured by itself for as long as a turn, which is one glimpse of a machine that changes
    its speed; the best of them then take turns.
    """
    speeds = {run: measure(run) for run in candidates(system, task)}
    if system != "trainer" and not peer_of(system):
        compiled = replace(max(speeds, key=speeds.__getitem__), compiled=True)
        speeds[compiled] = measure(compiled)
    best = sorted(speeds, key=speeds.__getitem__)[-FINALISTS:]
    finalists = [run for run in best if speeds[run]]
    if not finalists:
        sys.exit(f"{NAMES[system]}: no setting works, see above")
    finals = contest(finalists, FINAL_TURNS, task.seconds)
    medians = {run: float(np.median(values)) for run, values in finals.items()}
    for run, speed in medians.items():
        print(f"{speed:8.0f}  {run.name:31} {run.setting} (of {FINAL_TURNS} turns)", flush=True)
    return max(medians, key=medians.__getitem__)


def report(speeds: dict[Run, list[float]]) -> str:
    """Return a Markdown table; ratios are those of the first row to each, within a turn."""
    (first, base), *_ = speeds.items()
    task = f"{first.game}, {first.algorithm}, {first.num_envs} environments, {first.steps} steps"
    text = f"""{task}, {len(base)} turns of {first.seconds:g} s

| row | steps/s | min | max | first row / this, 95 % | setting |
|---|---|---|---|---|---|
"""
    for run, values in speeds.items():
        ratios = [a / b for a, b in zip(base, values, strict=True)]
        figures = " | ".join(f"{f(values):.0f}" for f in (np.median, min, max))
        text += f"| {run.name} | {figures} | {confidence(ratios, '.2f')} | {run.setting} |\n"
    return text


def draw(speeds: dict[Run, list[float]], path: Path) -> None:
    axes = Figure(figsize=(8, 1 + 0.4 * len(speeds)), layout="constrained").subplots()
    for run, values in reversed(speeds.items()):
        middle, colour = np.median(values), "C0" if run.name.startswith("hts") else "C7"
        errors = [[middle - min(values)], [max(values) - middle]]
        axes.barh(
            f"{run.name}, {run.game}, {run.steps} steps",
            middle,
            xerr=errors,
            color=colour,
            capsize=3,
        )
    axes.set_xlabel("training steps a second")
    axes.figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Training throughput on Atari")
    parser.add_argument("--rows", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--games", nargs="+", default=["breakout"])
    parser.add_argument("--algorithm", choices=["a2c", "ppo"], default="a2c")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--steps-per-round", type=int, nargs="+", default=[5])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4, help="of a turn")
    parser.add_argument("--tune", action="store_true", help="find each row's best setting first")
    parser.add_argument("--settings", nargs="+", metavar="'ROW NAME=VALUE ...'", default=[])
    parser.add_argument("--bf16", action="store_true", help="add all rows in bfloat16")
    parser.add_argument("--quick", action="store_true", help="2 turns of 3 s: does it run?")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        keep_freed_memory()
        run = Run(**args.child)
        try:
            print(run_trainer(run) if run.system == "trainer" else run_loop(run), flush=True)
        finally:
            for process in multiprocessing.active_children():
                process.kill()  # the exit would wait for a ParallelEnv's workers without end
        return
    learners = {name for name in NAMES if name == "trainer" or peer_of(name)}
    if args.algorithm == "ppo":
        args.rows = [name for name in args.rows if name in learners]
    else:
        args.rows = [name for name in args.rows if peer_of(name) != "sample_factory"]
    args.turns, args.seconds = (2, 3.0) if args.quick else (args.turns, args.seconds)
    text, speeds = [machine()], {}
    for game, steps in product(args.games, args.steps_per_round):
        task = Run("", game, args.num_envs, steps, args.seconds, args.algorithm)
        rows = [name for name in args.rows if game != CARTPOLE or name in CARTPOLE_ROWS]
        if not rows:
            parser.error(f"none of the rows has {args.algorithm} on {game}")
        of_each = [(name, task) for name in rows]
        if args.bf16 and game != CARTPOLE:
            own = [name for name in rows if not peer_of(name)]
            of_each += [(name, replace(task, bf16=True)) for name in own]
        if args.settings:
            try:
                runs = [given(text, task) for text in args.settings]
            except ValueError as error:
                parser.error(f"--settings: {error}; such as 'trainer workers=2' is needed")
        else:
            runs = [tune(*row) if args.tune else candidates(*row)[0] for row in of_each]
        speeds |= contest(runs, args.turns, args.seconds)
        text.append(report({run: speeds[run] for run in runs}))
        print("\n", *text, sep="\n", flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "throughput.md").write_text("\n".join(text))
    draw(speeds, args.output / "throughput.png")
    with (args.output / "throughput.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(field.name for field in fields(Run)), "steps_per_s"])
        for run, values in speeds.items():
            writer.writerows([*asdict(run).values(), f"{value:.1f}"] for value in values)


if __name__ == "__main__":
    main()
