"""SheepRL's PPO, for ``reproducibility.py``: its experiment ``ppo``.

Workers: 1 is ``env.sync_env=True``, all environments in the learner's process; 4 is Gymnasium's
``AsyncVectorEnv``, a process for each. Seeds: ``seed``, with all settings under "Reproducibility"
in its ``config.yaml``. Its loop tells no weights, so the function that trains on a rollout is
wrapped. Checkpoint: its own at the end of a run, and ``checkpoint.resume_from``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import sheeprl.algos.ppo.ppo as ppo
import torch
from sheeprl.cli import run
from training import EPOCHS, FRAMES, GAMES, MINIBATCHES, NUM_ENVS, STEPS, Training, tell


def settings(training: Training) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "exp": "ppo", "fabric.accelerator": "cpu", "seed": training.seed,
        "torch_use_deterministic_algorithms": True, "torch_backends_cudnn_benchmark": False,
        "torch_backends_cudnn_deterministic": True, "num_threads": training.threads,
        "env.num_envs": NUM_ENVS, "env.sync_env": training.workers == 1,
        "env.capture_video": False, "algo.rollout_steps": STEPS, "algo.update_epochs": EPOCHS,
        "algo.per_rank_batch_size": FRAMES // MINIBATCHES,
        "algo.total_steps": FRAMES * training.ends, "algo.run_test": False,
        "metric.log_level": 0, "checkpoint.every": 10**6, "log_root": training.folder,
        "root_dir": "run", "run_name": f"from_{training.begins}", "buffer.memmap": False,
    }  # fmt: skip
    if training.task != "cartpole":
        chosen |= {
            "env": "atari", "env.id": GAMES[training.task], "env.screen_size": 84,
            "env.frame_stack": 4, "env.grayscale": True, "algo.cnn_keys.encoder": "[rgb]",
            "algo.mlp_keys.encoder": "[]",
        }  # fmt: skip
    if training.resumed:
        (checkpoint,) = Path(training.folder).glob("run/from_0/**/*.ckpt")
        chosen["checkpoint.resume_from"] = checkpoint
    return chosen


def main(training: Training) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(training.threads)
    train_on_rollout, updates = ppo.train, iter(range(training.begins + 1, training.ends + 1))

    def train_and_tell(fabric: Any, agent: Any, *others: Any) -> Any:
        result = train_on_rollout(fabric, agent, *others)
        tell(next(updates), agent.named_parameters())
        return result

    ppo.train = train_and_tell
    sys.argv[1:] = [f"{name}={value}" for name, value in settings(training).items()]
    run()


if __name__ == "__main__":
    main(Training.asked_for())
