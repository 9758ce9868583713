"""All that a GPU is asked: its tests, the same bits, the latency of a pass, and training's speed.

Run: python benchmarks/gpu.py [--quick] [--num-envs 16 32 64 128 256] [--parts bits latency ...]

Writes one report, ``gpu.md``, after each of its parts. A part that fails is told there, and the
others go on; the exit status is 1 then, and 2 on a machine without a GPU. Nothing is downloaded:
EnvPool takes part if it is installed here.

- tests: ``pytest -m gpu``.
- bits: digests of trainings with 0 (the serial twin), 1, 2 and 4 actors and several groupings.
- latency: an actor's pass of 8 to 256 rows on CPU and GPU, with and without CUDA graphs.
- updates: how long the learner's take, and how much of that the GPU is busy.
- speed: training on Breakout, A2C with rounds of 5 steps and PPO with 128, in turns
  (``throughput.py``).
"""

from __future__ import annotations

import importlib.util
import json
import platform
import subprocess
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import (
    AT_ONCE,
    CORES,
    Failed,
    in_fresh_process,
    machine,
    markdown,
    number,
    options,
    spread,
)
from throughput import Run, contest, report
from trainer import train
from update_times import UpdateTimes

import determinism
from hts_torchrl import ActionSpec, ArraySpec, EnvSpec, make_actor_critic
from hts_torchrl.policy.examination import fill_at_random
from hts_torchrl.policy.inference import PolicyInference

ROOT = Path(__file__).resolve().parents[1]
ANCHORS = """Published figures, of other machines and settings, for the order of magnitude:

| system | steps/s |
|---|---|
| CleanRL's PPO on Atari by EnvPool, an H100 (LeanRL, 2024) | 1,022 |
| the same compiled and with CUDA graphs, an H100 (LeanRL, 2024) | 6,809 |
| HTS-RL, the paper (Liu et al., 2020) | 1,885 |
"""
PIXELS = ArraySpec((4, 84, 84), np.dtype(np.uint8))
NUMBERS = ArraySpec((4,), np.dtype(np.float32))
NETWORKS = {"nature": PIXELS, "mlp": NUMBERS}
ACTING = {
    "CPU": {"device": "cpu"},
    "GPU": {"device": "cuda:0"},
    "GPU, graphs": {"device": "cuda:0", "cudagraph": True},
}
ACTORS = {
    "CPU": {"policy_device": "cpu"},
    "GPU": {},
    "GPU, graphs": {"cudagraph_policy": True},
}
ON_GPU = {"accelerator": "gpu", "devices": 1, "deterministic": True}
TASKS = ("CartPole", "LSTM", "Pong")
POOLS = ((0, 1), (1, 1), (2, 1), (4, 1), (1, 2), (2, 4), (0, 8))
"""Actors, and environments of an executor."""


def gpu() -> str:
    """Return what the GPU is, and by what it is driven."""
    found = torch.cuda.get_device_properties(0)
    versions = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    driver = ""
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, check=True)
        driver = f", driver {said.stdout.split()[0]}"
    memory = f"{found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} multiprocessors"
    return f"{torch.cuda.device_count()} x {found.name}, {memory}, {versions}{driver}"


def tests(_: Namespace) -> Iterator[str]:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfE", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(AT_ONCE), "--dist", "worksteal"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = result.stdout.splitlines()[-40:]
    yield "\n".join(["```text", *lines, "```", ""])
    if result.returncode:
        raise RuntimeError(f"pytest ended with status {result.returncode}\n{result.stderr[-2000:]}")


def trained(job: dict[str, Any]) -> list[str]:
    """Return the digest of a training by each pool, in this process."""
    task = determinism.TASKS[job["task"]]
    determinism.TASKS[job["task"]] = replace(task, trainer=ON_GPU, data=task.data | job["data"])
    return [
        determinism.train(
            job["task"],
            job["algorithm"],
            determinism.WorkerPool(num_actors, envs_per_executor),
            updates=job["updates"],
        )
        for num_actors, envs_per_executor in job["pools"]
    ]


