"""Advantages and returns worked by hand. Shapes: N environments, T steps."""

import pytest
import torch

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.objectives.returns import gae_targets


def column(*numbers):
    """One environment's steps, ``[1, T, 1]``."""
    return torch.tensor(numbers).reshape(1, -1, 1)


def flags(*numbers):
    return column(*numbers).bool()


def targets_of(terminated=(0, 0, 0), truncated=(0, 0, 0), next_value=(5.0, 6.0, 7.0), **settings):
    terminated = flags(*terminated)
    return gae_targets(
        reward=column(1.0, 2.0, 3.0),
        value=column(4.0, 5.0, 6.0),
        next_value=column(*next_value),
        done=terminated | flags(*truncated),
        terminated=terminated,
        **{"gamma": 0.5, "gae_lambda": 0.5, **settings},
    )


def numbers(tensor):
    return tensor.flatten().tolist()


def test_advantages_decay_by_gamma_lambda():
    # delta = -0.5, 0, 0.5; then A_2 = 0.5, A_1 = 0 + 0.25 * 0.5, A_0 = -0.5 + 0.25 * 0.125.
    assert numbers(targets_of().advantage) == [-0.46875, 0.125, 0.5]


def test_returns_are_advantages_plus_values():
    assert numbers(targets_of().returns) == [3.53125, 5.125, 6.5]


def test_a_terminated_episode_is_worth_nothing_more():
    # delta_1 = 2 - 5 = -3, and nothing comes back from the next episode.
    assert numbers(targets_of(terminated=(0, 1, 0)).advantage) == [-1.25, -3.0, 0.5]


def test_a_truncated_episode_is_worth_its_last_observation():
    # delta_1 = 2 + 0.5 * 10 - 5 = 2, and nothing comes back from the next episode.
    targets = targets_of(truncated=(0, 1, 0), next_value=(5.0, 10.0, 7.0))
    assert numbers(targets.advantage) == [0.0, 2.0, 0.5]


def test_a_step_that_terminates_and_truncates_counts_as_terminated():
    both = targets_of(terminated=(0, 1, 0), truncated=(0, 1, 0))
    assert numbers(both.advantage) == [-1.25, -3.0, 0.5]


def test_lambda_0_gives_one_step_returns():
    # 1 + 5 / 2, 2 + 6 / 2, 3 + 7 / 2
    assert numbers(targets_of(gae_lambda=0.0).returns) == [3.5, 5.0, 6.5]


def test_lambda_1_gives_n_step_returns():
    # R_2 = 3 + 7 / 2, R_1 = 2 + R_2 / 2, R_0 = 1 + R_1 / 2
    assert numbers(targets_of(gae_lambda=1.0).returns) == [3.625, 5.25, 6.5]


def test_an_unroll_cuts_the_sum_and_bootstraps():
    tensors = {
        "reward": column(1.0, 1.0, 1.0, 1.0),
        "value": column(0.0, 2.0, 4.0, 6.0),
        "next_value": column(2.0, 4.0, 6.0, 8.0),
        "done": flags(0, 0, 0, 0),
        "terminated": flags(0, 0, 0, 0),
    }
    targets = gae_targets(**tensors, gamma=0.5, gae_lambda=1.0, unroll=2)
    # Of steps 0 and 1: R_1 = 1 + 4 / 2, R_0 = 1 + R_1 / 2. Of steps 2 and 3: R_3 = 1 + 8 / 2, ...
    assert numbers(targets.returns) == [2.5, 3.0, 3.5, 5.0]


def test_an_unroll_cuts_each_environment_by_itself():
    def rows(*values):
        return torch.tensor(values).unsqueeze(-1)

    zeros = torch.zeros(2, 2, 1)
    targets = gae_targets(
        reward=rows([1.0, 2.0], [3.0, 4.0]),
        value=zeros,
        next_value=zeros,
        done=zeros.bool(),
        terminated=zeros.bool(),
        gamma=0.5,
        gae_lambda=1.0,
        unroll=1,
    )
    assert targets.returns.squeeze(-1).tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_an_unroll_of_the_whole_round_changes_nothing():
    assert numbers(targets_of(unroll=3).advantage) == [-0.46875, 0.125, 0.5]


def test_an_unroll_that_does_not_divide_the_round_is_refused():
    with pytest.raises(ConfigurationError, match="unroll=2 does not divide the 3 steps"):
        targets_of(unroll=2)


def test_targets_keep_the_shape_of_the_round():
    targets = targets_of(unroll=1)
    assert targets.advantage.shape == targets.returns.shape == (1, 3, 1)
