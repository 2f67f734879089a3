"""Bounds on FedTilt's spreads as properties of the package's metric, and counts of the paper."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.fedtilt.bounds import (
    bound_mean,
    bound_minority_share,
    bound_square,
    count_possible,
    is_multiple,
    is_possible,
)
from experiments.fedtilt.noise import Design, expect, fit_slope, measure, simulate
from experiments.fedtilt.paper import METRICS, Figures, read_all_rows
from experiments.fedtilt.report import read_published_rows
from pl_fed.functional.fairness import class_std

ROWS = read_all_rows()
PUBLISHED = [Figures.from_row(row) for row in ROWS]
OTHERS = [Figures.from_row(row) for row in ROWS if row["method"] != "Ditto"]
SLACK = 1 + 1e-9


def figures_of(correct, count):
    """Returns the figures of clients by the package's metric."""
    accuracies = correct.double().sum(1) / count.sum(1)
    values = measure(accuracies, class_std(correct, count)).tolist()
    return Figures(**dict(zip(METRICS, values)))


@st.composite
def federations(draw):
    """Draw clients with K groups of equal size: the correct predictions, and the size."""
    clients, groups, size = (
        draw(st.integers(low, high)) for low, high in ((1, 6), (2, 11), (1, 9))
    )
    counts = st.lists(st.integers(0, size), min_size=groups, max_size=groups)
    correct = draw(st.lists(counts, min_size=clients, max_size=clients))
    return torch.tensor(correct), size


@given(federations())
def test_no_clients_exceed_the_bounds(federation):
    correct, size = federation
    count = torch.full_like(correct, size)
    figures, groups = figures_of(correct, count), correct.shape[1]
    square = figures.class_std_mean**2 + figures.class_std_std**2
    assert figures.class_std_mean <= SLACK * bound_mean(figures, groups) + 1e-9
    assert square <= SLACK * bound_square(figures, groups) + 1e-9
    assert is_possible(figures, groups)
    rounded = Figures(**{metric: round(getattr(figures, metric), 2) for metric in METRICS})
    assert is_possible(rounded, groups)
    assert is_multiple(rounded.accuracy, count.numel() * size)
    sample = math.sqrt(groups / (groups - 1))
    larger = replace(
        figures,
        class_std_mean=sample * figures.class_std_mean,
        class_std_std=sample * figures.class_std_std,
    )
    assert is_possible(larger, groups, sample_std=True)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(2, 11))
def test_bounds_are_attained_by_errors_in_one_group(errors, groups):
    correct = torch.full((len(errors), groups), 7)
    correct[:, 0] -= torch.tensor(errors)
    figures = figures_of(correct, torch.full_like(correct, 7))
    square = figures.class_std_mean**2 + figures.class_std_std**2
    assert figures.class_std_mean == pytest.approx(bound_mean(figures, groups), abs=1e-9)
    assert square == pytest.approx(bound_square(figures, groups), abs=1e-9)


def test_groups_of_unequal_size_exceed_the_bounds():
    """One error in a group of 1 image, none in a group of 99."""
    figures = figures_of(torch.tensor([[0, 99]]), torch.tensor([[1, 99]]))
    assert figures == Figures(99.0, 0.0, pytest.approx(50.0), 0.0)
    assert not is_possible(figures, 2)
    assert bound_minority_share(figures) == pytest.approx(0.01)


@given(st.integers(1, 20), st.integers(1, 20), st.data())
def test_share_of_the_smaller_group_is_bounded(smaller, larger, data):
    smaller, larger = sorted((smaller, larger))
    correct = [[data.draw(st.integers(0, size)) for size in (smaller, larger)] for _ in range(3)]
    count = torch.tensor([[smaller, larger]]).expand(3, 2)
    figures = figures_of(torch.tensor(correct), count)
    assert smaller / (smaller + larger) <= SLACK * bound_minority_share(figures)


