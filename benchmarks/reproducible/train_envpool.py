"""PPO in one file on EnvPool, in the manner of CleanRL (``peer_envpool.py``).

For ``reproducibility.py``. Workers: EnvPool's threads. Seeds: as CleanRL's files have them, of
Python, numpy, torch and EnvPool. EnvPool cannot save its environments. CleanRL's page on resuming
saves the agent; this checkpoint has the optimiser and torch's generator too.
"""

from __future__ import annotations

import torch
from peer_envpool import PPO, Settings
from peer_envpool import Training as Loop
from training import EPOCHS, MINIBATCHES, NUM_ENVS, STEPS, Training, tell


def main(training: Training) -> None:
    torch.set_num_threads(training.threads)
    torch.use_deterministic_algorithms(True)
    training.seed_python_and_numpy()
    torch.manual_seed(training.seed)
    run = {
        "game": training.task, "emulator_threads": training.workers, "seed": training.seed,
        "channels_last": False, "device": "cpu",
    }  # fmt: skip
    chosen = PPO | {"epochs": EPOCHS, "minibatches": MINIBATCHES}
    loop = Loop(run, Settings(NUM_ENVS, STEPS, **chosen), scored=False)
    if training.resumed:
        saved = torch.load(training.checkpoint)
        loop.agent.load_state_dict(saved["agent"])
        loop.optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["generator"])
    for update in range(training.begins + 1, training.ends + 1):
        loop.round()
        tell(update, loop.agent.named_parameters())
    if training.is_stopped:
        saved = {
            "agent": loop.agent.state_dict(),
            "optimizer": loop.optimizer.state_dict(),
            "generator": torch.get_rng_state(),
        }
        torch.save(saved, training.checkpoint)


if __name__ == "__main__":
    main(Training.asked_for())
