"""The losses of A2C worked by hand."""

import math

import pytest
import torch
from torch.distributions import Bernoulli
from torchrl.modules import TanhNormal

from hts_torchrl.objectives.a2c import mean_entropy, policy_gradient_loss, value_loss


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


def test_the_entropy_of_a_squashed_gaussian_is_estimated_with_gradient():
    scale = torch.full((20_000, 1), 0.1, requires_grad=True)
    entropy = mean_entropy(TanhNormal(torch.zeros(20_000, 1), scale, low=-1.0, high=1.0))
    (gradient,) = torch.autograd.grad(entropy, scale)
    # So narrow that tanh hardly bends it: the Gaussian's entropy, which grows by 1 / scale.
    assert entropy.item() == pytest.approx(0.5 * math.log(2 * math.pi * math.e * 0.01), abs=0.05)
    assert gradient.sum().item() == pytest.approx(10.0, rel=0.05)
