"""Paired tests: exact small numbers, scipy, symmetry, size and power."""

import itertools
import math

import numpy as np
import pytest
from exhaustive import exhaustive_but
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from pl_fed.statistics import (
    paired_differences,
    paired_t_test,
    sign_flip_test,
    swap_test,
    wilcoxon_test,
)

several = settings(max_examples=60, deadline=None, derandomize=True, database=None)
steps = st.lists(st.integers(-4, 4), min_size=1, max_size=9)  # with ties and zeros
TESTS = [paired_t_test, wilcoxon_test, sign_flip_test]


def all_signs(number):
    return np.array(list(itertools.product([1, -1], repeat=number)))


def zeros(values):
    return [0.0] * len(values)


def test_t_test_and_wilcoxon_are_scipys():
    first, second = [0.91, 0.93, 0.96, 0.99], [0.90, 0.91, 0.97, 0.95]
    expected = stats.ttest_rel(first, second)
    test = paired_t_test(first, second)
    assert (test.statistic, test.p_value) == pytest.approx((expected.statistic, expected.pvalue))
    assert wilcoxon_test(first, second).p_value == stats.wilcoxon(first, second).pvalue


@several
@given(st.lists(st.floats(-5, 5).map(lambda x: round(x, 3)), min_size=2, max_size=40))
def test_t_test_is_scipys_for_any_sample(values):
    assume(len(set(values)) > 1)
    expected = stats.ttest_1samp(values, 0)
    test = paired_t_test(values, zeros(values))
    assert test.statistic == pytest.approx(expected.statistic, rel=1e-6, abs=1e-9)
    assert test.p_value == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)


@several
@given(steps)
@pytest.mark.slow
def test_wilcoxon_is_the_full_enumeration_with_ties_and_zeros(values):
    differences = np.array([value for value in values if value])
    test = wilcoxon_test(values, zeros(values))
    ranks = stats.rankdata(np.abs(differences))
    observed = (np.sign(differences) * ranks).sum()
    sums = all_signs(len(ranks)) @ ranks
    assert test.statistic == observed
    assert test.p_value == pytest.approx((np.abs(sums) >= abs(observed)).mean())
    assert test.pairs == len(differences)


@pytest.mark.parametrize("number", [5, 20, 50])
def test_exact_wilcoxon_without_ties_is_scipys(number):
    values = np.random.default_rng(number).normal(0.3, size=number)
    expected = stats.wilcoxon(values, method="exact").pvalue
    test = wilcoxon_test(values, zeros(values))
    assert test.exact
    assert test.p_value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("ties", [False, True])
def test_wilcoxon_of_many_pairs_is_scipys_normal_approximation(ties):
    values = np.random.default_rng(3).normal(0.1, size=200)
    values = np.round(values, 1) if ties else values
    expected = stats.wilcoxon(values, method="asymptotic").pvalue
    test = wilcoxon_test(values, zeros(values))
    assert not test.exact
    assert test.p_value == pytest.approx(expected, rel=1e-9)


def test_exact_and_approximate_wilcoxon_meet_at_fifty_pairs():
    values = np.random.default_rng(5).normal(0.25, size=50)
    exact = wilcoxon_test(values, zeros(values))
    longer = wilcoxon_test([*values, 1e-6], [0.0] * 51)
    assert exact.exact
    assert not longer.exact
    assert longer.p_value == pytest.approx(exact.p_value, rel=0.1)
    approximate = wilcoxon_test(values, zeros(values), exact_up_to=49)
    assert approximate.p_value == stats.wilcoxon(values, method="asymptotic").pvalue
    with pytest.raises(ValueError, match="`exact_up_to` to be at most 50 but got 51"):
        wilcoxon_test(values, zeros(values), exact_up_to=51)


@several
@given(steps)
def test_sign_flips_are_the_full_enumeration(values):
    sums = all_signs(len(values)) @ np.array(values)
    test = sign_flip_test(values, zeros(values))
    assert test.exact
    assert test.p_value == pytest.approx((np.abs(sums) >= abs(sum(values))).mean())


def test_random_sign_flips_are_those_of_the_enumeration():
    values = np.random.default_rng(2).normal(0.4, size=30)
    exact = sign_flip_test(values, zeros(values))
    longer = np.concatenate([values, np.full(2, 1e-9)])  # two pairs that change no sum much
    drawn = sign_flip_test(longer, zeros(longer), draws=20_000)
    assert exact.exact
    assert not drawn.exact
    assert 0.01 < exact.p_value < 0.5
    assert drawn.p_value == pytest.approx(exact.p_value, abs=0.01)


