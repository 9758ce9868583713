"""SheepRL on Atari, for ``throughput.py``, which makes its environment and calls it.

Its command line runs as it is, with its own wrappers. What it needs to be its fastest, and to do
the work of the other rows, is said in ``settings``.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from typing import Any

import torch
from sheeprl import cli
from stopwatch import Stopwatch, keep_freed_memory


class Enough(Exception):
    """Enough was measured."""


def settings(run: dict[str, Any]) -> list[str]:
    frames = run["num_envs"] * run["steps"]
    game = f"{run['game'].title().replace('_', '')}NoFrameskip-v4"
    ppo = run["algorithm"] == "ppo"
    epochs = ["algo.update_epochs=4", "algo.clip_vloss=False"] if ppo else []
    return [
        f"exp={run['algorithm']}_atari", f"env.id={game}", f"env.num_envs={run['num_envs']}",
        f"env.sync_env={run['envs'] == 'dummy'}", "env.grayscale=True", "env.capture_video=False",
        "env.wrapper.terminal_on_life_loss=True", f"algo.rollout_steps={run['steps']}",
        f"algo.per_rank_batch_size={frames // 4 if ppo else frames}", *epochs,
        "algo.mlp_layers=0", f"algo.compile.enabled={run['compiled']}", "algo.anneal_lr=False",
        "algo.total_steps=1000000000000", "algo.run_test=False", "buffer.memmap=False",
        "metric.log_level=0", "checkpoint.every=1000000000000", "checkpoint.save_last=False",
        "hydra.run.dir=.", "hydra.output_subdir=null",
    ]  # fmt: skip


def main(run: dict[str, Any]) -> None:
    keep_freed_memory()
    torch.set_num_threads(run["main_threads"])
    watch = Stopwatch(run["num_envs"] * run["steps"], run["seconds"])
    task: Any = importlib.import_module(f"sheeprl.algos.{run['algorithm']}.{run['algorithm']}")
    learn, build = task.train, task.build_agent

    def train(*arguments: Any) -> Any:
        result = learn(*arguments)
        if watch.round_ended():
            raise Enough
        return result

    def build_agent(*arguments: Any) -> Any:
        agent, player = build(*arguments)
        if run["channels_last"]:
            agent.to(memory_format=torch.channels_last)
            for mine, its in zip(player.parameters(), agent.parameters(), strict=True):
                mine.data = its.data  # they were one before
        return agent, player

    task.train, task.build_agent = train, build_agent
    sys.argv[1:] = settings(run)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["HYDRA_FULL_ERROR"] = "1"
        try:
            cli.run()
        except Enough:
            print(watch.steps_per_s, flush=True)
        finally:
            for process in multiprocessing.active_children():
                process.kill()


if __name__ == "__main__":
    main(json.loads(sys.argv[2]))
