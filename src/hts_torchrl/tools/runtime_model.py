"""What the paper predicts: the time of a round, and the age of asynchronous data.

Step times are independent Gamma variables; ``shape=1`` is the exponential distribution of the
paper's Claim 1 (Liu, Yeh, Schwing: High-Throughput Synchronous Deep RL, NeurIPS 2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hts_torchrl.errors import ConfigurationError, require


def expected_round_s(num_envs: int, steps: int, mean_s: float, *, shape: float = 1.0) -> float:
    """Return the expected seconds until the last of N environments has made its steps.

    The exact expectation of the maximum of N independent Gamma(steps * shape) variables, the
    integral of ``1 - F(t)**N``, by the trapezoidal rule.

    Args:
        num_envs: N, each on its own core.
        steps: alpha, steps of each environment between two rendezvous.
        mean_s: mean seconds of a step.
        shape: of a step's Gamma distribution.
    """
    settings = {"num_envs": num_envs, "steps": steps, "mean_s": mean_s, "shape": shape}
    for name, value in settings.items():
        require(value > 0, f"{name}={value}", "more than 0")
    total, scale_s = steps * shape, mean_s / shape  # of a round of one environment
    end = total + 20 * math.sqrt(total) + 20 * math.log(num_envs + 1)
    t = torch.linspace(0, end, 200_001, dtype=torch.float64)
    unfinished = 1 - _cdf(total, t) ** num_envs
    return float(torch.trapezoid(unfinished, t)) * scale_s


def expected_lag(num_actors: int, utilisation: float) -> float:
    """Return by how many updates an asynchronous system's data is old (Claim 2).

    ``n rho / (1 - n rho)``, the queue of GA3C and IMPALA; the lag here is always 1.

    Args:
        num_actors: n.
        utilisation: rho, rate at which one actor sends data over the rate at which the learner
            takes it.

    Raises:
        ConfigurationError: for a learner that does not keep up: its queue grows without end.
    """
    load = num_actors * utilisation
    require(0 <= load < 1, f"num_actors * utilisation = {load:g}", "0 to less than 1")
    return load / (1 - load)


def _cdf(shape: float, t: torch.Tensor) -> torch.Tensor:
    probability: torch.Tensor = torch.special.gammainc(torch.full_like(t, shape), t)
    return probability


def gamma_fit(samples: Sequence[float]) -> tuple[float, float]:
    """Return mean and shape of the Gamma distribution with the samples' mean and variance.

    Raises:
        ConfigurationError: for fewer than two samples, or samples that do not vary.
    """
    values = torch.as_tensor(samples, dtype=torch.float64)
    if len(values) < 2 or float(values.var()) == 0:
        raise ConfigurationError(
            f"{len(values)} samples; two or more that differ are needed for a Gamma distribution"
        )
    mean = float(values.mean())
    return mean, mean**2 / float(values.var())


def kolmogorov_smirnov(
    samples: Sequence[float], mean: float, *, shape: float
) -> tuple[float, float]:
    """Compare samples with a Gamma distribution, as the paper does for sums of 100 step times.

    If the distribution was fitted to the same samples, ``p`` is too large (Lilliefors, 1967).

    Args:
        samples: two or more.
        mean: of the distribution.
        shape: of the distribution.

    Returns:
        D, the largest distance between the two distribution functions, and p, the probability of
        one as large by chance: the asymptotic series, with Stephens' (1970) correction for few
        samples.
    """
    values = torch.as_tensor(samples, dtype=torch.float64).sort().values
    count = len(values)
    expected = _cdf(shape, values * (shape / mean))
    rank = torch.arange(count, dtype=torch.float64)
    above, below = ((rank + 1) / count - expected).max(), (expected - rank / count).max()
    distance = float(torch.maximum(above, below))
    scaled = (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count)) * distance
    if scaled < 0.2:  # where the series does not converge; it is 1 up to 12 digits
        return distance, 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return distance, min(1.0, max(0.0, 2 * sum(terms)))
