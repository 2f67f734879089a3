"""Power of the paired t-test: statsmodels, simulation, and consistency of its three questions."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from pl_fed.statistics import count_seeds, paired_t_power, paired_t_test, smallest_difference

several = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@pytest.mark.slow
@pytest.mark.parametrize("effect", [0.05, 0.5, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("num_seeds", [2, 3, 5, 20, 200])
def test_power_is_statsmodels(effect, num_seeds):
    from statsmodels.stats.power import TTestPower

    expected = TTestPower().power(effect, num_seeds, 0.05, alternative="two-sided")
    power = paired_t_power(effect, 1.0, num_seeds)
    if math.isnan(expected):  # of a large shift
        expected = power_by_quadrature(effect, num_seeds)
    assert power == pytest.approx(expected, abs=1e-6)


def power_by_quadrature(effect, num_seeds):
    """P(|Z + shift| > t √(χ² / f)), integrated over χ²."""
    freedom, shift = num_seeds - 1, effect * math.sqrt(num_seeds)
    critical = stats.t.isf(0.025, freedom)

    def density(chi):
        bound = critical * chi / math.sqrt(freedom)
        rejected = stats.norm.sf(bound - shift) + stats.norm.cdf(-bound - shift)
        return rejected * stats.chi.pdf(chi, freedom)

    return integrate.quad(density, 0, math.inf, limit=500, epsabs=1e-10)[0]


@pytest.mark.parametrize(("effect", "num_seeds"), [(0.3, 3), (1.0, 10), (8.0, 2), (12.0, 3)])
def test_power_is_the_integral_over_the_deviation(effect, num_seeds):
    expected = power_by_quadrature(effect, num_seeds)
    assert paired_t_power(effect, 1.0, num_seeds) == pytest.approx(expected, abs=1e-7)


@pytest.mark.slow
def test_number_of_seeds_is_statsmodels():
    from statsmodels.stats.power import TTestPower

    for effect in (0.2, 0.5, 1.0):
        exact = TTestPower().solve_power(effect_size=effect, alpha=0.05, power=0.8)
        assert count_seeds(effect, 1.0) == math.ceil(exact)


@pytest.mark.slow
def test_power_is_the_share_of_rejections():
    generator = np.random.default_rng(0)
    for effect, num_seeds in ((1.5, 5), (0.7, 15)):
        p_values = [
            paired_t_test(generator.normal(effect, size=num_seeds), np.zeros(num_seeds)).p_value
            for _ in range(2000)
        ]
        power = paired_t_power(effect, 1.0, num_seeds)
        share = np.mean(np.array(p_values) <= 0.05)
        assert share == pytest.approx(power, abs=4 * math.sqrt(0.25 / 2000))


@several
@given(st.floats(0.2, 5), st.floats(0.55, 0.99), st.sampled_from([0.01, 0.05, 0.1]))
@pytest.mark.slow
def test_number_of_seeds_is_the_smallest(effect, power, alpha):
    number = count_seeds(effect, 1.0, power, alpha)
    assert paired_t_power(effect, 1.0, number, alpha) >= power
    if number > 2:
        assert paired_t_power(effect, 1.0, number - 1, alpha) < power


@several
@given(st.integers(2, 60), st.floats(0.5, 0.99), st.floats(0.001, 100))
@pytest.mark.slow
def test_smallest_difference_has_the_power(num_seeds, power, deviation):
    difference = smallest_difference(deviation, num_seeds, power)
    assert paired_t_power(difference, deviation, num_seeds) == pytest.approx(power, abs=1e-6)
    assert paired_t_power(-difference, deviation, num_seeds) == pytest.approx(power, abs=1e-6)


def test_power_grows_from_the_level_to_one():
    powers = [paired_t_power(effect, 1.0, 5) for effect in (0, 0.1, 0.5, 1, 2, 5, 50, 1e6)]
    assert powers[0] == 0.05
    assert powers == sorted(powers)
    assert powers[-1] == 1.0
    by_number = [paired_t_power(0.3, 1.0, number) for number in (2, 5, 50, 1000, 1001, 10**6)]
    assert by_number == sorted(by_number)
    assert by_number[-1] == 1.0


def test_seeds_of_tiny_differences_are_counted_fast():
    """Almost normal: (1.96 + 0.8416)² / 0.001²."""
    assert count_seeds(0.001, 1.0) == pytest.approx(7_848_880, rel=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paired_t_power(1.0, 0.0, 5), "`deviation` to be a number above 0 but got 0.0"),
        (lambda: paired_t_power(1.0, 1.0, 1), "`num_seeds` to be at least 2 but got 1"),
        (lambda: paired_t_power(math.nan, 1.0, 5), "`difference` to be finite but got nan"),
        (lambda: count_seeds(0.0, 1.0), "other than 0: no number finds it"),
        (lambda: count_seeds(1e-9, 1.0), "for which 1e.09 seeds are enough"),
        (lambda: count_seeds(1.0, 1.0, power=0.01), r"above `alpha` \(0.05\) and below 1"),
        (lambda: smallest_difference(1.0, 5, alpha=2), r"`alpha` to be in \(0, 1\) but got 2"),
    ],
)
def test_bad_plans_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
