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
    """Whole numbers, so that many are equal."""
    n = draw(st.integers(1, 8))
    numbers = draw(arrays.arrays(np.float64, (n, n), elements=st.integers(0, 9)))
    upper = torch.from_numpy(numbers).triu(1)
    return upper + upper.T


@quick
@given(apart=distances(), data=st.data())
def test_the_closest_set_is_the_first_of_those_with_the_smallest_diameter(apart, data):
    n = len(apart)
    left_out = data.draw(st.integers(0, n - 1))
    sets = itertools.combinations(range(n), n - left_out)
    expected = min(sets, key=lambda some: apart[list(some)][:, list(some)].max())
    assert closest_set(apart, left_out).tolist() == list(expected)


@pytest.mark.parametrize(("n", "f"), [(60, 20), (200, 10)])
def test_the_closest_set_of_many_leaves_out_what_lies_far_off(n, f):
    rows = torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[5 : 5 + f] += 100
    expected = [k for k in range(n) if not 5 <= k < 5 + f]
    assert closest_set(torch.cdist(rows, rows), f).tolist() == expected


@quick
@given(apart=distances(), f=st.integers(0, 3), data=st.data())
def test_krums_choices_one_after_the_other(apart, f, data):
    n = len(apart)
    count = data.draw(st.integers(1, n))
    left, chosen = list(range(n)), []
    for _ in range(count):
        part = apart[left][:, left]
        best = krum_scores(part, max(1, len(left) - f - 2)).argmin()
        chosen.append(left.pop(int(best)))
    assert select_by_krum(apart, f, count).tolist() == sorted(chosen)


def test_rows_that_are_infinitely_far_are_chosen_last_and_once():
    apart = torch.full((4, 4), torch.inf, dtype=torch.float64).fill_diagonal_(0)
    apart[0, 1] = apart[1, 0] = 1.0
    assert select_by_krum(apart, 1, 2).tolist() == [0, 1]
    assert select_by_krum(apart, 1, 4).tolist() == [0, 1, 2, 3]


def test_without_neighbours_all_scores_are_zero():
    assert krum_scores(torch.ones(3, 3) - torch.eye(3), 0).tolist() == [0.0, 0.0, 0.0]


@quick
@given(data=st.data(), numbers=st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_the_order_is_by_number_and_then_by_client(data, numbers):
    clients = data.draw(st.permutations(range(len(numbers))))
    order = ascending_order(torch.tensor(numbers, dtype=torch.float64), torch.tensor(clients))
    expected = sorted(range(len(numbers)), key=lambda k: (numbers[k], clients[k]))
    assert order.tolist() == expected
