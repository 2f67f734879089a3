"""Ranks, Friedman's test and Nemenyi's critical difference: Demšar's example, scipy, size."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from pl_fed.functional.rank_correlation import mid_ranks
from pl_fed.statistics import compare_ranks, critical_difference, friedman_test
from pl_fed.statistics.ranks import block_ranks, group_ranks

several = settings(max_examples=60, deadline=None, derandomize=True, database=None)
shapes = st.tuples(st.integers(2, 8), st.integers(3, 6))
tables = arrays(np.float64, shapes, elements=st.integers(0, 3).map(float))  # with ties

# AUC of C4.5 on 14 data sets, with a limit m of samples in a leaf, with a confidence factor cf, and
# with both: table 6 of Demšar, 2006
DEMSAR = np.array(
    [
        [0.763, 0.768, 0.771, 0.798],
        [0.599, 0.591, 0.590, 0.569],
        [0.954, 0.971, 0.968, 0.967],
        [0.628, 0.661, 0.654, 0.657],
        [0.882, 0.888, 0.886, 0.898],
        [0.936, 0.931, 0.916, 0.931],
        [0.661, 0.668, 0.609, 0.685],
        [0.583, 0.583, 0.563, 0.625],
        [0.775, 0.838, 0.866, 0.875],
        [1.000, 1.000, 1.000, 1.000],
        [0.940, 0.962, 0.965, 0.962],
        [0.619, 0.666, 0.614, 0.669],
        [0.972, 0.981, 0.9751, 0.975],
        [0.957, 0.978, 0.946, 0.970],
    ]
)
NAMES = ["C4.5", "C4.5+m", "C4.5+cf", "C4.5+m+cf"]


def test_demsars_example():
    """Section 3.2.2: ranks 3.143, 2.000, 2.893, 1.964, and F above the critical 2.85."""
    comparison = compare_ranks(DEMSAR, NAMES)
    assert comparison.friedman.average_ranks == pytest.approx([3.143, 2.0, 2.893, 1.964], abs=6e-4)
    assert comparison.names == ("C4.5+m+cf", "C4.5+m", "C4.5+cf", "C4.5")
    assert comparison.difference == pytest.approx(1.25, abs=0.005)
    assert comparison.groups == ((0, 3),), "Nemenyi's test finds no difference at 0.05"
    relaxed = compare_ranks(DEMSAR, NAMES, alpha=0.10)
    assert relaxed.difference == pytest.approx(1.12, abs=0.005)
    assert relaxed.groups == ((0, 2), (2, 3))
    # the paper's χ² = 9.28 and F = 3.69 have no correction for ties; without it, ours are those
    blocks, methods = DEMSAR.shape
    ranks = comparison.friedman.average_ranks
    plain = 12 * blocks / (methods * (methods + 1)) * ((ranks**2).sum() - methods * 25 / 4)
    assert plain == pytest.approx(9.28, abs=0.01)
    assert comparison.friedman.statistic > plain


@pytest.mark.slow
@several
@given(tables)
def test_friedman_is_scipys_with_ties(scores):
    test = friedman_test(scores)
    if all(len(set(row)) == 1 for row in scores):
        assert (test.statistic, test.p_value, test.chi2_p_value, test.f_p_value) == (0.0, 1, 1, 1)
        return
    expected = stats.friedmanchisquare(*scores.T)
    assert test.statistic == pytest.approx(expected.statistic, abs=1e-9)
    assert test.chi2_p_value == pytest.approx(expected.pvalue, abs=1e-9)
    ranks = np.stack([stats.rankdata(-row) for row in scores])
    assert test.average_ranks == pytest.approx(ranks.mean(0))


@several
@given(st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12))
def test_ranks_are_scipys(values):
    assert mid_ranks(np.array(values)).tolist() == stats.rankdata(values).tolist()


def test_f_statistic_is_the_two_way_analysis_of_the_ranks():
    """Iman and Davenport: the F test of methods in an analysis of variance of the ranks."""
    ranks = block_ranks(DEMSAR)
    residuals = ranks - ranks.mean(0) - ranks.mean(1, keepdims=True) + ranks.mean()
    between = len(ranks) * ((ranks.mean(0) - 2.5) ** 2).sum() / 3
    within = (residuals**2).sum() / (3 * 13)
    test = friedman_test(DEMSAR)
    assert test.f_statistic == pytest.approx(between / within)
    assert test.f_p_value == pytest.approx(stats.f.sf(between / within, 3, 39))


def test_blocks_that_agree_on_all_ranks():
    test = friedman_test(np.tile([3.0, 2.0, 1.0], (4, 1)))
    assert test.statistic == pytest.approx(4 * 2)
    assert test.f_statistic == math.inf
    assert test.f_p_value == 0.0
    assert test.p_value == pytest.approx(1 / 6**3, abs=0.003), "three blocks repeat the first one"
    assert test.average_ranks.tolist() == [1.0, 2.0, 3.0]
    tied = friedman_test([[2.0, 2.0, 1.0]] * 2)
    assert tied.f_statistic == math.inf
    assert tied.p_value == pytest.approx(1 / 3, abs=0.02)


def test_permutations_are_those_of_the_full_enumeration():
    scores = np.array([[0.9, 0.8, 0.1], [0.7, 0.7, 0.2], [0.3, 0.6, 0.1]])
    ranks = block_ranks(scores)
    spreads = [
        ((np.mean(rows, axis=0) - 2) ** 2).sum()
        for rows in itertools.product(*(itertools.permutations(row) for row in ranks))
    ]
    exact = np.mean(np.array(spreads) >= ((ranks.mean(0) - 2) ** 2).sum() - 1e-9)
    test = friedman_test(scores)
    assert 0.02 < exact < 0.5
    assert test.p_value == pytest.approx(exact, abs=0.02)
    assert friedman_test(scores).p_value == test.p_value
    assert friedman_test(scores, seed=1).p_value != test.p_value


def test_direction_and_diverged_runs():
    scores = [[0.9, 0.5, -np.inf], [0.8, -np.inf, -np.inf]]
    assert block_ranks(scores).tolist() == [[1, 2, 3], [1, 2.5, 2.5]]
    assert block_ranks([[0.1, 0.5]], higher_is_better=False).tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("methods", "alpha", "quantile"),
    [(2, 0.05, 1.960), (5, 0.05, 2.728), (10, 0.05, 3.164), (2, 0.10, 1.645), (10, 0.10, 2.920)],
)
def test_critical_values_are_those_of_demsars_table_5(methods, alpha, quantile):
    expected = quantile * math.sqrt(methods * (methods + 1) / (6 * 30))
    assert critical_difference(methods, 30, alpha) == pytest.approx(expected, rel=4e-4)


@several
@given(st.lists(st.integers(0, 40).map(lambda x: x / 4), min_size=1, max_size=9), st.floats(0.1, 4))
def test_groups_are_the_largest_ranges_within_the_difference(ranks, difference):
    ranks = sorted(ranks)
    groups = group_ranks(ranks, difference)
    close = {
        (i, j)
        for j in range(len(ranks))
        for i in range(j)
        if ranks[j] - ranks[i] <= difference + 1e-12
    }
    covered = {
        (i, j) for first, last in groups for j in range(first, last + 1) for i in range(first, j)
    }
    assert covered == close
    assert not any(a != b and a[0] >= b[0] and a[1] <= b[1] for a in groups for b in groups)


def test_bad_scores_are_refused():
    with pytest.raises(ValueError, match=r"two blocks and two methods but got shape \[1, 3\]"):
        friedman_test([[1.0, 2.0, 3.0]])
    with pytest.raises(ValueError, match="NaN in row 0, column 1"):
        friedman_test([[1.0, np.nan], [1.0, 2.0]])
    with pytest.raises(ValueError, match="3 names, one for each column of `scores`, but got 2"):
        compare_ranks(np.eye(3), ["a", "b"])
    with pytest.raises(ValueError, match="`methods` to be at least 2 but got 1"):
        critical_difference(1, 5)
    with pytest.raises(ValueError, match=r"`alpha` to be in \(0, 1\) but got 0"):
        critical_difference(3, 5, alpha=0)


@pytest.mark.slow
def test_size_and_power_of_friedman_and_nemenyi():
    """All p-values and the family of all pairs hold 0.05 with ten blocks; a shift is found."""
    generator, chi, f, nemenyi = np.random.default_rng(0), 0, 0, 0
    difference = critical_difference(5, 10)
    for _ in range(2000):
        test = friedman_test(generator.exponential(size=(10, 5)), draws=1)
        chi += test.chi2_p_value <= 0.05
        f += test.f_p_value <= 0.05
        nemenyi += np.ptp(test.average_ranks) > difference
    error = 4 * math.sqrt(0.05 * 0.95 / 2000)
    assert f / 2000 == pytest.approx(0.05, abs=error)
    assert chi / 2000 <= 0.05 + error
    assert 0.02 < nemenyi / 2000 <= 0.05 + error
    equal = [friedman_test(generator.normal(size=(3, 3)), draws=199) for _ in range(600)]
    few = np.mean([test.p_value <= 0.05 for test in equal])
    assert few <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 600), "also with three blocks and methods"
    assert np.mean([test.f_p_value <= 0.05 for test in equal]) > 0.12, "unlike F"
    shifted = [
        friedman_test(generator.normal([1.5, 0, 0, 0, 0], size=(10, 5)), draws=199).p_value
        for _ in range(200)
    ]
    assert np.mean(np.array(shifted) <= 0.05) > 0.8
