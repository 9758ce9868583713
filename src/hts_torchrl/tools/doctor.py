"""The doctor: what this machine has, what of it is in the way, and what would help."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from hts_torchrl.allocator import keep_freed_memory
from hts_torchrl.compat.torch import bfloat16_in_hardware
from hts_torchrl.config import Precision
from hts_torchrl.envs.atari import AtariEnvs
from hts_torchrl.envs.football.envs import FootballEnvs
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.machine import allowed_cores, allowed_memory, require_proc
from hts_torchrl.models import make_actor_critic
from hts_torchrl.policy.examination import depends_on_row_alone
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec
from hts_torchrl.workers.rollout_node import NodeKind

_PIXELS = EnvSpec(
    {"observation": ArraySpec((4, 84, 84), np.dtype(np.uint8))},
    ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (6,)),
)


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what to do about it, if anything is wrong."""

    what: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        """Return one line, and a second one if there is a remedy."""
        mark = "wrong" if self.remedy else "ok"
        line = f"{mark:6}{self.what:18}{self.found}"
        return f"{line}\n{'':6}{'':18}{self.remedy}" if self.remedy else line


def examine() -> Iterator[Finding]:
    """Yield one finding after another.

    Raises:
        ConfigurationError: if the kernel tells nothing of the machine.
    """
    require_proc()
    games = (_atari, _football, _gfootball)
    machine = (_cores, _processor, _memory, _descriptors, _threads, _bfloat16)
    for check in (*machine, *games, _ray, _gpu):
        yield check()
    for network in ("nips", "nature", "impala"):
        yield _rows(network)


def _cores() -> Finding:
    cores, allowed = len(os.sched_getaffinity(0)), allowed_cores()
    if allowed < cores:
        return Finding(
            "cores",
            f"{cores}, of which the container may use {allowed:g}",
            "raise the container's limit, or start with taskset on as many cores as it may use",
        )
    return Finding("cores", f"{cores}")


def _processor() -> Finding:
    """Say what decides the last bits of a pass: rollout nodes should have the same."""
    return Finding("processor", NodeKind.of_this_process().cpu)


def _memory() -> Finding:
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":") for line in lines)
    free_gb = int(fields["MemAvailable"].split()[0]) / 1024**2
    available_gb = min(free_gb, allowed_memory() / 1024**3)
    remedy = (
        "" if available_gb >= 2 else "Atari with 16 environments needs about 2 GB: lower num_envs"
    )
    return Finding("memory", f"{available_gb:.1f} GB; /dev/shm is not used", remedy)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Two for each executor here and one in each actor, and what libraries keep open.
    most = (soft - 100) // 3
    raised = "ulimit -n 4096" + (f", as root: the hard limit is {hard}" if 0 < hard < 4096 else "")
    remedy = "" if most >= 64 else raised
    return Finding("file descriptors", f"{soft}: enough for {most} executors", remedy)


def _threads() -> Finding:
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    remedy = f"set OMP_NUM_THREADS={cores} or less" if threads > cores else ""
    kept = "kept" if keep_freed_memory() else "returned to the system, slower"
    return Finding(
        "torch", f"{torch.__version__}, {threads} threads; freed memory is {kept}", remedy
    )


def _bfloat16() -> Finding:
    supported = bfloat16_in_hardware()
    found = "in hardware" if supported else "emulated: leave --trainer.precision at 32-true"
    return Finding("bfloat16", found)


def _atari() -> Finding:
    return _engine("Atari", AtariEnvs("pong"), "pip install ale-py")


def _football() -> Finding:
    remedy = "pip install --force-reinstall 'hts-torchrl[football]'"
    return _engine("football", FootballEnvs("empty_goal"), remedy)


def _gfootball() -> Finding:
    envs = FootballEnvs("empty_goal", engine="gfootball")
    return _engine("gfootball", envs, "bash scripts/install_gfootball.sh")


def _engine(what: str, envs: AtariEnvs | FootballEnvs, remedy: str) -> Finding:
    """Begin a game; football's engines are extras, which nobody has to have."""
    try:
        envs.group([0]).reset([0])
    except Exception as error:
        if isinstance(envs, FootballEnvs) and isinstance(error, ConfigurationError):
            return Finding(what, f"not installed: {str(error).rpartition(': ')[2]}")
        return Finding(what, f"{type(error).__name__}: {error}", remedy)
    return Finding(what, "plays")


def _ray() -> Finding:
    try:
        return Finding("Ray", version("ray"))
    except PackageNotFoundError:
        return Finding("Ray", "not installed: pip install 'hts-torchrl[ray]'")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", "none: learner and actors compute on the CPU")
    return Finding(
        "GPU", ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    )


def _rows(network: str) -> Finding:
    """Ask whether the actors' answers keep their bits at any place of a batch."""
    precisions: tuple[Precision, ...] = ("32-true", "bf16-mixed")
    depends = []
    for precision in precisions:
        policy = make_actor_critic(network, _PIXELS)
        inference = PolicyInference(policy, _PIXELS, batch_size=8, precision=precision)
        if not depends_on_row_alone(inference, trials=2):
            depends.append(precision)
    if not depends:
        return Finding(f"network {network}", "rows keep their bits at any place of a batch")
    return Finding(
        f"network {network}",
        f"rows depend on their place in a batch ({', '.join(depends)})",
        "actors will answer row by row, exact but slower; another inference_batch_size may do",
    )
