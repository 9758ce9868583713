"""What only a memory solves is solved with one, and not without: minutes for each seed."""

import gymnasium
import numpy as np
import pytest
from benchmarks.own_envs import HiddenVelocities, OwnEnvs
from gymnasium import spaces
from lightning.pytorch import seed_everything

from hts_torchrl import PPO, HTSDataModule
from tests.fits import quiet_trainer

pytestmark = pytest.mark.slow


class Recall(gymnasium.Env):
    """Shows a cue in the first of eight steps; in the last one, naming it earns 1, else -1."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    steps = 8

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        super().reset(seed=seed)
        self.cue, self.count = int(self.np_random.integers(2)), 0
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action):
        self.count += 1
        ends = self.count == self.steps
        reward = (1.0 if action == self.cue else -1.0) if ends else 0.0
        last = float(self.count == self.steps - 1)
        return np.array([0, last], np.float32), reward, ends, False, {}


def score(env, network: str, seed: int, total_frames: int, **learner) -> float:
    """Train, and return the greedy score of 20 games."""
    seed_everything(seed, verbose=False)
    data = HTSDataModule(
        OwnEnvs(env),
        num_envs=16,
        envs_per_executor=16,
        frames_per_batch=512,
        total_frames=total_frames,
        seed=seed,
        normalize_observation=True,
        evaluation_episodes=20,
        evaluation_greedy=True,
    )
    settings = {
        "learning_rate_decay": True,
        "normalize_value": True,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "entropy_coef": 0.0,
        "epochs": 10,
        "minibatches": 1,
        "clip": 0.2,
        "clip_value": False,
    }
    trainer = quiet_trainer(limit_val_batches=1, gradient_clip_val=0.5)
    trainer.fit(PPO(network=network, **(settings | learner)), data)
    return float(trainer.callback_metrics["eval/score"])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 6))
def test_cartpole_with_hidden_velocities_is_balanced_with_a_memory(seed):
    assert score(HiddenVelocities, "lstm", seed, 100_000, learning_rate=6e-4) >= 475


@pytest.mark.timeout(900)
def test_cartpole_with_hidden_velocities_falls_without_a_memory():
    assert score(HiddenVelocities, "mlp", 1, 100_000, learning_rate=6e-4) < 200


@pytest.mark.timeout(900)
@pytest.mark.parametrize("network", ["lstm", "gru"])
def test_a_cue_is_recalled_after_seven_steps(network):
    assert score(Recall, network, 1, 60_000, learning_rate=1e-3) > 0.9


@pytest.mark.timeout(900)
def test_a_cue_is_not_recalled_without_a_memory():
    assert score(Recall, "mlp", 1, 60_000, learning_rate=1e-3) < 0.5
