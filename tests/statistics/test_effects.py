"""Effect sizes: closed forms, enumeration, bias and bounds."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pl_fed.statistics import (
    cliffs_delta,
    cohens_d,
    probability_of_superiority,
    rank_biserial,
    wilcoxon_test,
)

several = settings(max_examples=60, deadline=None, derandomize=True, database=None)
samples = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=9)


def test_cohens_d_is_the_mean_in_deviations():
    differences = np.array([0.1, 0.3, 0.2, 0.6])
    plain = cohens_d(differences, np.zeros(4), corrected=False)
    assert plain == pytest.approx(differences.mean() / differences.std(ddof=1))
    factor = math.gamma(1.5) / (math.sqrt(1.5) * math.gamma(1.0))
    assert cohens_d(differences, np.zeros(4)) == pytest.approx(plain * factor)


@pytest.mark.slow
def test_correction_removes_the_bias_of_few_pairs():
    generator = np.random.default_rng(0)
    data = [generator.normal(0.8, size=5) for _ in range(6000)]
    corrected = np.mean([cohens_d(values, np.zeros(5)) for values in data])
    plain = np.mean([cohens_d(values, np.zeros(5), corrected=False) for values in data])
    assert corrected == pytest.approx(0.8, abs=0.04)
    assert plain == pytest.approx(0.8 * 1.253, abs=0.05)


def test_cohens_d_of_constant_differences_and_few_pairs():
    assert cohens_d([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 0.0
    assert cohens_d([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]) == -math.inf
    assert math.isnan(cohens_d([1.0], [2.0]))
    assert math.isnan(cohens_d([1.0, 3.0], [2.0, 2.5]))
    assert cohens_d([1.0, 3.0], [0.0, 0.0], corrected=False) == pytest.approx(math.sqrt(2))


def test_large_samples_need_no_correction():
    values = np.random.default_rng(1).normal(0.5, size=5000)
    plain = cohens_d(values, np.zeros(5000), corrected=False)
    assert cohens_d(values, np.zeros(5000)) == pytest.approx(plain, rel=2e-4)


@several
@given(samples)
def test_rank_biserial_is_wilcoxons_statistic_by_its_largest_value(values):
    number = sum(value != 0 for value in values)
    expected = (
        2 * wilcoxon_test(values, [0.0] * len(values)).statistic / max(1, number * (number + 1))
    )
    assert rank_biserial(values, [0.0] * len(values)) == pytest.approx(expected)


def test_ranks_can_point_to_the_other_side_than_the_mean():
    """Seven clients gain a little and one loses much: W⁺ = 28 and W⁻ = 8."""
    first, second = [0.51] * 7 + [0.0], [0.5] * 7 + [0.9]
    assert wilcoxon_test(first, second).statistic == 28 - 8
    assert rank_biserial(first, second) == pytest.approx(20 / 36)
    assert rank_biserial(second, first) == pytest.approx(-20 / 36)
    assert rank_biserial(first, first) == 0
    assert np.mean(first) < np.mean(second)


@pytest.mark.slow
@several
@given(samples, samples)
def test_cliffs_delta_is_the_enumeration_of_all_pairs(first, second):
    signs = [np.sign(a - b) for a in first for b in second]
    assert cliffs_delta(first, second) == pytest.approx(np.mean(signs))
    assert cliffs_delta(first, second) == -cliffs_delta(second, first)
    expected = stats.mannwhitneyu(first, second).statistic / (len(first) * len(second))
    assert probability_of_superiority(first, second) == pytest.approx(expected)


def test_cliffs_delta_of_separate_samples():
    assert cliffs_delta([3.0, 4.0], [1.0, 2.0, 2.5]) == 1.0
    assert probability_of_superiority([1.0], [1.0]) == 0.5
    with pytest.raises(ValueError, match="`second` to be finite"):
        cliffs_delta([1.0], [math.nan])
