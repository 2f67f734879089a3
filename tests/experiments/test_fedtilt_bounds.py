"""Bounds on FedTilt's spreads as properties of the package's metric, and counts of the paper."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.fedtilt.bounds import (
    bound_gap,
    bound_mean,
    bound_minority_share,
    bound_square,
    count_possible,
    is_multiple,
    is_possible,
)
from experiments.fedtilt.noise import (
    Design,
    deal_all_errors,
    expect,
    fit_slope,
    measure,
    rate_differences,
    simulate,
)
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


@pytest.mark.slow
@given(federations())
def test_no_clients_exceed_the_bounds(federation):
    correct, size = federation
    count = torch.full_like(correct, size)
    figures, groups = figures_of(correct, count), correct.shape[1]
    clients = len(correct)
    square = figures.class_std_mean**2 + figures.class_std_std**2
    gap = abs(math.sqrt(groups - 1) * figures.accuracy_std - figures.class_std_std)
    assert figures.class_std_mean <= SLACK * bound_mean(figures, groups) + 1e-9
    assert square <= SLACK * bound_square(figures, groups) + 1e-9
    assert gap <= SLACK * bound_gap(figures, groups, clients) + 1e-6
    assert is_possible(figures, groups, clients)
    rounded = Figures(**{metric: round(getattr(figures, metric), 2) for metric in METRICS})
    assert is_possible(rounded, groups, clients)
    assert is_multiple(rounded.accuracy, count.numel() * size)
    sample = math.sqrt(groups / (groups - 1))
    larger = replace(
        figures,
        class_std_mean=sample * figures.class_std_mean,
        class_std_std=sample * figures.class_std_std,
    )
    assert is_possible(larger, groups, clients, sample_std=True)


@pytest.mark.slow
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(2, 11))
def test_bounds_are_attained_by_errors_in_one_group(errors, groups):
    correct = torch.full((len(errors), groups), 7)
    correct[:, 0] -= torch.tensor(errors)
    figures = figures_of(correct, torch.full_like(correct, 7))
    square = figures.class_std_mean**2 + figures.class_std_std**2
    assert figures.class_std_mean == pytest.approx(bound_mean(figures, groups), abs=1e-9)
    assert square == pytest.approx(bound_square(figures, groups), abs=1e-9)
    assert bound_gap(figures, groups, len(errors)) == pytest.approx(0, abs=1e-6)
    distance = math.sqrt(groups - 1) * figures.accuracy_std - figures.class_std_std
    assert distance == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("clients", [2, 7])
def test_third_bound_is_attained_by_one_client_with_errors_in_all_groups(clients):
    """All others have none: t is zero for them, and the deviation of t is √(n − 1) of its mean."""
    correct = torch.full((clients, 5), 9)
    correct[0] -= 3
    figures = figures_of(correct, torch.full_like(correct, 9))
    gap = 2 * figures.accuracy_std - figures.class_std_std
    assert gap == pytest.approx(bound_gap(figures, 5, clients))
    assert gap > 0


def test_groups_of_unequal_size_exceed_the_bounds():
    """One error in a group of 1 image, none in a group of 99."""
    figures = figures_of(torch.tensor([[0, 99]]), torch.tensor([[1, 99]]))
    assert figures == Figures(99.0, 0.0, pytest.approx(50.0), 0.0)
    assert not is_possible(figures, 2)
    assert bound_minority_share(figures) == pytest.approx(0.01)


@pytest.mark.slow
@given(st.integers(1, 20), st.integers(1, 20), st.data())
def test_share_of_the_smaller_group_is_bounded(smaller, larger, data):
    smaller, larger = sorted((smaller, larger))
    correct = [[data.draw(st.integers(0, size)) for size in (smaller, larger)] for _ in range(3)]
    count = torch.tensor([[smaller, larger]]).expand(3, 2)
    figures = figures_of(torch.tensor(correct), count)
    assert smaller / (smaller + larger) <= SLACK * bound_minority_share(figures)


@pytest.mark.parametrize(
    ("groups", "clients", "sample_std", "all_rows", "others"),
    [
        (2, 100, False, 8, 4),
        (2, 10, False, 8, 4),
        (2, 100, True, 12, 8),
        (2, 10, True, 11, 7),
        (10, 100, False, 23, 17),
        (10, 10, False, 23, 17),
        (10, 100, True, 25, 18),
        (10, 10, True, 23, 17),
    ],
)
def test_possible_rows_of_the_paper(groups, clients, sample_std, all_rows, others):
    assert (len(PUBLISHED), len(OTHERS)) == (27, 18)
    assert count_possible(PUBLISHED, groups, clients, sample_std) == all_rows
    assert count_possible(OTHERS, groups, clients, sample_std) == others


@pytest.mark.parametrize("clients", [10, 100])
def test_sample_deviations_over_clients_change_no_count(clients):
    factor = math.sqrt((clients - 1) / clients)
    population = [
        replace(f, accuracy_std=factor * f.accuracy_std, class_std_std=factor * f.class_std_std)
        for f in PUBLISHED
    ]
    for groups, sample_std in ((2, False), (2, True), (10, False), (10, True)):
        expected = count_possible(PUBLISHED, groups, clients, sample_std)
        assert count_possible(population, groups, clients, sample_std) == expected


def test_impossible_rows_with_ten_groups():
    impossible = {
        (row["setting"], row["method"])
        for row, figures in zip(ROWS, PUBLISHED)
        if not is_possible(figures, 10)
    }
    assert impossible == {
        ("mnist/clean", "Ditto"),
        ("mnist/clean", "FedTilt"),
        ("mnist/corruption", "Ditto"),
        ("mnist/gaussian", "Ditto"),
    }


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


def test_dealt_errors_give_the_published_accuracy():
    """98.53 % of 600 images are 8.82 errors: 8 or 9, with the published mean."""
    drawn = deal_all_errors(98.53, Design(clients=10, images=60, groups=10), draws=3000)
    numbers = (100 - drawn[:, 0]) * 6
    assert {round(float(number)) for number in numbers.unique()} == {8, 9}
    assert float(numbers.mean()) == pytest.approx(8.82, abs=0.03)


def test_single_dealt_error_has_one_spread():
    drawn = deal_all_errors(90.0, Design(clients=1, images=10, groups=2), draws=5)
    assert drawn.tolist() == [pytest.approx([90.0, 0.0, 10.0, 0.0])] * 5


def test_dealt_errors_have_the_hypergeometric_variance():
    """The mean square over groups of 6 images, of E errors in N: p(1−p)/6 · (N−6)/(N−1)."""
    drawn = deal_all_errors(80.0, Design(clients=2, images=30, groups=5), draws=4000)
    deviations = drawn[:, 1:].square().sum(1)  # σ² + μ_σ² + σ_σ²: the variance of all 10 groups
    assert float(deviations.mean()) == pytest.approx(1e4 * 0.16 / 6 * 54 / 59, rel=0.03)


def test_difference_that_noise_never_has_gets_a_small_p_value():
    design = Design(clients=10, images=60, groups=10)
    expected = expect(95.0, design)
    assert min(rate_differences(expected, expected, design).values()) > 0.5
    far = replace(expected, class_std_mean=expected.class_std_mean + 5)
    p_values = rate_differences(far, expected, design)
    assert p_values["class_std_mean"] == 0
    assert p_values["accuracy_std"] > 0.5


def test_equal_arguments_draw_equal_clients():
    design = Design(clients=3, images=10, groups=2)
    assert torch.equal(simulate(90.0, design, draws=5), simulate(90.0, design, draws=5))
    assert not torch.equal(simulate(90.0, design, draws=5), simulate(90.0, design, 5, seed=1))


def test_slope_of_the_published_spreads():
    line, r = fit_slope(PUBLISHED)
    assert (line.estimate, line.low, line.high) == pytest.approx((0.528, 0.452, 0.605), abs=1e-3)
    assert r == pytest.approx(0.943, abs=1e-3)


def test_slope_recovers_a_power_law():
    shares = [0.7, 0.8, 0.9, 0.97]
    rows = [Figures(100 * p, 0.0, 30 * (p * (1 - p)) ** 0.75, 0.0) for p in shares]
    line, r = fit_slope(rows)
    assert line.estimate == pytest.approx(0.75)
    assert r == pytest.approx(1)


def test_perfect_clients_have_no_spread():
    expected = expect(100.0, Design(clients=4, images=10, groups=2))
    assert expected == Figures(100.0, 0.0, 0.0, 0.0)
