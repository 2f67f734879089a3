"""Choosing rows by their neighbours, against enumeration."""

import itertools

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pl_fed.functional.selection import ascending_order, closest_set, krum_scores, select_by_krum

quick = settings(max_examples=100, deadline=None, derandomize=True, database=None)


@st.composite
def distances(draw):
    """Integers, so that many distances are equal."""
    n = draw(st.integers(1, 8))
    numbers = draw(arrays.arrays(np.float64, (n, n), elements=st.integers(0, 9)))
    upper = torch.from_numpy(numbers).triu(1)
    return upper + upper.T


@pytest.mark.slow
@quick
@given(apart=distances(), data=st.data())
def test_closest_set_is_the_first_set_of_smallest_diameter(apart, data):
    n = len(apart)
    left_out = data.draw(st.integers(0, n - 1))
    sets = itertools.combinations(range(n), n - left_out)
    expected = min(sets, key=lambda candidate: apart[list(candidate)][:, list(candidate)].max())
    assert closest_set(apart, left_out).tolist() == list(expected)


@pytest.mark.parametrize(("n", "f"), [(60, 20), (200, 10)])
def test_closest_set_excludes_outliers(n, f):
    rows = torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[5 : 5 + f] += 100
    expected = [k for k in range(n) if not 5 <= k < 5 + f]
    assert closest_set(torch.cdist(rows, rows), f).tolist() == expected


@pytest.mark.slow
@quick
@given(apart=distances(), f=st.integers(0, 3), data=st.data())
def test_krum_selection_equals_a_loop(apart, f, data):
    n = len(apart)
    count = data.draw(st.integers(1, n))
    remaining, chosen = list(range(n)), []
    for _ in range(count):
        part = apart[remaining][:, remaining]
        best = krum_scores(part, max(1, len(remaining) - f - 2)).argmin()
        chosen.append(remaining.pop(int(best)))
    assert select_by_krum(apart, f, count).tolist() == sorted(chosen)


def test_krum_selection_takes_the_first_of_rows_whose_scores_differ_by_rounding():
    apart = torch.tensor([[0, 0, 9, 9], [0, 0, 9, 9], [9, 9, 0, 0], [9, 9, 0, 0]]).double()
    apart[0, 2:] *= 1 + 1e-14
    apart[2:, 0] *= 1 + 1e-14
    assert select_by_krum(apart, num_byzantine=0, count=1).tolist() == [0]


def test_infinitely_distant_rows_are_selected_last_and_once():
    apart = torch.full((4, 4), torch.inf, dtype=torch.float64).fill_diagonal_(0)
    apart[0, 1] = apart[1, 0] = 1.0
    assert select_by_krum(apart, 1, 2).tolist() == [0, 1]
    assert select_by_krum(apart, 1, 4).tolist() == [0, 1, 2, 3]


def test_scores_without_neighbours_are_zero():
    assert krum_scores(torch.ones(3, 3) - torch.eye(3), 0).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.slow
@quick
@given(data=st.data(), numbers=st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_order_is_by_number_and_then_by_client(data, numbers):
    clients = data.draw(st.permutations(range(len(numbers))))
    order = ascending_order(torch.tensor(numbers, dtype=torch.float64), torch.tensor(clients))
    expected = sorted(range(len(numbers)), key=lambda k: (numbers[k], clients[k]))
    assert order.tolist() == expected