def bits(arguments: Namespace) -> Iterator[str]:
    updates, pools = (4, POOLS[:3]) if arguments.quick else (20, POOLS)
    yield f"{updates} updates; a column is actors x environments of an executor.\n\n"
    differing = []
    tasks = TASKS[:1] if arguments.quick else TASKS
    trainings = [(task, algorithm) for task in tasks for algorithm in ("A2C", "PPO ratio")]
    jobs = [
        {"task": task, "algorithm": algorithm, "data": data, "updates": updates, "pools": pools}
        for task, algorithm in trainings
        for data in ACTORS.values()
    ]
    with ThreadPoolExecutor(AT_ONCE) as side_by_side:
        digests = side_by_side.map(
            lambda job: in_fresh_process(__file__, {"bits": job}, seconds=1800), jobs
        )
        for task, algorithm in trainings:
            rows, on_gpu = [], set()
            for acting, found in zip(ACTORS, digests, strict=False):
                same = len(set(found)) == 1
                on_gpu |= set(found) if acting != "CPU" else set()
                row = {f"{task}, {algorithm}, actors on": acting}
                for (actors, size), digest in zip(pools, found, strict=True):
                    row[f"{actors} x {size}"] = digest[:8]
                rows.append(row | {"the same": "yes" if same else "NO"})
                if not same:
                    differing.append(f"{task}, {algorithm}, actors on {acting}")
            yield markdown(rows) + "\n"
            if len(on_gpu) > 1:
                differing.append(f"{task}, {algorithm}, with and without graphs")
    yield "With and without graphs the digests are to be the same, and on the CPU others.\n\n"
    if differing:
        raise RuntimeError(f"other bits in: {'; '.join(differing)}")


