"""Group fairness by hand, and against plain loops over samples."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pl_fed.functional.group_fairness import GROUP_FIGURES, count_groups, measure_groups

several = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def count(targets, predicted, groups, num_groups=2, num_classes=2, clients=None):
    clients = [0] * len(targets) if clients is None else clients
    tensors = [torch.tensor(v, dtype=torch.int64) for v in (clients, groups, targets, predicted)]
    shape = (max(clients, default=0) + 1, num_groups, num_classes)
    return count_groups(*tensors, shape)


def measure(*arguments, **options):
    return {name: v[0].item() for name, v in measure_groups(count(*arguments, **options)).items()}


def test_worked_example():
    """A model may be fair by one figure and not by another."""
    targets, predicted = [1, 1, 0, 0, 1, 0, 1, 0], [1, 0, 0, 1, 1, 0, 1, 0]
    gaps = measure(targets, predicted, [0] * 4 + [1] * 4)
    assert gaps == {
        "demographic_parity": 0,
        "equalized_odds": 0.5,
        "accuracy_gap": 0.5,
        "accuracy_worst": 0.5,
    }


def test_three_groups_have_the_largest_minus_the_smallest_rate():
    targets = [1, 0] * 6
    predicted = [1, 0, 1, 0, 1, 1, 0, 0, 0, 1, 0, 1]
    gaps = measure(targets, predicted, [0] * 4 + [1] * 4 + [2] * 4, num_groups=3)
    assert gaps["accuracy_gap"] == 1
    assert gaps["accuracy_worst"] == 0
    assert gaps["equalized_odds"] == 1
    assert gaps["demographic_parity"] == 0


def test_a_group_without_positives_has_no_rate():
    """Group 1 has negatives alone: its true positive rate is unknown, and no gap is 0."""
    gaps = measure([1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 1])
    assert math.isnan(gaps["equalized_odds"])
    assert (gaps["demographic_parity"], gaps["accuracy_gap"]) == (0.5, 0)


def test_a_rate_that_no_group_has_is_left_out():
    """A client of positives alone has no false positive rates, but true ones to compare."""
    gaps = measure([1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 1])
    assert gaps["equalized_odds"] == 0.5


def test_one_group_has_no_gap_but_an_accuracy():
    gaps = measure([1, 0], [1, 1], [1, 1])
    assert [math.isnan(gaps[name]) for name in GROUP_FIGURES] == [True, True, True, False]
    assert gaps["accuracy_worst"] == 0.5


def test_no_samples_have_no_figures():
    assert all(v.isnan().all() for v in measure_groups(torch.zeros(2, 3, 2, 2).long()).values())


def rates_by_loops(targets, predicted, groups, num_classes):
    """Yield the rates of each class by group; a rate without samples is missing."""
    samples = list(zip(targets, predicted, groups))
    for c, is_true in itertools.product(range(num_classes), (True, False)):
        rates = {}
        for group in set(groups):
            hits = [p == c for t, p, g in samples if g == group and (t == c) == is_true]
            if hits:
                rates[group] = float(np.mean(hits))
        yield rates


@several
@given(
    samples=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=25
    )
)
@pytest.mark.slow
def test_against_loops_over_samples(samples):
    targets, predicted, groups = zip(*samples)
    gaps = measure(targets, predicted, groups, num_groups=4, num_classes=3)
    present, odds = set(groups), [r for r in rates_by_loops(targets, predicted, groups, 3) if r]
    is_defined = len(present) > 1 and all(set(rates) == present for rates in odds)
    expected = max(max(r.values()) - min(r.values()) for r in odds) if is_defined else math.nan
    assert gaps["equalized_odds"] == pytest.approx(expected, nan_ok=True)
    shares = [
        [np.mean([p == c for p, g in zip(predicted, groups) if g == group]) for group in present]
        for c in range(3)
    ]
    parity = max(max(s) - min(s) for s in shares) if len(present) > 1 else math.nan
    assert gaps["demographic_parity"] == pytest.approx(parity, nan_ok=True)
    accuracies = [
        np.mean([t == p for t, p, g in samples if g == group]) for group in sorted(present)
    ]
    assert gaps["accuracy_worst"] == pytest.approx(min(accuracies))


@several
@given(
    samples=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=20
    )
)
@pytest.mark.slow
def test_names_of_classes_and_groups_do_not_matter(samples):
    targets, predicted, groups = (list(column) for column in zip(*samples))
    gaps = measure(targets, predicted, groups)
    swapped = measure([1 - t for t in targets], [1 - p for p in predicted], [1 - g for g in groups])
    assert swapped == pytest.approx(gaps, nan_ok=True)


def test_clients_are_counted_by_themselves():
    counts = count([1, 0, 1], [1, 1, 0], [0, 1, 0], clients=[0, 1, 1])
    assert counts[0].tolist() == [[[0, 1], [0, 0]], [[0, 1], [0, 0]], [[0, 1], [0, 0]]]
    assert counts[1].tolist() == [[[0, 1], [1, 0]], [[1, 0], [0, 1]], [[0, 0], [0, 0]]]
