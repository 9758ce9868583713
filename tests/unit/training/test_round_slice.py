"""Parts of rounds, and their loader over a collector without processes."""

import pytest
import torch
from tensordict import TensorDict

from hts_torchrl import A2C, GymEnvs, HTSCollector
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.training.round_slice import RoundLoader, RoundSlice


def parts(count):
    return [RoundSlice(TensorDict({}, [2, 3]), index, count) for index in range(count)]


def test_one_part_begins_the_round():
    assert [part.is_first for part in parts(3)] == [True, False, False]


def test_one_part_ends_the_round():
    assert [part.is_last for part in parts(3)] == [False, False, True]


def test_a_lone_part_begins_and_ends_the_round():
    (part,) = parts(1)
    assert part.is_first
    assert part.is_last


def collector(**settings):
    defaults = {"num_actors": 0, "num_envs": 2, "frames_per_batch": 6, "total_frames": 18}
    policy = A2C()
    policy.build_policy(GymEnvs("CartPole-v1").group([0]).spec)
    return HTSCollector(GymEnvs("CartPole-v1"), policy.policy, **{**defaults, **settings})


class TestRoundLoader:
    def test_its_length_counts_the_parts_of_all_rounds(self):
        assert len(RoundLoader(collector(), 4)) == 3 * 4

    def test_an_incomplete_last_round_is_played_whole(self):
        assert len(RoundLoader(collector(total_frames=19), 2)) == 4 * 2

    def test_each_round_comes_in_parts(self):
        parts = iter(RoundLoader(collector(), 2))
        found = [next(parts) for _ in range(6)]
        assert [(part.index, part.count) for part in found] == [(0, 2), (1, 2)] * 3

    def test_parts_of_a_round_hold_the_same_round(self):
        parts = iter(RoundLoader(collector(), 2))
        first, second, third = (next(parts).round for _ in range(3))
        assert first is second
        assert first is not third

    def test_iterating_again_goes_on(self):
        loader = RoundLoader(collector(), 1)
        first = next(iter(loader)).round
        second = next(iter(loader)).round
        assert torch.equal(
            first["next", "step_count"][:, -1] + 1, second["next", "step_count"][:, 0]
        )

    def test_more_parts_than_there_are_is_an_error_that_names_max_epochs(self):
        parts = iter(RoundLoader(collector(), 1))
        for _ in range(3):
            next(parts)
        with pytest.raises(ConfigurationError, match=r"used up.*max_epochs=1"):
            next(parts)
