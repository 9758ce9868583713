"""Answers worked by hand for the two claims of the paper."""

import math

import numpy as np
import pytest

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.theory import claimed_round_s, expected_lag, expected_round_s


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


class TestClaimedRound:
    @pytest.mark.parametrize("n", [2, 16, 1000])
    def test_of_one_exponential_step_is_the_logarithm_and_eulers_constant(self, n):
        assert claimed_round_s(n, 1, 1.0) == pytest.approx(math.log(n) + 0.57721566)

    @pytest.mark.parametrize("steps", [1, 16, 128])
    @pytest.mark.parametrize("n", [16, 128])
    def test_is_near_the_exact_expectation(self, n, steps):
        assert claimed_round_s(n, steps, 1.0) == pytest.approx(
            expected_round_s(n, steps, 1.0), rel=0.02
        )

    def test_longer_rounds_wait_less(self):
        waits = [claimed_round_s(16, steps, 1.0) / steps for steps in (1, 4, 16, 64, 256)]
        assert waits == sorted(waits, reverse=True)


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


def test_claim_1_says_nothing_of_one_environment():
    with pytest.raises(ConfigurationError, match="num_envs=1; 2 or more"):
        claimed_round_s(1, 8, 1.0)
