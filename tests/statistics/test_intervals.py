"""Student's and bootstrap intervals: closed forms, scipy, and properties."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pl_fed.statistics import Interval, bootstrap_interval, t_interval
from pl_fed.statistics.draws import split_draws

several = settings(max_examples=60, deadline=None, derandomize=True, database=None)
samples = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=2, max_size=12)


def test_interval_of_three_seeds_is_students():
    interval = t_interval([1.0, 2.0, 3.0])
    half = 4.302652729911275 / math.sqrt(3)  # the 0.975 quantile of t with 2 degrees of freedom
    ends = interval.estimate, interval.low, interval.high
    assert ends == pytest.approx((2.0, 2 - half, 2 + half))
    assert interval.text(sign=True) == "+2.00 [−0.48, +4.48]"


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_students_interval_is_scipys(level):
    values = [0.91, 0.88, 0.95, 0.90, 0.93]
    interval = t_interval(values, level)
    expected = stats.ttest_1samp(values, 0).confidence_interval(level)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
    assert interval.level == level


def test_single_seed_has_no_interval():
    assert t_interval([1.5]).text() == Interval.point(1.5).text() == "1.50"
    assert bootstrap_interval([1.5]).text() == "1.50"
    assert t_interval([1.5]).high == math.inf


def test_equal_values_have_an_interval_without_width():
    for interval in (t_interval([0.1] * 7), bootstrap_interval([0.1] * 7, draws=99)):
        assert interval.low == interval.estimate == interval.high == pytest.approx(0.1)


@pytest.mark.slow
@several
@given(samples, st.randoms())
def test_order_of_seeds_does_not_matter(values, shuffle):
    mixed = list(values)
    shuffle.shuffle(mixed)
    assert t_interval(values) == t_interval(mixed)
    assert bootstrap_interval(values, draws=50) == bootstrap_interval(mixed, draws=50)


@several
@given(samples, st.floats(-100, 100), st.floats(0.01, 100))
def test_interval_moves_and_stretches_with_the_values(values, shift, factor):
    interval = t_interval(values)
    moved = t_interval([factor * value + shift for value in values])
    scale = 1e-9 * (factor * max(map(abs, values)) + abs(shift) + 1)
    assert moved.low == pytest.approx(factor * interval.low + shift, rel=1e-6, abs=scale)
    assert moved.high == pytest.approx(factor * interval.high + shift, rel=1e-6, abs=scale)


def test_huge_and_tiny_values_neither_overflow_nor_vanish():
    for scale in (1e200, 1e-200):
        interval = t_interval([1 * scale, 2 * scale, 3 * scale])
        assert interval.high / scale == pytest.approx(4.4841, abs=1e-4)


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_bootstrap_interval_is_scipys(method):
    """scipy draws the same resamples of sorted values from the same generator."""
    values = np.sort(np.random.default_rng(1).exponential(size=15))
    interval = bootstrap_interval(values, method=method, draws=999, seed=2)
    expected = stats.bootstrap(
        (values,), np.mean, method=method, n_resamples=999, rng=np.random.default_rng(2)
    ).confidence_interval
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
    assert interval.estimate == pytest.approx(values.mean())


def test_bca_moves_the_interval_of_skewed_values_to_their_long_tail():
    values = np.random.default_rng(0).exponential(size=20)
    plain, corrected = (bootstrap_interval(values, method=m) for m in ("percentile", "bca"))
    assert corrected.low > plain.low
    assert corrected.high > plain.high


def test_bootstrap_of_another_statistic():
    values = np.arange(31.0)
    interval = bootstrap_interval(values, lambda sample: np.median(sample, axis=-1))
    assert interval.estimate == 15
    assert 8 < interval.low < 12
    assert 18 < interval.high < 22


def test_bootstrap_is_seeded():
    values = np.random.default_rng(0).normal(size=12)
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), r"`values` to be at least 1 number in one dimension but got shape \[0\]"),
        (([[1.0]],), r"got shape \[1, 1\]"),
        (([1.0, math.nan],), "finite but got nan at place 1, as of a run that diverged. Leave its"),
        (([1.0, math.inf],), "finite but got inf at place 1"),
        (([1.0, 2.0], 1.0), r"`level` to be in \(0, 1\) but got 1.0"),
    ],
)
def test_bad_samples_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        t_interval(*arguments)


def test_bad_options_of_the_bootstrap_are_refused():
    with pytest.raises(ValueError, match="bca or percentile but got 'basic'"):
        bootstrap_interval([1.0, 2.0], method="basic")
    with pytest.raises(ValueError, match="`draws` to be at least 1 but got 0"):
        bootstrap_interval([1.0, 2.0], draws=0)


@pytest.mark.parametrize("numbers", [1, 3, 10**9])
def test_chunks_of_draws_sum_up(numbers):
    assert sum(split_draws(12_345, numbers)) == 12_345


def coverage(interval, draw, repetitions=1000):
    """The share of samples with a mean of 0 of which an interval covers it."""
    intervals = [interval(draw()) for _ in range(repetitions)]
    return np.mean([i.low <= 0 <= i.high for i in intervals])


@pytest.mark.slow
def test_students_interval_of_five_normal_seeds_covers_in_95_percent():
    generator = np.random.default_rng(0)
    share = coverage(t_interval, lambda: generator.normal(size=5), repetitions=4000)
    assert share == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 4000))


@pytest.mark.slow
def test_bootstrap_covers_with_forty_seeds_and_too_rarely_with_five():
    """The docstring's warning: experiments/statistics has the table."""
    generator = np.random.default_rng(0)

    def short(values):
        return bootstrap_interval(values, draws=499)

    assert coverage(short, lambda: generator.normal(size=40)) > 0.91
    assert 0.78 < coverage(short, lambda: generator.normal(size=5)) < 0.88
