"""Sample Factory on Atari (PPO), for ``throughput.py`` and ``time_to_score.py``.

Those programs make its environment and call it. It is its own Atari example: for throughput with
the settings of the other rows, for a time to a score with its own (``atari_params.py``).

Samples are counted when the learner has trained on them, not when they were collected, and not in
emulator frames. Weights are counted by gradient steps, 16 in each training iteration: beside the
speed stands how many of them the learner was ahead of the samples of one minibatch, the last that
was reported.

What its own settings are not, in a time to a score: learning goes on beside acting (``async_rl``)
and environments are stepped in two groups, as its page on Atari advises for speed. Its 8
environments are shared out among as many workers as ``run`` says. Steps, also those of the falling
learning rate, are the agent's (``summaries_use_frameskip=False``, as in that page's example), as
they are for the other systems.
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
from signal_slot.signal_slot import EventLoopObject
from torch import Tensor
from training_scores import TrainingScores

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


PUBLISHED_ENVS, PUBLISHED_STEPS, PUBLISHED_BATCH = 8, 10_000_000, 4 * 256
"""Of its example: environments (there 8 workers of one each), steps, samples of an update."""
RAW_RETURN = "RecordEpisodeStatistics_reward"
"""Its name for the scores of whole games; ``reward`` is clipped, and of one life."""


def leave(folder: str, last_words: str) -> None:
    """End all processes."""
    for process in multiprocessing.active_children():
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)
    print(last_words, flush=True)
    os._exit(0)


class Watch(AlgoObserver):
    """Ends all processes when enough was measured, and prints the speed."""

    def __init__(self, watch: Stopwatch, folder: str) -> None:
        self.watch, self.folder = watch, folder

    def on_training_step(self, runner: Runner, _: int) -> None:
        if self.watch.round_ended():
            lag = runner.policy_lag[0].get("version_diff_avg", float("nan"))
            speed = self.watch.steps_per_s
            leave(self.folder, f"\n{speed} policy lag {lag:.0f} gradient steps")


class ScoresWatch(AlgoObserver):
    """Notes the scores of training, and ends all processes at the last of them."""

    def __init__(self, scores: TrainingScores, folder: str) -> None:
        self.scores, self.folder = scores, folder

    def on_connect_components(self, runner: Runner) -> None:
        """Start the clock when rollout workers are told to begin."""
        self.clock = Clock(runner, self.scores)
        runner.sampler.initialized.connect(self.clock.begin)

    def on_training_step(self, runner: Runner, iterations: int) -> None:
        games = runner.policy_avg_stats.get(RAW_RETURN, [()])[0]
        if self.scores.add(iterations * PUBLISHED_BATCH, list(games)):
            self.scores.end()
            leave(self.folder, "")


class Clock(EventLoopObject):
    """Where the runner's own events arrive."""

    def __init__(self, runner: Runner, scores: TrainingScores) -> None:
        super().__init__(runner.event_loop, "clock")
        self.scores = scores

    def begin(self) -> None:
        self.scores.begin()


def game_of(run: dict[str, Any]) -> str:
    names = {spec.env_id: spec.name for spec in ATARI_ENVS}
    name: str = names[f"{run['game'].title().replace('_', '')}NoFrameskip-v4"]
    return name


def arguments(run: dict[str, Any], folder: str, **values: Any) -> list[str]:
    common = {
        "env": game_of(run), "train_dir": folder, "device": "cpu",
        "async_rl": run["system"].endswith("async"), "num_workers": run["workers"],
        "worker_num_splits": 2 if run["double_buffered"] else 1,
        "save_every_sec": 10**6, "save_best_every_sec": 10**6,
    }  # fmt: skip
    return ["--algo=APPO", *(f"--{name}={value}" for name, value in (common | values).items())]


def settings(run: dict[str, Any], folder: str) -> list[str]:
    return arguments(
        run, folder, seed=1, num_envs_per_worker=run["num_envs"] // run["workers"],
        rollout=run["steps"], batch_size=run["num_envs"] * run["steps"] // 4,
        num_batches_per_epoch=4, num_epochs=4, max_policy_lag=10**6, normalize_input=False,
        normalize_returns=False, lr_schedule="constant", train_for_env_steps=10**9,
    )  # fmt: skip


def published(run: dict[str, Any], folder: str) -> list[str]:
    """Return what is not as in its example, whose own settings count else."""
    return arguments(
        run, folder, seed=run["seed"], num_envs_per_worker=PUBLISHED_ENVS // run["workers"],
        train_for_env_steps=PUBLISHED_STEPS, summaries_use_frameskip=False,
    )  # fmt: skip


def main(run: dict[str, Any]) -> None:
    register_atari_components()
    if run["channels_last"]:
        global_model_factory().register_encoder_factory(ChannelsLast)
    folder, scores = tempfile.mkdtemp(), TrainingScores.of(run)
    chosen = settings(run, folder) if scores is None else published(run, folder)
    _, runner = make_runner(parse_atari_args(chosen))
    if scores is None:
        watch: AlgoObserver = Watch(
            Stopwatch(run["num_envs"] * run["steps"], run["seconds"]), folder
        )
    else:
        watch = ScoresWatch(scores, folder)
    runner.register_observer(watch)
    status = runner.init()
    if status == ExperimentStatus.SUCCESS:
        status = runner.run()
    if scores is None or status != ExperimentStatus.SUCCESS:
        sys.exit("the training did not start, or ended too early")
    scores.end()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[2]))
