"""Environments that do nothing look like those that do something."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from hts_torchrl import AtariEnvs, GymEnvs, HTSCollector, make_actor_critic
from hts_torchrl.envs.make_group import env_spec_of
from hts_torchrl.envs.spaces import env_spec
from hts_torchrl.tools.idle import IdleEnvs
from tests.fakes import MaskedEnvs


@pytest.mark.parametrize(
    "envs", [AtariEnvs("pong"), GymEnvs("Pendulum-v1")], ids=["pong", "pendulum"]
)
def test_they_observe_and_accept_the_same(envs):
    real = envs.group([0, 1])
    idle = IdleEnvs(real.spec).group([0, 1])
    actions = np.zeros((2, *real.spec.action.array.shape), real.spec.action.array.dtype)
    mine, other = idle.reset([1, 2]), real.reset([1, 2])
    assert {key: (a.shape, a.dtype) for key, a in mine.items()} == {
        key: (a.shape, a.dtype) for key, a in other.items()
    }
    mine, other = vars(idle.step(actions)), vars(real.step(actions))
    for name in ("reward", "score", "terminated", "truncated", "episode_end"):
        assert mine[name].shape == other[name].shape == (2,), name
        assert mine[name].dtype == other[name].dtype, name
    real.close()
    idle.close()


@pytest.mark.processes
def test_a_pool_runs_with_them():
    spec = GymEnvs("CartPole-v1").group([0]).spec
    collector = HTSCollector(
        IdleEnvs(spec), make_actor_critic("mlp", spec), num_envs=2, frames_per_batch=8,
        total_frames=24,
    )  # fmt: skip
    batches = [batch.clone() for batch in collector]
    assert [int(batch["next", "step_count"].max()) for batch in batches] == [4, 8, 12]
    assert not any(batch["next", "done"].any() for batch in batches)


def test_their_masks_allow_every_action():
    spec = env_spec_of(MaskedEnvs())
    torch.manual_seed(0)
    collector = HTSCollector(
        IdleEnvs(spec), make_actor_critic("mlp", spec), num_envs=2, num_actors=0,
        frames_per_batch=200, total_frames=200,
    )  # fmt: skip
    (batch,) = collector
    assert batch["action"].unique().tolist() == [0, 1, 2, 3]


def test_they_observe_choices_that_there_are():
    space = spaces.MultiDiscrete([[2, 3]], start=[[4, -1]])
    spec = env_spec(space, spaces.Discrete(2))
    seen = IdleEnvs(spec).group([0, 1]).reset([0, 0])["observation"]
    assert seen.tolist() == [[[4, -1]], [[4, -1]]]
