"""Interquartile means and performance profiles: by hand, scipy, and properties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from pl_fed.statistics import aggregate_interval, interquartile_mean, performance_profile

several = settings(max_examples=60, deadline=None, derandomize=True, database=None)
tables = arrays(
    np.float64, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=st.floats(-9, 9)
)


@several
@given(tables)
@pytest.mark.slow
def test_interquartile_mean_is_scipys_trimmed_mean(scores):
    assert interquartile_mean(scores) == pytest.approx(stats.trim_mean(scores, 0.25, axis=None))
    single = float(interquartile_mean(scores))
    stacked = interquartile_mean(np.stack([scores, scores + 1]))
    assert stacked == pytest.approx([single, single + 1])


@several
@given(tables)
def test_interval_contains_the_estimate_and_lies_within_the_scores(scores):
    interval = aggregate_interval(scores, draws=50)
    if len(scores) == 1:
        assert interval.low == -np.inf
    else:
        assert scores.min() - 1e-9 <= interval.low <= interval.high <= scores.max() + 1e-9


def test_interval_is_about_seeds_and_not_about_tasks():
    """Tasks differ much, seeds do not: resampled pooled scores would give a wide interval."""
    scores = np.array([[0.1, 0.5, 0.9, 0.3]] * 5)
    interval = aggregate_interval(scores)
    assert interval.low == pytest.approx(0.4)
    assert interval.high == pytest.approx(0.4)


def test_other_aggregates_and_seeds_of_draws():
    scores = np.random.default_rng(0).normal(size=(6, 10))

    def mean(tables):
        return tables.mean((-2, -1))

    interval = aggregate_interval(scores, mean)
    error = np.sqrt((scores.var(0) / 6).sum()) / 10
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert interval == aggregate_interval(scores[::-1], mean), "the order of seeds does not matter"
    assert interval != aggregate_interval(scores, mean, seed=1)


def test_stratified_interval_covers_the_aggregate_of_many_tasks():
    generator, covered = np.random.default_rng(0), 0
    for _ in range(300):
        scores = generator.normal(size=(10, 8)) + np.arange(8)
        interval = aggregate_interval(scores, lambda t: t.mean((-2, -1)), draws=300)
        covered += interval.low <= 3.5 <= interval.high
    assert 0.90 < covered / 300 < 0.98


def test_profile_by_hand():
    profile = performance_profile([[1.0, 10.0], [2.0, 20.0]], [0.0, 1.0, 5.0, 10.0, 20.0])
    assert profile.shares.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert profile.low[[0, 2, 4]].tolist() == profile.high[[0, 2, 4]].tolist() == [1.0, 0.5, 0.0]
    assert profile.low[1] == 0.5
    assert profile.high[1] == 1.0


@several
@given(tables, st.lists(st.floats(-9, 9), min_size=1, max_size=5))
def test_profile_falls_and_lies_in_its_band(scores, thresholds):
    thresholds = sorted(thresholds)
    profile = performance_profile(scores, thresholds, draws=40)
    assert (np.diff(profile.shares) <= 0).all()
    assert ((profile.low >= 0) & (profile.low <= profile.high) & (profile.high <= 1)).all()
    expected = [np.mean([(task > point).mean() for task in scores.T]) for point in thresholds]
    assert profile.shares == pytest.approx(expected)


def test_bad_tables_are_refused():
    message = r"`scores` without NaN but got NaN in row 1, column 0.* replace it by a number"
    with pytest.raises(ValueError, match=message):
        aggregate_interval([[1.0], [np.nan]])
    with pytest.raises(ValueError, match="finite but got inf at place 0, 0"):
        performance_profile([[np.inf]], [0.5])
    with pytest.raises(ValueError, match=r"of shape \[seeds, tasks\] .* but got shape \[3\]"):
        aggregate_interval([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="`thresholds` to be at least 1 number"):
        performance_profile([[1.0]], [])
