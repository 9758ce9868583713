"""The same bits on every processor: digests that were seen on an Intel Xeon, written down here."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
COMPUTE = ("torch", "torchrl", "tensordict", "numpy", "gymnasium", "ale-py")
GOLDEN = {
    "MLP, A2C on CartPole": "c1a22bf1861784a2",
    "Nature network, PPO on Breakout": "aa8ba7403985a8b2",
}
ARGUMENTS = {
    "MLP, A2C on CartPole": [
        *("--model=A2C", "--data.env=GymEnvs", "--data.env.id=CartPole-v1"),
        *("--data.num_envs=4", "--data.frames_per_batch=128", "--model.delayed_step=gradient"),
    ],
    "Nature network, PPO on Breakout": [
        *("--model=PPO", "--model.network=nature", "--model.minibatches=2", "--model.epochs=2"),
        *("--model.delayed_step=displacement", "--data.env=AtariEnvs", "--data.env.game=breakout"),
        *("--data.num_envs=4", "--data.frames_per_batch=64"),
    ],
}


def has_tested_versions() -> bool:
    """Whether libraries are those of the digests."""
    pinned = dict(re.findall(r"^([\w-]+)==([^\s;]+)", CONSTRAINTS.read_text(), re.MULTILINE))
    return all(version(name).partition("+")[0] == pinned[name] for name in COMPUTE)


def digest(task: str, folder: Path, *flags: str) -> str:
    """The first half of the digest of all weights after 4 updates, by ``hts-torchrl verify``."""
    command = [
        *(sys.executable, "-m", "hts_torchrl.cli", "verify", *ARGUMENTS[task], *flags),
        *("--data.total_frames=51200", "--trainer.accelerator=cpu"),
        *("--updates=4", "--manifest=manifest.json"),
    ]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    (found,) = re.findall(r"^4 updates, weights ([0-9a-f]{16}): written", ended.stdout, re.M)
    return found


@pytest.mark.processes
@pytest.mark.skipif(not has_tested_versions(), reason="other versions have other bits")
@pytest.mark.skipif("AVX2" not in Path("/proc/cpuinfo").read_text().upper(), reason="no AVX2")
@pytest.mark.parametrize("task", GOLDEN)
def test_portable_runs_have_the_bits_that_another_processor_had(task, tmp_path):
    assert digest(task, tmp_path, "--portable") == GOLDEN[task]


def weights_of(run: str, folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "runs" / run / "version_0" / "checkpoints" / "last.ckpt"
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.processes
@pytest.mark.skipif("AVX2" not in Path("/proc/cpuinfo").read_text().upper(), reason="no AVX2")
def test_a_portable_run_goes_on_with_the_kernels_of_its_checkpoint(tmp_path):
    def fit(name: str, *flags: str) -> None:
        command = [sys.executable, "-m", "hts_torchrl.cli", "fit", f"--name={name}", *flags]
        subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)

    task = [
        *ARGUMENTS["MLP, A2C on CartPole"],
        *("--data.total_frames=512", "--data.num_actors=0", "--trainer.accelerator=cpu"),
    ]
    fit("whole", *task, "--portable")
    fit("stopped", *task, "--portable", "--trainer.max_steps=2")
    checkpoint = tmp_path / "runs/stopped/version_0/checkpoints/last.ckpt"
    fit("resumed", f"--ckpt_path={checkpoint}", "--trainer.max_steps=-1")
    whole, resumed = weights_of("whole", tmp_path), weights_of("resumed", tmp_path)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