def test_random_flips_never_give_zero_and_are_seeded():
    first, second = np.arange(40) + 1.0, np.zeros(40)
    assert sign_flip_test(first, second, draws=99).p_value == 1 / 100
    mixed = np.random.default_rng(0).normal(size=40)
    assert sign_flip_test(mixed, second) == sign_flip_test(mixed[::-1], second)
    assert sign_flip_test(mixed, second) != sign_flip_test(mixed, second, seed=1)


@pytest.mark.parametrize("test", TESTS)
def test_swapped_methods_swap_the_sign(test):
    first, second = [0.5, 0.7, 0.9, 0.6, 0.65], [0.4, 0.75, 0.6, 0.55, 0.6]
    forth, back = test(first, second), test(second, first)
    assert forth.statistic == -back.statistic > 0
    assert forth.p_value == back.p_value


@pytest.mark.parametrize("test", TESTS)
def test_no_difference_gives_one(test):
    assert test([1.0, 2.0, 0.3], [1.0, 2.0, 0.3]).p_value == 1.0


def test_smallest_p_values_of_constant_differences():
    """Equal steps are the limit of the t-test; tests of ranks and signs cannot go below 2 / 2ⁿ."""
    assert paired_t_test([1.0, 2.0], [0.0, 1.0]).p_value == 0.0
    assert paired_t_test([1.0, 2.0], [0.0, 1.0]).statistic == math.inf
    for number in (2, 5, 12):
        ones, none = [1.0] * number, [0.0] * number
        assert wilcoxon_test(ones, none).p_value == 2 / 2**number
        assert sign_flip_test(ones, none).p_value == 2 / 2**number


def test_single_pair_decides_nothing():
    assert math.isnan(paired_t_test([1.0], [2.0]).p_value)
    assert wilcoxon_test([1.0], [2.0]).p_value == 1.0
    assert sign_flip_test([1.0], [2.0]).p_value == 1.0


def test_equal_steps_of_accuracies_stay_ties():
    """0.3 − 0.2 and 0.2 − 0.1 differ by a rounding error, which must not decide about ranks."""
    first, second = [0.3, 0.2, 0.1, 0.9, 0.8], [0.2, 0.1, 0.2, 0.6, 0.4]
    expected = wilcoxon_test([1, 1, -1, 3, 4], [0] * 5)
    assert wilcoxon_test(first, second) == expected
    assert paired_t_test([0.3, 0.2], [0.2, 0.1]).p_value == 0.0


@several
@given(steps, st.integers(-200, 200))
def test_differences_keep_ties_at_any_scale(values, exponent):
    scale = 10.0**exponent
    first = [(value + 7) / 10 * scale for value in values]
    differences = paired_differences(first, [0.7 * scale] * len(values))
    assert differences == pytest.approx([value / 10 * scale for value in values])
    assert len(set(differences)) == len(set(values))
    assert not np.signbit(differences[differences == 0]).any()


def test_one_explosion_does_not_erase_the_other_pairs():
    first = [0.11, 0.25, 0.37, 0.52, 0.61, 0.74, 0.86, 2e10]
    second = [0.01, 0.04, 0.05, 0.09, 0.07, 0.08, 0.1, 0.0]
    assert wilcoxon_test(first, second).p_value == pytest.approx(
        stats.wilcoxon(np.subtract(first, second)).pvalue
    )
    assert paired_differences(first, second)[:2].tolist() == [0.1, 0.21]


def test_tiny_numbers_have_differences():
    assert paired_differences([1e-305], [0.0]).tolist() == [1e-305]


