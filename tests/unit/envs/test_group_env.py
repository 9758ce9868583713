import numpy as np
import torch
from torchrl.envs import (
    Compose,
    GymEnv,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)

from hts_torchrl import GymEnvs
from hts_torchrl.envs.group_env import GroupEnv
from tests.fakes import CoordinateEnvs, MultiDiscreteEnv
from tests.policies import nested_cartpole

COLUMNS = ("episode", "step")


def rollout(steps: int = 7):
    """Two environments; episodes of 3, 5 and 2 steps from environment 0 on, see CoordinateEnv."""
    env = GroupEnv(CoordinateEnvs(), [0, 1], [10, 11])
    policy = lambda td: td.set("action", torch.ones(2, dtype=torch.int64))  # noqa: E731
    batch = env.rollout(steps, policy, break_when_any_done=False)
    env.close()
    return batch


def places(observation) -> list[list[int]]:
    """Episode and step of environment 0."""
    return observation[0, :, 1:3].int().tolist()


def test_torchrl_finds_the_specs_kept():
    makers = GymEnvs("CartPole-v1"), GymEnvs("Pendulum-v1"), MultiDiscreteEnv, nested_cartpole
    for make in makers:
        env = GroupEnv(make, [0, 1], [0, 1])
        check_env_specs(env)
        env.close()


def test_what_an_environment_counts_itself_is_kept():
    def make():
        counts = RewardSum(), RewardScaling(0.0, 0.5)
        return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), *counts))

    env = GroupEnv(make, [0, 1], [0, 1])
    policy = lambda td: td.set("action", torch.tensor([[0, 1], [1, 0]]))  # noqa: E731
    batch = env.rollout(5, policy, break_when_any_done=False)
    env.close()
    assert batch["next", "reward"].unique().tolist() == [0.5]
    steps = torch.arange(1, 6).expand(2, 5).unsqueeze(-1)
    assert torch.equal(batch["next", "episode_reward"], steps.float())
    assert torch.equal(batch["next", "step_count"], steps)


def test_a_game_is_followed_by_the_next_ones_first_observation_and_has_its_last_under_next():
    batch = rollout()
    assert places(batch["observation"]) == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [1, 3]]
    assert places(batch["next", "observation"])[:4] == [[0, 1], [0, 2], [0, 3], [1, 1]]
    assert batch["next", "terminated"][0, :, 0].tolist() == [False, False, True] + [False] * 4
    assert batch["next", "truncated"][1, 4].item()


def test_score_and_steps_are_those_of_the_game_so_far():
    after = rollout()["next"]
    assert after["step_count"][0, :, 0].tolist() == [1, 2, 3, 1, 2, 3, 4]
    reward = after["reward"][0, :, 0].numpy()
    assert after["episode_reward"][0, :3, 0].tolist() == np.cumsum(reward[:3]).tolist()
    assert after["episode_reward"][0, 3] == after["reward"][0, 3]
    assert after["episode_end"][0, :, 0].tolist() == [False, False, True] + [False] * 4


def test_each_environment_has_its_seed():
    batch = rollout(1)
    assert batch["observation"][:, 0, 4].tolist() == [10, 11]
