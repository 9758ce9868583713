"""Answers worked by hand for the two claims of the paper."""

import math

import numpy as np
import pytest

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.tools.runtime_model import (
    expected_lag,
    expected_round_s,
    gamma_fit,
    kolmogorov_smirnov,
)


def harmonic(n):
    return sum(1 / k for k in range(1, n + 1))


class TestExpectedRound:
    @pytest.mark.parametrize("n", [1, 2, 16, 1000])
    def test_of_one_exponential_step_is_the_harmonic_number(self, n):
        assert expected_round_s(n, 1, 0.02) == pytest.approx(0.02 * harmonic(n), rel=1e-6)

    @pytest.mark.parametrize("steps", [1, 7, 512])
    def test_of_one_environment_is_the_sum_of_its_steps(self, steps):
        assert expected_round_s(1, steps, 0.005, shape=3.0) == pytest.approx(steps * 0.005)

    def test_of_steps_without_variance_is_their_sum(self):
        assert expected_round_s(64, 10, 1.0, shape=1e7) == pytest.approx(10, rel=1e-3)

    def test_agrees_with_drawn_step_times(self):
        draws = np.random.default_rng(0).gamma(0.5, 2.0, (20_000, 16, 20)).sum(-1).max(-1)
        error = draws.std() / math.sqrt(len(draws))
        assert abs(expected_round_s(16, 20, 1.0, shape=0.5) - draws.mean()) < 5 * error


def test_the_lag_grows_without_end_towards_full_load():
    assert expected_lag(4, 0.125) == 1
    assert expected_lag(9, 0.1) == pytest.approx(9)
    with pytest.raises(ConfigurationError, match="utilisation = 1; 0 to less than 1 is needed"):
        expected_lag(10, 0.1)


@pytest.mark.parametrize("name", ["num_envs", "steps", "mean_s", "shape"])
def test_what_is_not_positive_is_refused_by_name(name):
    settings = {"num_envs": 2, "steps": 2, "mean_s": 1.0, "shape": 1.0, name: 0}
    with pytest.raises(ConfigurationError, match=f"{name}=0; more than 0 is needed"):
        expected_round_s(**settings)


class TestGammaFit:
    def test_has_the_mean_and_the_variance_of_the_samples(self):
        mean, shape = gamma_fit([1.0, 2.0, 3.0])
        assert mean == 2.0
        assert mean**2 / shape == pytest.approx(1.0)  # the variance of a Gamma distribution

    @pytest.mark.parametrize("samples", [[], [1.0], [2.0, 2.0]])
    def test_needs_samples_that_differ(self, samples):
        with pytest.raises(ConfigurationError, match="two or more that differ are needed"):
            gamma_fit(samples)


def exponential_quantiles(probabilities):
    return (-np.log1p(-np.asarray(probabilities))).tolist()


class TestKolmogorovSmirnov:
    def test_the_distance_is_the_largest_of_both_sides_of_every_step(self):
        samples = exponential_quantiles([0.1, 0.2, 0.9])
        # The empirical function goes from 1/3 to 2/3 at 0.2, and from 2/3 to 1 at 0.9.
        assert kolmogorov_smirnov(samples, 1.0, shape=1.0)[0] == pytest.approx(2 / 3 - 0.2)
        samples = exponential_quantiles([0.5, 0.9, 0.95])
        assert kolmogorov_smirnov(samples, 1.0, shape=1.0)[0] == pytest.approx(0.9 - 1 / 3)

    def test_the_order_and_the_unit_of_the_samples_do_not_matter(self):
        samples = exponential_quantiles([0.3, 0.1, 0.9])
        one = kolmogorov_smirnov(samples, 1.0, shape=1.0)
        thousand = [1000 * sample for sample in reversed(samples)]
        assert kolmogorov_smirnov(thousand, 1000.0, shape=1.0) == pytest.approx(one)

    def test_the_probability_is_kolmogorovs_series(self):
        samples = exponential_quantiles((np.arange(25) + 0.5) / 25 * 0.8)
        distance, probability = kolmogorov_smirnov(samples, 1.0, shape=1.0)
        assert distance == pytest.approx(1 - 24.5 / 25 * 0.8)
        scaled = (5 + 0.12 + 0.11 / 5) * distance
        assert probability == pytest.approx(
            2 * (math.exp(-2 * scaled**2) - math.exp(-8 * scaled**2))
        )
        assert probability == pytest.approx(0.1695, abs=1e-3)

    def test_a_perfect_fit_is_certain(self):
        samples = exponential_quantiles((np.arange(100) + 0.5) / 100)
        assert kolmogorov_smirnov(samples, 1.0, shape=1.0) == pytest.approx((0.005, 1.0))

    def test_samples_of_the_distribution_are_refused_as_often_as_the_level_says(self):
        random = np.random.default_rng(0)
        draws = random.gamma(3.0, 2.0, (2000, 50))
        refused = [kolmogorov_smirnov(sample, 6.0, shape=3.0)[1] < 0.05 for sample in draws]
        assert np.mean(refused) == pytest.approx(0.05, abs=0.015)