def timed(job: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return the microseconds of each pass, from numpy to numpy, in this process.

    By the rows of a pass, and by where it is computed.
    """
    torch.set_num_threads(1)
    spec = EnvSpec(
        {"observation": NETWORKS[job["network"]]},
        ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (6,)),
    )
    policy = make_actor_critic(job["network"], spec)
    return {
        str(rows): {
            label: _passes(
                PolicyInference(
                    policy, spec, batch_size=rows, precision=job["precision"], **acting
                ),
                job["seconds"],
            )
            for label, acting in job["acting"].items()
        }
        for rows in job["rows"]
    }  # fmt: skip


def _passes(inference: PolicyInference, seconds: float) -> list[float]:
    """Return the microseconds of at most 2,000 passes, after 20 that warm it up."""
    fill_at_random(inference, np.random.default_rng(0))
    inputs = {key: value.numpy().copy() for key, value in inference.inputs.items()}
    draws, taken = inference.draws.numpy().copy(), []
    ends_s = time.perf_counter() + seconds
    while len(taken) < 40 or (time.perf_counter() < ends_s and len(taken) < 2020):
        began_s = time.perf_counter()
        inference.answer(inputs, draws)
        taken.append((time.perf_counter() - began_s) * 1e6)
    return taken[20:]


def latency(arguments: Namespace) -> Iterator[str]:
    yield (
        "Microseconds of a pass from numpy to numpy, with both copies and the wait: median "
        "(smallest to largest). The CPU computes with one thread, as actors do.\n\n"
    )
    job = {
        "rows": [8, 64] if arguments.quick else [8, 16, 32, 64, 128, 256],
        "acting": ACTING,
        "seconds": 0.5 if arguments.quick else 2,
    }
    for network in NETWORKS:
        for precision in ("32-true", "bf16-mixed"):
            asked = job | {"network": network, "precision": precision}
            found = in_fresh_process(__file__, {"latency": asked})
            yield markdown([
                {f"{network}, {precision}, rows": rows}
                | {label: spread(taken) for label, taken in each.items()}
                for rows, each in found.items()
            ]) + "\n"  # fmt: skip


def timed_updates(job: dict[str, Any]) -> dict[str, Any]:
    """Return what the updates of a training take, in this process."""
    times = UpdateTimes(job["warm_up"], job["timed"], job["traced"])
    train(job["run"], times)
    return {
        "update": times.update_ms,
        "between": times.between_ms,
        "operations": times.operations,
        "busy": times.busy_ms,
    }


def updates(arguments: Namespace) -> Iterator[str]:
    yield (
        "Milliseconds of an update of Breakout with 16 environments, of the time from it to the "
        "next (publishing, waiting, copying a round to the GPU), and in which the GPU is busy for "
        "the learner meanwhile: median (smallest to largest), and the mean of what was traced.\n\n"
    )
    for algorithm, steps, warm_up, timed, traced in (("a2c", 5, 30, 200, 6), ("ppo", 128, 2, 8, 1)):
        rows = []
        task = Run("", "breakout", 16, steps, 0.0, algorithm)
        for run in contestants(task)[:1] if arguments.quick else contestants(task)[:2]:
            job = {"warm_up": warm_up, "timed": timed, "traced": traced, "run": asdict(run)}
            found = in_fresh_process(__file__, {"updates": job})
            rows.append({
                "algorithm": algorithm,
                "update": spread(found["update"]),
                "to the next": spread(found["between"]),
                "GPU busy": number(found["busy"]),
                "operations on the GPU": number(found["operations"]),
                "setting": run.setting,
            })  # fmt: skip
        yield markdown(rows) + "\n"


def contestants(task: Run) -> list[Run]:
    """Return the rows of a task; the first is what the others are compared with."""
    workers = max(n for n in range(1, CORES + 1) if task.num_envs % n == 0)
    ours = replace(task, system="trainer", device="cuda", workers=workers)
    on_gpu = replace(ours, inference_batch=task.num_envs)
    graphs = replace(on_gpu, cudagraph=True)
    runs = [
        graphs,
        on_gpu,
        replace(ours, policy_device="cpu", actors=min(2, task.num_envs)),
        replace(graphs, bf16=True),
        replace(graphs, actors=2, inference_batch=max(1, task.num_envs // 2)),
    ]
    if task.algorithm == "a2c":
        runs[1:1] = [replace(graphs, cudagraph_loss=True)]
    threads = min(CORES, task.num_envs)
    peer = replace(task, device="cuda", emulator_threads=threads)
    if importlib.util.find_spec("envpool"):
        runs.append(replace(peer, system="envpool", here=True))
    if task.algorithm == "a2c":
        collector = replace(peer, system="collector")
        runs += [collector, replace(collector, cudagraph=True), replace(collector, bf16=True)]
    return runs


def speed(arguments: Namespace) -> Iterator[str]:
    yield f"{ANCHORS}\nNot tuned: each row has the settings in its last column.\n\n"
    failed: dict[Run, str] = {}
    turns, seconds = (2, 3.0) if arguments.quick else (arguments.turns, arguments.seconds)
    for algorithm, steps in (("a2c", 5), ("ppo", 128)):
        for num_envs in arguments.num_envs:
            task = Run("", "breakout", num_envs, steps, seconds, algorithm)
            try:
                if speeds := contest(contestants(task), turns, seconds, failed):
                    yield report(speeds) + "\n"
            except Failed as error:
                failed[task] = str(error)
            if arguments.quick:
                break
    if not importlib.util.find_spec("envpool"):
        yield "EnvPool is not installed here, and took no part.\n\n"
    if failed:
        told = (
            f"{run.name if run.system else 'a contest'}, {run.algorithm}, {run.num_envs}: "
            f"{run.setting}\n{why}"
            for run, why in failed.items()
        )
        raise RuntimeError("these failed:\n" + "\n".join(told))


PARTS: dict[str, Callable[[Namespace], Iterator[str]]] = {
    "tests": tests,
    "bits": bits,
    "latency": latency,
    "updates": updates,
    "speed": speed,
}

CHILDREN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "bits": trained,
    "latency": timed,
    "updates": timed_updates,
}


def write(path: Path, arguments: Namespace, parts: Sequence[str]) -> list[str]:
    """Write the report, bit by bit; returns the parts that failed."""
    failed = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:

        def say(text: str) -> None:
            print(text, end="", flush=True)
            file.write(text)
            file.flush()

        quick = "A quick run shows that it works; it gives no figures.\n\n" * arguments.quick
        say(f"# On a GPU\n\n{quick}{gpu()}\n{machine()}Python {platform.python_version()}\n")
        for name in parts:
            say(f"\n## {name.capitalize()}\n\n")
            try:
                for text in PARTS[name](arguments):
                    say(text)
            except (Exception, SystemExit) as error:  # of a child too: the other parts go on
                failed.append(name)
                child = isinstance(error, SystemExit)
                told = str(error) if child else traceback.format_exc(limit=2)
                say(f"**This part failed.**\n\n```text\n{told.strip()[-3000:]}\n```\n")
        say(f"\nFailed: {', '.join(failed) or 'nothing'}.\n")
    return failed


def main() -> int:
    parser = options(__doc__, "one size of each part")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--num-envs", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4, help="of a turn")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "benchmarks/gpu.py: no CUDA device is here, and nothing was measured", file=sys.stderr
        )
        return 2
    if arguments.child:
        ((kind, job),) = arguments.child.items()
        print(json.dumps(CHILDREN[kind](job)), flush=True)
        return 0
    return 1 if write(arguments.output / "gpu.md", arguments, arguments.parts) else 0


if __name__ == "__main__":
    sys.exit(main())
