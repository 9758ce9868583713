"""Statistics of scores whose figures are known."""

import math

import numpy as np
import pytest
from scipy import stats

from hts_torchrl.tools.report.intervals import (
    interquartile_curve,
    interquartile_mean,
    probability_of_improvement,
)

SCORES = np.array([1000.0, 10, 20, 30, 40, 50, 60, 0])


class TestInterquartileMean:
    def test_is_the_mean_of_the_middle_half(self):
        assert interquartile_mean(SCORES).value == (20 + 30 + 40 + 50) / 4

    def test_has_the_interval_of_a_percentile_bootstrap(self):
        estimate = interquartile_mean(SCORES)
        expected = stats.bootstrap(
            [SCORES],
            lambda x, axis: stats.trim_mean(x, 0.25, axis=axis),
            method="percentile",
            rng=np.random.default_rng(5),
        ).confidence_interval
        assert estimate.low == pytest.approx(expected.low, rel=0.15)
        assert estimate.high == pytest.approx(expected.high, rel=0.15)

    def test_has_no_interval_of_one_run(self):
        value, *interval = interquartile_mean(np.array([7.0]))
        assert value == 7
        assert all(math.isnan(bound) for bound in interval)

    def test_is_the_same_each_time_and_leaves_numpys_generator_alone(self):
        np.random.seed(3)  # noqa: NPY002
        expected = np.random.random()  # noqa: NPY002
        np.random.seed(3)  # noqa: NPY002
        first = interquartile_mean(SCORES)
        assert np.random.random() == expected  # noqa: NPY002
        assert interquartile_mean(SCORES) == first


class TestProbabilityOfImprovement:
    def test_counts_pairs_and_equal_scores_half(self):
        # 3 > 1, 3 = 3, 4 > 1, 4 > 3
        estimate = probability_of_improvement(np.array([3.0, 4]), np.array([1.0, 3]))
        assert estimate.value == 3.5 / 4
        assert estimate.low <= estimate.value <= estimate.high

    def test_is_certain_where_all_are_higher(self):
        estimate = probability_of_improvement(np.array([5.0, 6]), np.array([1.0, 2, 3]))
        assert estimate == (1, 1, 1)

    def test_is_not_told_of_one_run(self):
        assert probability_of_improvement(np.array([5.0]), np.array([1.0, 2])) is None


class TestInterquartileCurve:
    def test_is_the_mean_where_all_runs_are(self):
        curve = interquartile_curve(
            [
                (np.array([0.0, 10, 20]), np.array([0.0, 10, 20])),
                (np.array([5.0, 15]), np.array([0.0, 20])),
            ]
        )
        assert curve.place.tolist() == [5, 10, 15]
        assert curve.value.tolist() == [2.5, 10, 17.5]
        assert curve.low.tolist() == [0, 10, 15]  # of two runs, the lower one
        assert curve.high.tolist() == [5, 10, 20]

    def test_leaves_out_the_quarters_at_either_end(self):
        runs = [(np.array([1.0]), np.array([score])) for score in SCORES]
        assert interquartile_curve(runs).value.tolist() == [35]

    def test_of_one_run_has_no_band(self):
        curve = interquartile_curve([(np.array([1.0, 2]), np.array([3.0, 4]))])
        assert curve.value.tolist() == [3, 4]
        assert np.isnan([curve.low, curve.high]).all()

    def test_has_a_hundred_points_at_most_and_keeps_both_ends(self):
        place = np.arange(1000.0)
        curve = interquartile_curve([(place, place), (place, place)])
        assert len(curve.place) == 100
        assert (curve.place[0], curve.place[-1]) == (0, 999)
        assert (curve.value == curve.place).all()

    def test_of_runs_without_a_common_part_is_empty(self):
        curve = interquartile_curve([(np.array([1.0]), np.ones(1)), (np.array([2.0]), np.ones(1))])
        assert len(curve.place) == len(curve.value) == 0
