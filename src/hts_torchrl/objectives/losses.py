"""The losses of A2C (Mnih et al., 2016) and PPO (Schulman et al., 2017). Shapes: B samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributions as d

from hts_torchrl.errors import ConfigurationError, in_one_line
from hts_torchrl.models.distributions import entropy_of


def policy_gradient_loss(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Return ``-mean(log_prob * advantage)``; both ``[B]``, the advantage without gradient."""
    return -(log_prob * advantage.detach()).mean()


def value_loss(value: Tensor, returns: Tensor) -> Tensor:
    """Return ``mean((value - returns)^2)``; both ``[B]``, the returns without gradient."""
    return (value - returns.detach()).square().mean()


def mean_entropy(distribution: d.Distribution) -> Tensor:
    """Return the mean entropy of B distributions.

    Where it has no closed form (a squashed Gaussian) it is estimated by one reparametrised sample,
    from torch's global generator, which a :class:`~hts_torchrl.learner.Learner` seeds for that.

    Raises:
        ConfigurationError: if that has no such sample either.
    """
    try:
        return entropy_of(distribution).mean()
    except NotImplementedError:
        raise ConfigurationError(
            f"the policy's {in_one_line(distribution)} has no entropy, and no rsample to estimate "
            "it by: give its class one of the two"
        ) from None


@dataclass(frozen=True)
class RatioLoss:
    """The clipped policy loss, and what it clipped."""

    loss: Tensor
    clip_fraction: Tensor
    """Share of samples whose ratio lay outside ``1 +- clip``."""
    approx_kl: Tensor
    """Estimate of the divergence from the old policy (Schulman's k3, never negative)."""


def clipped_ratio_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip: float
) -> RatioLoss:
    """Return equation 7 of the paper as a loss; all tensors ``[B]``.

    The old policy is that which collected the data. With PPO's ``decoupled`` it is the one that
    first learned from a sample in this round.

    Args:
        log_prob: of the actions taken, at the weights that learn.
        old_log_prob: of the same actions, by the old policy.
        advantage: taken as a constant.
        clip: how far from 1 a ratio still counts.
    """
    log_ratio = log_prob - old_log_prob.detach()
    ratio = log_ratio.exp()
    gain = advantage.detach() * ratio
    clipped = advantage.detach() * ratio.clamp(1 - clip, 1 + clip)
    with torch.no_grad():
        clip_fraction = ((ratio - 1).abs() > clip).float().mean()
        approx_kl = (ratio - 1 - log_ratio).mean()
    return RatioLoss(-torch.min(gain, clipped).mean(), clip_fraction, approx_kl)


def clipped_value_loss(value: Tensor, old_value: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return the mean of the larger squared error, plain or with the value's change clipped.

    Args:
        value: of the observations ``[B]``, at the weights that learn.
        old_value: of the same, at the weights of the old policy, ``[B]``.
        returns: ``[B]``, taken as constants.
        clip: how far a value may move.
    """
    near = old_value + (value - old_value).clamp(-clip, clip)
    errors = (value - returns.detach()).square(), (near - returns.detach()).square()
    return torch.max(*errors).mean()
