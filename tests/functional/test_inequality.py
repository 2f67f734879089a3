"""Inequality of clients by hand, against independent formulas, and where it is undefined."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pl_fed.functional.client_figures import find_figure, read_figures, split_figure
from pl_fed.functional.fairness import best_mean, jain_index, worst_mean
from pl_fed.functional.inequality import (
    equality_angle,
    gini_coefficient,
    largest_gap,
    pielou_evenness,
    quantile,
    share_entropy,
    tail_mean,
    uniform_divergence,
    variation_coefficient,
)

SHEET = np.array([0.9, 0.8, 0.5, 0.7])
OF_SHARES = (
    *(gini_coefficient, variation_coefficient, share_entropy, pielou_evenness),
    *(uniform_divergence, equality_angle),
)
several = settings(max_examples=100, deadline=None, derandomize=True, database=None)
results = st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        (gini_coefficient, 0.1120689655),
        (variation_coefficient, 0.2040027511),
        (share_entropy, 1.3645677564),
        (pielou_evenness, 0.9843275675),
        (uniform_divergence, 0.0217266048),
        (equality_angle, 11.5302817197),  # arccos of Jain's index in rational numbers
        (largest_gap, 0.4),
    ],
)
def test_worked_example(figure, expected):
    assert figure(SHEET) == pytest.approx(expected, abs=1e-10)
    assert figure(7 * SHEET[::-1]) == pytest.approx(expected * (7 if figure is largest_gap else 1))


@several
@given(values=results)
@pytest.mark.slow
def test_against_independent_formulas(values):
    a = np.array(values)
    if not a.any():
        return
    n, p = len(a), a / a.sum()
    pairs = sum(abs(x - y) for x, y in itertools.product(values, values))
    assert gini_coefficient(a) == pytest.approx(pairs / (2 * n * n * a.mean()), abs=1e-12)
    assert variation_coefficient(a) == pytest.approx(stats.variation(a), abs=1e-9)
    assert share_entropy(a) == pytest.approx(stats.entropy(p), abs=1e-12)
    assert uniform_divergence(a) == pytest.approx(
        max(0, stats.entropy(p, np.ones(n) / n)), abs=1e-12
    )
    jain = jain_index(torch.from_numpy(a)).item()
    assert jain == pytest.approx(1 / (1 + variation_coefficient(a) ** 2), abs=1e-12)
    cosine = min(1, math.sqrt(jain))
    assert equality_angle(a) == pytest.approx(math.degrees(math.acos(cosine)), abs=1e-5)


@several
@given(values=results, percent=st.integers(1, 100))
@pytest.mark.slow
def test_tails_and_quantiles(values, percent):
    a = np.array(values)
    assert tail_mean(a, percent) == pytest.approx(
        worst_mean(torch.from_numpy(a), percent).item(), abs=1e-12
    )
    best = best_mean(torch.from_numpy(a), percent).item()
    assert tail_mean(a, percent, largest=True) == pytest.approx(best, abs=1e-12)
    low, high = sum(a < quantile(a, percent)), sum(a <= quantile(a, percent))
    assert low <= percent / 100 * (len(a) - 1) + 1 + 1e-9
    assert high >= percent / 100 * (len(a) - 1) - 1e-9


def test_equal_clients_and_a_single_one():
    for values in (np.full(7, 0.3), np.array([0.3])):
        numbers = [figure(values) for figure in OF_SHARES]
        expected = [0, 0, math.log(len(values)), 1, 0, 0]
        assert numbers == pytest.approx(expected, abs=1e-12)
    alone = np.eye(5)[2]
    numbers = [gini_coefficient(alone), share_entropy(alone), uniform_divergence(alone)]
    assert numbers == pytest.approx([0.8, 0, math.log(5)])


@pytest.mark.parametrize("values", [[0.5, -0.1], [0.0, 0.0], [0.5, math.nan], [1.0, math.inf]])
def test_shares_of_values_that_are_no_shares_are_undefined(values):
    assert all(math.isnan(figure(np.array(values))) for figure in OF_SHARES)


@given(values=st.lists(st.floats(-10, 10), min_size=1, max_size=20), percent=st.integers(0, 100))
@pytest.mark.slow
def test_quantiles_against_numpy_and_with_infinite_values(values, percent):
    a = np.array(values)
    assert quantile(a, percent) == pytest.approx(np.quantile(a, percent / 100), abs=1e-12)
    place = percent / 100 * len(values)
    with_infinity = quantile(np.append(a, np.inf), percent)
    if place <= len(values) - 1:  # both neighbours are finite
        ordered = np.sort(a)
        low, high = ordered[int(place)], ordered[min(int(place) + 1, len(a) - 1)]
        assert with_infinity == pytest.approx(low + place % 1 * (high - low), abs=1e-12)
    else:
        assert with_infinity == np.inf


def test_quantiles_of_infinite_values():
    inf = np.inf
    assert quantile(np.array([0.1, inf, 0.3]), 50) == 0.3
    assert quantile(np.array([0.1, 0.2, 0.3, 0.4, inf]), 75) == 0.4
    assert quantile(np.array([0.1, inf, inf]), 75) == inf
    assert quantile(np.array([-inf, 0.2, 0.3]), 25) == -inf
    assert quantile(np.array([-inf, 0.1, 0.2, 0.3]), 0) == -inf
    assert np.isnan(quantile(np.array([np.nan, inf]), 50))


def test_jain_index_is_undefined_without_positive_values():
    assert jain_index(torch.tensor([0.5, -0.1])).isnan()
    assert jain_index(torch.tensor([-0.5, 0.0])).isnan()
    assert jain_index(torch.tensor([0.0, 0.0])).isnan()
    assert jain_index(torch.tensor([0.0, 1.0])) == 0.5


def test_gaps_and_tails_hold_a_nan():
    values = np.array([0.5, math.nan])
    numbers = [largest_gap(values), tail_mean(values, 50), tail_mean(values, 50, largest=True)]
    assert np.isnan([*numbers, quantile(values, 50)]).all()


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_squares_and_sums_neither_overflow_nor_underflow(scale):
    assert [figure(scale * SHEET) for figure in OF_SHARES] == pytest.approx(
        [figure(SHEET) for figure in OF_SHARES]
    )


def test_no_client_and_wrong_percentages():
    for figure in (*OF_SHARES, largest_gap):
        with pytest.raises(ValueError, match=r"at least one client but got shape \[0\]"):
            figure(np.empty(0))
    for percent in (0, 101):
        with pytest.raises(ValueError, match=rf"`percent` to be in \[1, 100\] but got {percent}"):
            tail_mean(SHEET, percent)
    with pytest.raises(ValueError, match=r"`percent` to be in \[0, 100\] but got -1"):
        quantile(SHEET, -1)


def test_worst_clients_depend_on_the_direction_of_the_metric():
    worst, best = find_figure("worst25"), find_figure("best25")
    assert worst.compute(SHEET, higher_is_better=True) == 0.5
    assert worst.compute(SHEET, higher_is_better=False) == 0.9
    assert best.compute(SHEET, higher_is_better=True) == 0.9
    assert best.compute(SHEET, higher_is_better=False) == 0.5


def test_names_of_figures():
    figures = read_figures(["gini", "q0", "gini", "worst7"])
    assert [figure.name for figure in figures] == ["gini", "q0", "worst7"]
    for name in ("worst", "worst05", "best0", "q101", "Gini", "worst5 ", ""):
        assert find_figure(name) is None, name
        assert split_figure(f"accuracy_{name}") is None, name
    assert split_figure("gini") is None, "a number of the user's own"


def test_wrong_names_are_refused():
    message = r"`federation.statistics` to hold gini, .*, with a percentage k, but got 'ginny'"
    with pytest.raises(ValueError, match=message):
        read_figures(["gini", "ginny"])
    with pytest.raises(TypeError, match=r"to be a list of names but got 'gini'"):
        read_figures("gini")