@pytest.mark.parametrize("test", TESTS)
def test_bad_pairs_are_refused(test):
    with pytest.raises(ValueError, match="pairs of equal number but got 2 and 1 values"):
        test([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="`second` to be finite but got nan at place 1"):
        test([1.0, 2.0], [1.0, math.nan])
    with pytest.raises(ValueError, match="`first` to be at least 1 number"):
        test([], [])


def deviation(values):
    return values.std(-1)


def test_swaps_are_those_of_the_full_enumeration():
    first = np.array([[0.1, 0.9, 0.4], [0.7, 0.2, 0.2]])
    second = np.array([[0.5, 0.6, 0.2], [0.4, 0.8, 0.3]])
    observed = abs((deviation(first) - deviation(second)).mean())
    swaps = np.array(list(itertools.product([True, False], repeat=6))).reshape(-1, 2, 3)
    swapped = deviation(np.where(swaps, first, second)) - deviation(np.where(swaps, second, first))
    exact = (np.abs(swapped.mean(-1)) >= observed - 1e-10).mean()
    assert 0.05 < exact < 0.95
    forth, back = swap_test(first, second, deviation), swap_test(second, first, deviation)
    assert forth.p_value == pytest.approx(exact, abs=0.02)
    assert back.p_value == pytest.approx(exact, abs=0.02)
    assert forth.statistic == -back.statistic
    assert swap_test(first, second, deviation) == forth
    assert swap_test(first, second, deviation, seed=np.random.default_rng(0)) == forth
    assert swap_test(first, second, deviation, seed=np.int64(0)) == forth


def test_swaps_of_means_flip_signs():
    """Five equal steps: of 32 swaps, two are as extreme."""
    first = np.arange(5.0)[None]

    def mean(values):
        return values.mean(-1)

    assert swap_test(first + 1, first, mean).p_value == pytest.approx(2 / 32, abs=0.01)
    assert swap_test(first, first, deviation).p_value == 1.0
    with pytest.raises(ValueError, match=r"equal shape .* but got \[1, 5\] and \[1, 4\]"):
        swap_test(first, first[:, 1:], deviation)
    with pytest.raises(ValueError, match="`first` to be finite"):
        swap_test(first * np.nan, first, deviation)


def test_swaps_are_about_uniform_without_a_difference():
    generator = np.random.default_rng(0)
    p_values = [
        swap_test(*generator.normal(size=(2, 2, 20)), deviation, draws=199).p_value
        for _ in range(300)
    ]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


def rejections(test, draw, repetitions=1500):
    """The share of samples that a test rejects at 0.05."""
    samples = [draw() for _ in range(repetitions)]
    return np.mean([test(sample, zeros(sample)).p_value <= 0.05 for sample in samples])


SYMMETRIC = {
    "normal": lambda generator, n: generator.normal(size=n),
    "heavy tails": lambda generator, n: generator.standard_t(2, size=n),
    "two skewed": lambda generator, n: (
        generator.exponential(size=n) - generator.exponential(size=n)
    ),
    "ties": lambda generator, n: np.round(generator.normal(size=n)),
}


@exhaustive_but("3-two skewed", "5-ties", "10-normal", "10-heavy tails")
@pytest.mark.slow
@pytest.mark.parametrize("name", SYMMETRIC)
@pytest.mark.parametrize("number", [3, 5, 10])
def test_exact_tests_never_reject_too_often(name, number):
    """Their size is at most 0.05 for every symmetric distribution, up to four standard errors."""
    generator = np.random.default_rng(number)

    def draw():
        return SYMMETRIC[name](generator, number)

    bound = 0.05 + 4 * math.sqrt(0.05 * 0.95 / 1500)
    assert rejections(wilcoxon_test, draw) <= bound
    assert rejections(sign_flip_test, draw) <= bound
    if number < 6:
        assert rejections(sign_flip_test, draw, repetitions=100) == 0, "2 / 2⁵ is above 0.05"


@pytest.mark.slow
def test_size_and_power_of_the_t_test_are_those_of_its_distribution():
    generator = np.random.default_rng(1)
    null = rejections(paired_t_test, lambda: generator.normal(size=5), 4000)
    assert null == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 4000))
    power = rejections(paired_t_test, lambda: generator.normal(1.0, size=10), 1500)
    assert power == pytest.approx(0.8031, abs=0.041)  # noncentral t, shift √10


@pytest.mark.slow
@pytest.mark.parametrize("test", [wilcoxon_test, sign_flip_test])
def test_exact_tests_have_almost_the_power_of_the_t_test(test):
    generator = np.random.default_rng(2)
    assert 0.70 < rejections(test, lambda: generator.normal(1.0, size=10), 1000) < 0.84


@pytest.mark.slow
def test_wilcoxon_of_ties_holds_its_level_with_many_clients():
    generator = np.random.default_rng(4)
    share = rejections(wilcoxon_test, lambda: np.round(generator.normal(size=120)), 1500)
    assert share == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 1500))


def test_skewed_differences_are_rejected_too_often_by_ranks():
    """The docstring's limit: a mean of 0 alone is not the null hypothesis of Wilcoxon's test."""
    generator = np.random.default_rng(6)
    assert rejections(wilcoxon_test, lambda: generator.exponential(size=40) - 1, 500) > 0.1
