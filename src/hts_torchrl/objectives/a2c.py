"""The losses of advantage actor-critic (Mnih et al., 2016). Shapes: B samples."""

from __future__ import annotations

import contextlib

from torch import Tensor
from torch import distributions as d

from hts_torchrl.errors import ConfigurationError


def policy_gradient_loss(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Return ``-mean(log_prob * advantage)``; both ``[B]``, the advantage without gradient.

    Args:
        log_prob: of the actions taken, ``[B]``.
        advantage: ``[B]``, taken as a constant.
    """
    return -(log_prob * advantage.detach()).mean()


def value_loss(value: Tensor, returns: Tensor) -> Tensor:
    """Return ``mean((value - returns)^2)``; both ``[B]``.

    Args:
        value: of the observations, ``[B]``.
        returns: ``[B]``, taken as constants.
    """
    return (value - returns.detach()).square().mean()


def mean_entropy(distribution: d.Distribution) -> Tensor:
    """Return the mean entropy of B distributions.

    Where it has no closed form (a squashed Gaussian) it is estimated by one reparametrised sample,
    from torch's global generator, which a :class:`~hts_torchrl.learner.Learner` seeds for that.

    Raises:
        ConfigurationError: if that has no such sample either.
    """
    with contextlib.suppress(NotImplementedError):
        return distribution.entropy().mean()
    try:
        return -distribution.log_prob(distribution.rsample()).mean()
    except NotImplementedError:
        raise ConfigurationError(
            f"the policy's {distribution} has no entropy, and no rsample to estimate it by: give "
            "its class one of the two"
        ) from None
