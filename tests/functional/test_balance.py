"""Work that is shared out: all of it, fairly, and at home where that is fair."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pl_fed.functional.balance import balance_work

quick = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def load(work, owners, parts):
    return torch.zeros(parts, dtype=torch.float64).index_add_(0, owners, work.double())


@st.composite
def pieces(draw):
    parts = draw(st.integers(1, 5))
    number = st.lists(st.integers(1, 30), min_size=0, max_size=20)
    work = torch.tensor(draw(number), dtype=torch.int64)
    homes = [draw(st.integers(0, parts - 1)) for _ in work]
    return work, torch.tensor(homes, dtype=torch.int64), parts


def test_balanced_work_is_not_moved():
    homes = torch.tensor([0, 1, 0, 1, 2, 2])
    assert torch.equal(balance_work(torch.ones(6), homes, parts=3), homes)


def test_best_fitting_piece_is_moved():
    """From loads of 15 and 3 the 5 moves, which leaves 10 and 8, and then the 1."""
    work, homes = torch.tensor([1, 9, 5, 3]), torch.tensor([0, 0, 0, 1])
    assert balance_work(work, homes, parts=2).tolist() == [1, 0, 1, 1]


def test_single_piece_is_not_moved():
    assert balance_work(torch.tensor([7]), torch.tensor([1]), parts=4).tolist() == [1]


def test_no_work_gives_no_owners():
    assert balance_work(torch.ones(0), torch.ones(0, dtype=torch.int64), parts=2).tolist() == []


@pytest.mark.slow
@quick
@given(shared=pieces())
def test_excess_of_a_part_is_at_most_a_piece(shared):
    work, homes, parts = shared
    before = homes.clone()
    owners = balance_work(work, homes, parts)
    assert torch.equal(homes, before), "the input is not changed"
    assert owners.shape == homes.shape
    assert ((owners >= 0) & (owners < parts)).all()
    done, at_home = load(work, owners, parts), load(work, homes, parts)
    assert done.max() <= at_home.max()
    largest = work.max() if len(work) else 0
    assert done.max() <= max(1.02 * done.mean(), done.min() + largest)


@pytest.mark.slow
@quick
@given(shared=pieces(), factor=st.sampled_from([0.5, 2.0, 1024.0]))
def test_unit_of_work_does_not_matter(shared, factor):
    work, homes, parts = shared
    assert torch.equal(balance_work(work * factor, homes, parts), balance_work(work, homes, parts))
