"""Fairness by hand and against numpy."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table_test

from pl_fed.functional.fairness import (
    best_mean,
    class_std,
    jain_index,
    population_std,
    population_var,
    standard_error,
    worst_mean,
)

several = settings(max_examples=100, deadline=None, derandomize=True, database=None)
accuracies = st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=40)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("clients", "tail"), [(1, 1), (9, 1), (10, 1), (11, 2), (30, 3), (70, 7), (71, 8), (1000, 100)]
)
def test_a_tenth_of_the_clients_is_rounded_up(clients, tail):
    values = torch.arange(clients, dtype=torch.float64)
    assert worst_mean(values).item() == (tail - 1) / 2
    assert best_mean(values).item() == clients - 1 - (tail - 1) / 2


def test_number_of_clients_in_a_tail_is_computed_in_integers():
    assert worst_mean(torch.arange(100.0), percent=7) == 3  # 0.07 · 100 in floats is above 7


@pytest.mark.slow
@several
@given(values=accuracies, percent=st.integers(1, 100))
def test_tails_against_numpy(values, percent):
    ordered, tail = np.sort(values), -(-len(values) * percent // 100)
    assert worst_mean(doubles(values), percent).item() == pytest.approx(ordered[:tail].mean())
    assert best_mean(doubles(values), percent).item() == pytest.approx(ordered[-tail:].mean())


@pytest.mark.slow
@several
@given(values=accuracies)
def test_spread_against_numpy(values):
    assert population_var(doubles(values)).item() == pytest.approx(np.var(values), abs=1e-15)
    assert population_std(doubles(values)).item() == pytest.approx(np.std(values), abs=1e-8)


def test_jain_index_by_hand():
    assert jain_index(doubles([3.0, 1.0])).item() == pytest.approx(16 / 20)
    assert jain_index(doubles([0.4] * 7)).item() == pytest.approx(1)
    assert jain_index(doubles([0, 0, 0, 0, 5.0])).item() == pytest.approx(1 / 5)
    assert jain_index(doubles([0.0, 0.0])).isnan()


@pytest.mark.slow
@several
@given(values=st.lists(st.integers(0, 100), min_size=1, max_size=40))
def test_jain_index_is_between_1_over_n_and_1(values):
    index = jain_index(doubles(values)).item()
    assert 1 / len(values) - 1e-12 <= index <= 1 + 1e-12 if any(values) else np.isnan(index)


def test_class_std_by_hand():
    correct = torch.tensor([[4, 1, 0], [0, 0, 7], [0, 0, 0]])
    count = torch.tensor([[4, 2, 0], [0, 0, 9], [0, 0, 0]])
    spread = class_std(correct, count)
    assert spread[:2].tolist() == [0.25, 0.0]
    assert spread[2].isnan()


@pytest.mark.slow
@several
@given(data=st.data(), classes=st.integers(1, 6))
def test_class_std_against_numpy(data, classes):
    count = data.draw(st.lists(st.integers(0, 20), min_size=classes, max_size=classes))
    correct = [data.draw(st.integers(0, n)) for n in count]
    rates = [c / n for c, n in zip(correct, count) if n]
    spread = class_std(torch.tensor([correct]), torch.tensor([count])).item()
    if rates:
        assert spread == pytest.approx(np.std(rates), abs=1e-12)
    else:
        assert np.isnan(spread)


@table_test("statistic", [worst_mean, best_mean, jain_index, population_var, population_std])
@table_test("shape", [(0,), (2, 2)])
def test_zero_clients_are_refused(statistic, shape):
    with pytest.raises(ValueError, match=r"at least one client but got shape \["):
        statistic(torch.zeros(shape))


@table_test("percent", [0, 101])
def test_percent_out_of_range_is_refused(percent):
    with pytest.raises(ValueError, match=f"`percent` .* but got {percent}"):
        worst_mean(torch.ones(3), percent)


def test_nan_is_propagated():
    for measure in (jain_index, worst_mean, best_mean):
        assert measure(torch.tensor([torch.nan, 1.0, 0.0])).isnan()


def test_jain_index_of_numbers_with_underflowing_squares():
    assert jain_index(torch.tensor([1e-30, 0.0, 0.0, 0.0])) == 0.25


def test_spreads_of_float32_numbers_with_overflowing_squares():
    values = torch.tensor([3.0, 5.0]) * 2.0**100
    assert population_std(values) == 2.0**100
    assert standard_error(values, share=0.0) == 2.0**100
    assert population_var(values).isinf(), "a variance of 2^200 is no float32 number"
    assert population_var(values.double()) == 2.0**200
    assert population_std(torch.tensor([torch.inf, 1.0])).isnan()


def test_standard_error_by_hand():
    values = doubles([1.0, 2.0, 6.0])  # mean 3, unbiased variance 7
    assert standard_error(values, share=0.25).item() == pytest.approx((0.75 * 7 / 3) ** 0.5)
    assert standard_error(values, share=1.0).item() == 0
    assert standard_error(values[:1], share=0.25).isnan()


def test_standard_error_is_the_spread_of_the_means_of_all_samples():
    population = doubles([0.0, 1.0, 1.0, 4.0, 9.0])
    samples = [population[list(ids)] for ids in itertools.combinations(range(5), 3)]
    spread = torch.stack([sample.mean() for sample in samples]).var(unbiased=False)
    expected = torch.stack([standard_error(sample, 3 / 5) ** 2 for sample in samples]).mean()
    assert expected.item() == pytest.approx(spread.item())
