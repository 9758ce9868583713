"""The losses of A2C and PPO worked by hand."""

import math

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, Independent, MixtureSameFamily, Normal
from torchrl.modules import TanhNormal

from hts_torchrl import ConfigurationError
from hts_torchrl.objectives.losses import (
    clipped_ratio_loss,
    clipped_value_loss,
    mean_entropy,
    policy_gradient_loss,
    value_loss,
)

CLIP = 0.25


def test_the_policy_loss_is_minus_the_mean_of_log_probability_times_advantage():
    loss = policy_gradient_loss(torch.tensor([-1.0, -2.0]), torch.tensor([3.0, -0.5]))
    assert loss.item() == -(-3.0 + 1.0) / 2


def test_the_policy_gradient_is_minus_the_advantage_over_the_samples():
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    policy_gradient_loss(log_prob, torch.tensor([3.0, -0.5])).backward()
    assert log_prob.grad.tolist() == [-1.5, 0.25]


def test_no_policy_gradient_flows_into_the_advantage():
    advantage = torch.tensor([3.0, -0.5], requires_grad=True)
    loss = policy_gradient_loss(torch.tensor([-1.0, -2.0], requires_grad=True), advantage)
    loss.backward()
    assert advantage.grad is None


def test_the_value_loss_is_the_mean_squared_error():
    assert value_loss(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 1.0])).item() == 5.0


def test_no_value_gradient_flows_into_the_returns():
    returns = torch.tensor([4.0, 1.0], requires_grad=True)
    value_loss(torch.tensor([1.0, 2.0], requires_grad=True), returns).backward()
    assert returns.grad is None


def test_the_entropy_is_the_mean_over_the_samples():
    entropy = mean_entropy(Bernoulli(torch.tensor([0.5, 1.0])))
    assert entropy.item() == pytest.approx(math.log(2) / 2, abs=1e-5)


def test_a_distribution_without_entropy_is_refused_in_one_line():
    parts = Independent(Normal(torch.zeros(4, 3, 1), torch.ones(4, 3, 1)), 1)
    mixture = MixtureSameFamily(Categorical(torch.ones(4, 3)), parts)
    with pytest.raises(ConfigurationError, match=r"^the policy's MixtureSameFamily\(.* has no ent"):
        mean_entropy(mixture)


def test_the_entropy_of_a_squashed_gaussian_is_estimated_with_gradient():
    scale = torch.full((20_000, 1), 0.1, requires_grad=True)
    entropy = mean_entropy(TanhNormal(torch.zeros(20_000, 1), scale, low=-1.0, high=1.0))
    (gradient,) = torch.autograd.grad(entropy, scale)
    # So narrow that tanh hardly bends it: the Gaussian's entropy, which grows by 1 / scale.
    assert entropy.item() == pytest.approx(0.5 * math.log(2 * math.pi * math.e * 0.01), abs=0.05)
    assert gradient.sum().item() == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize("mean", [8.0, 20.0])
def test_samples_that_round_to_a_bound_have_the_entropy_of_those_that_do_not(mean):
    """Far out tanh(x) has the slope 4 exp(-2 x), whose logarithm has the mean log(4) - 2 mean."""
    loc = torch.full((20_000, 1), mean, requires_grad=True)
    scale = torch.full((20_000, 1), 0.1, requires_grad=True)
    entropy = mean_entropy(TanhNormal(loc, scale, low=-1.0, high=1.0))
    gradients = torch.autograd.grad(entropy, (loc, scale))
    gaussian = 0.5 * math.log(2 * math.pi * math.e * 0.01)
    assert entropy.item() == pytest.approx(gaussian + math.log(4) - 2 * mean, abs=0.05)
    assert [each.sum().item() for each in gradients] == pytest.approx([-2.0, 10.0], rel=0.05)


def ratio_loss(ratio, advantage):
    log_prob = torch.tensor(ratio).log().requires_grad_()
    result = clipped_ratio_loss(log_prob, torch.zeros(len(ratio)), torch.tensor(advantage), CLIP)
    result.loss.backward()
    return result, log_prob.grad.tolist()


def test_within_the_clip_the_loss_is_minus_ratio_times_advantage():
    result, gradient = ratio_loss([1.125], [2.0])
    assert result.loss.item() == pytest.approx(-2.25)
    assert gradient == pytest.approx([-2.25])


@pytest.mark.parametrize(("ratio", "advantage", "clipped"), [(2.0, 1.0, -1.25), (0.5, -1.0, 0.75)])
def test_a_gain_beyond_the_clip_is_cut_and_has_no_gradient(ratio, advantage, clipped):
    result, gradient = ratio_loss([ratio], [advantage])
    assert result.loss.item() == clipped
    assert gradient == [0.0]


@pytest.mark.parametrize(("ratio", "advantage", "loss"), [(2.0, -1.0, 2.0), (0.5, 1.0, -0.5)])
def test_a_loss_beyond_the_clip_counts_in_full(ratio, advantage, loss):
    result, gradient = ratio_loss([ratio], [advantage])
    assert result.loss.item() == pytest.approx(loss)
    assert gradient == pytest.approx([loss])


def test_the_clip_fraction_counts_the_ratios_outside():
    result, _ = ratio_loss([1.0, 1.2, 1.3, 0.5], [1.0, 1.0, 1.0, 1.0])
    assert result.clip_fraction.item() == 0.5


def test_the_divergence_is_the_mean_of_ratio_minus_1_minus_its_logarithm():
    result, _ = ratio_loss([2.0, 1.0], [1.0, 1.0])
    assert result.approx_kl.item() == pytest.approx((1 - math.log(2)) / 2)


def test_at_the_behaviour_policy_the_gradient_is_that_of_a2c():
    _, gradient = ratio_loss([1.0, 1.0], [3.0, -0.5])
    assert gradient == [-1.5, 0.25]


def clipped_value(value, old, returns):
    value = torch.tensor([value], requires_grad=True)
    loss = clipped_value_loss(value, torch.tensor([old]), torch.tensor([returns]), CLIP)
    loss.backward()
    return loss.item(), value.grad.item()


def test_a_value_near_the_behaviour_value_has_the_squared_error():
    assert clipped_value(1.125, 1.0, 3.125) == (4.0, -4.0)


def test_a_value_that_moved_too_far_towards_the_return_keeps_the_error_of_the_clip():
    # Moved from 1 to 2, clipped to 1.25: (3 - 1.25)^2 is more than (3 - 2)^2.
    assert clipped_value(2.0, 1.0, 3.0) == (3.0625, 0.0)


def test_a_value_that_moved_away_from_the_return_has_the_squared_error():
    assert clipped_value(0.0, 1.0, 3.0) == (9.0, -6.0)
