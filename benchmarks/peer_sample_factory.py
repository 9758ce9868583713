"""Sample Factory on Atari (PPO), for ``throughput.py``, which makes its environment and calls it.

Its own Atari example, with the settings of the other rows. Samples are counted when the learner has
trained on them, not when they were collected, and not in emulator frames. Weights are counted by
gradient steps, 16 in each training iteration: beside the speed stands how many of them the learner
was ahead of the samples of one minibatch, the last that was reported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from typing import Any

import ale_py  # noqa: F401  registers the games, in every process
import torch
from harness import Stopwatch, keep_freed_memory
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.utils.context import global_model_factory
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.model.encoder import Encoder, default_make_encoder_func
from sample_factory.train import make_runner
from sf_examples.atari.atari_utils import ATARI_ENVS
from sf_examples.atari.train_atari import parse_atari_args, register_atari_components
from torch import Tensor

keep_freed_memory()  # here, as every worker process imports this file


class ChannelsLast(Encoder):
    """Its own encoder on pixels and weights in another memory format."""

    def __init__(self, cfg: Any, space: Any) -> None:
        super().__init__(cfg)
        self.encoder = default_make_encoder_func(cfg, space)

    def model_to_device(self, device: torch.device) -> None:
        """Called once the weights are initialised, which needs them contiguous."""
        super().model_to_device(device)
        self.to(memory_format=torch.channels_last)

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        pixels = observation["obs"].contiguous(memory_format=torch.channels_last)
        result: Tensor = self.encoder({"obs": pixels})
        return result

    def get_out_size(self) -> int:
        size: int = self.encoder.get_out_size()
        return size


class Watch(AlgoObserver):
    """Ends all processes when enough was measured, and prints the speed."""

    def __init__(self, watch: Stopwatch, folder: str) -> None:
        self.watch, self.folder = watch, folder

    def on_training_step(self, runner: Runner, _: int) -> None:
        if not self.watch.round_ended():
            return
        for process in multiprocessing.active_children():
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        lag = runner.policy_lag[0].get("version_diff_avg", float("nan"))
        print(f"\n{self.watch.steps_per_s} policy lag {lag:.0f} gradient steps", flush=True)
        os._exit(0)


def settings(run: dict[str, Any], folder: str) -> list[str]:
    names = {spec.env_id: spec.name for spec in ATARI_ENVS}
    game = names[f"{run['game'].title().replace('_', '')}NoFrameskip-v4"]
    values = {
        "env": game, "train_dir": folder, "device": "cpu", "seed": 1,
        "async_rl": run["system"].endswith("async"), "num_workers": run["workers"],
        "num_envs_per_worker": run["num_envs"] // run["workers"],
        "worker_num_splits": 2 if run["double_buffered"] else 1,
        "rollout": run["steps"], "batch_size": run["num_envs"] * run["steps"] // 4,
        "num_batches_per_epoch": 4, "num_epochs": 4, "max_policy_lag": 10**6,
        "normalize_input": False, "normalize_returns": False, "lr_schedule": "constant",
        "train_for_env_steps": 10**9, "save_every_sec": 10**6, "save_best_every_sec": 10**6,
    }  # fmt: skip
    return ["--algo=APPO", *(f"--{name}={value}" for name, value in values.items())]


def main(run: dict[str, Any]) -> None:
    register_atari_components()
    if run["channels_last"]:
        global_model_factory().register_encoder_factory(ChannelsLast)
    folder = tempfile.mkdtemp()
    _, runner = make_runner(parse_atari_args(settings(run, folder)))
    watch = Stopwatch(run["num_envs"] * run["steps"], run["seconds"])
    runner.register_observer(Watch(watch, folder))
    if runner.init() == ExperimentStatus.SUCCESS:
        runner.run()
    sys.exit("the training did not start, or ended too early")


if __name__ == "__main__":
    main(json.loads(sys.argv[2]))
