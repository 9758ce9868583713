"""V-trace worked by hand. Shapes: one trajectory of T steps, ``[1, T, 1]``."""

import math

import pytest
import torch

from hts_torchrl.objectives.vtrace import vtrace_targets


def column(*numbers):
    return torch.tensor(numbers).reshape(1, -1, 1)


def targets_of(ratios=(1.0, 1.0), done=(0, 0), terminated=(0, 0), next_value=(5.0, 6.0), **clips):
    return vtrace_targets(
        log_prob=column(*(math.log(ratio) for ratio in ratios)),
        behaviour_log_prob=column(0.0, 0.0),
        reward=column(1.0, 2.0),
        value=column(4.0, 5.0),
        next_value=column(*next_value),
        done=column(*done).bool(),
        terminated=column(*terminated).bool(),
        gamma=0.5,
        **clips,
    )


def numbers(tensor):
    return pytest.approx(tensor.flatten().tolist(), abs=1e-6)


def test_data_of_the_newest_weights_gives_n_step_returns():
    # R_1 = 2 + 6 / 2, R_0 = 1 + R_1 / 2
    assert numbers(targets_of().returns) == [3.5, 5.0]
    assert numbers(targets_of().advantage) == [-0.5, 0.0]


def test_a_rarer_action_counts_less():
    # The first step's error is -0.5, and half of it counts; the second has none.
    targets = targets_of(ratios=(0.5, 0.25))
    assert numbers(targets.returns) == [3.75, 5.0]
    assert numbers(targets.advantage) == [-0.25, 0.0]


def test_a_likelier_action_counts_no_more_than_its_clip():
    assert numbers(targets_of(ratios=(3.0, 7.0)).returns) == [3.5, 5.0]
    # The first step's error is -0.5, and twice of it counts.
    assert numbers(targets_of(ratios=(3.0, 7.0), rho_clip=2.0).returns) == [3.0, 5.0]


def test_the_second_clip_bounds_what_later_errors_are_worth():
    # The second step's error is 1, of which the discount and the clip leave the first one half.
    assert targets_of(next_value=(5.0, 8.0)).returns[0, 0].item() == pytest.approx(4.0)
    clipped = targets_of(next_value=(5.0, 8.0), c_clip=0.5)
    assert clipped.returns[0, 0].item() == pytest.approx(3.75)


def test_a_terminated_episode_is_worth_nothing_more():
    targets = targets_of(done=(1, 0), terminated=(1, 0), next_value=(9.0, 8.0))
    assert numbers(targets.returns) == [1.0, 6.0]
    assert numbers(targets.advantage) == [-3.0, 1.0]


def test_a_truncated_episode_is_worth_its_last_observation():
    targets = targets_of(done=(1, 0), next_value=(10.0, 8.0))
    assert numbers(targets.returns) == [6.0, 6.0]
    assert numbers(targets.advantage) == [2.0, 1.0]