@pytest.mark.parametrize(
    ("groups", "sample_std", "all_rows", "others"),
    [(2, False, 8, 4), (2, True, 12, 8), (10, False, 25, 18), (10, True, 25, 18)],
)
def test_possible_rows_of_the_paper(groups, sample_std, all_rows, others):
    assert (len(PUBLISHED), len(OTHERS)) == (27, 18)
    assert count_possible(PUBLISHED, groups, sample_std) == all_rows
    assert count_possible(OTHERS, groups, sample_std) == others


@pytest.mark.parametrize("clients", [10, 100])
def test_sample_deviations_over_clients_change_no_count(clients):
    factor = math.sqrt((clients - 1) / clients)
    population = [
        replace(f, accuracy_std=factor * f.accuracy_std, class_std_std=factor * f.class_std_std)
        for f in PUBLISHED
    ]
    for groups, sample_std in ((2, False), (2, True), (10, False), (10, True)):
        expected = count_possible(PUBLISHED, groups, sample_std)
        assert count_possible(population, groups, sample_std) == expected


def test_impossible_rows_with_ten_groups_are_dittos_on_mnist():
    impossible = {
        (row["setting"], row["method"])
        for row, figures in zip(ROWS, PUBLISHED)
        if not is_possible(figures, 10)
    }
    assert impossible == {("mnist/clean", "Ditto"), ("mnist/corruption", "Ditto")}


def test_bounds_of_a_published_row():
    ditto = Figures(99.25, 1.27, 4.37, 4.23)
    assert bound_mean(ditto, 2) == pytest.approx(0.75)
    assert bound_mean(ditto, 10) == pytest.approx(2.25)
    assert bound_square(ditto, 2) == pytest.approx(1.27**2 + 0.75**2)
    assert bound_minority_share(ditto) == pytest.approx(0.75 / 8.74)


def test_accuracies_of_few_images_are_multiples():
    assert is_multiple(99.17, 600)  # 595 of 600
    assert not is_multiple(99.25, 600)
    assert is_multiple(99.25, 6000)
    assert is_multiple(98.52, 8000), "98.525 is rounded up or down"
    assert is_multiple(98.53, 8000)


def test_report_compares_the_settings_that_are_run():
    rows = read_published_rows()
    assert len(rows) == 21
    assert all(row in ROWS for row in rows)


def test_identical_clients_have_the_closed_forms_of_a_binomial():
    """σ² is p(1−p)/60 · (n−1)/n, and the mean square over groups p(1−p)/6 · 9/10."""
    drawn = simulate(95.0, Design(clients=20, images=60, groups=10), draws=4000)
    variance = 1e4 * 0.95 * 0.05
    assert float(drawn[:, 0].mean()) == pytest.approx(95, abs=0.05)
    assert float(drawn[:, 1].square().mean()) == pytest.approx(variance / 60 * 19 / 20, rel=0.03)
    squares = drawn[:, 2].square() + drawn[:, 3].square()
    assert float(squares.mean()) == pytest.approx(variance / 6 * 9 / 10, rel=0.03)


def test_equal_arguments_draw_equal_clients():
    design = Design(clients=3, images=10, groups=2)
    assert torch.equal(simulate(90.0, design, draws=5), simulate(90.0, design, draws=5))
    assert not torch.equal(simulate(90.0, design, draws=5), simulate(90.0, design, 5, seed=1))


def test_slope_of_the_published_spreads():
    line, r = fit_slope(PUBLISHED)
    assert (line.mean, line.low, line.high) == pytest.approx((0.528, 0.452, 0.605), abs=1e-3)
    assert r == pytest.approx(0.943, abs=1e-3)


def test_slope_recovers_a_power_law():
    shares = [0.7, 0.8, 0.9, 0.97]
    rows = [Figures(100 * p, 0.0, 30 * (p * (1 - p)) ** 0.75, 0.0) for p in shares]
    line, r = fit_slope(rows)
    assert line.mean == pytest.approx(0.75)
    assert r == pytest.approx(1)


def test_perfect_clients_have_no_spread():
    expected = expect(100.0, Design(clients=4, images=10, groups=2))
    assert expected == Figures(100.0, 0.0, 0.0, 0.0)
