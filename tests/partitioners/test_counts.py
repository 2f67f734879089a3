import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pl_fed.partitioners._counts import apportion, deal


def test_largest_remainders_by_hand():
    # 10 * (0.47, 0.16, 0.37) = (4.7, 1.6, 3.7): floors 4, 1, 3; the two left go to .7 and .7.
    counts = apportion(10, torch.tensor([0.47, 0.16, 0.37]), torch.Generator())
    assert counts.tolist() == [5, 1, 4]


@pytest.mark.slow
@given(
    total=st.integers(0, 1000),
    weights=st.lists(st.floats(0, 100), min_size=1, max_size=9).filter(lambda w: sum(w) > 1e-6),
    seed=st.integers(0, 2**31),
)
def test_counts_are_complete_and_within_one_of_the_exact_shares(total, weights, seed):
    weights = torch.tensor(weights, dtype=torch.float64)
    counts = apportion(total, weights, torch.Generator().manual_seed(seed))
    exact = total * weights / weights.sum()
    assert int(counts.sum()) == total
    assert (counts - exact).abs().max() < 1 + 1e-9
    assert (counts[weights == 0] == 0).all()


def test_ties_are_broken_at_random():
    generator = torch.Generator().manual_seed(0)
    firsts = sum(int(apportion(1, torch.ones(2), generator)[0]) for _ in range(1000))
    assert 400 < firsts < 600


def test_deal_gives_every_client_its_counts():
    pools = [torch.tensor([0, 2, 4]), torch.tensor([1, 3])]
    parts = deal(pools, torch.tensor([[2, 1], [0, 2]]), torch.Generator().manual_seed(0))
    assert [len(part) for part in parts] == [2, 3]
    assert set(parts[0].tolist()) < {0, 2, 4}
    assert {1, 3} < set(parts[1].tolist())


def test_deal_refuses_counts_beyond_the_pool():
    with pytest.raises(RuntimeError):
        deal([torch.arange(3)], torch.tensor([[1, 1]]), torch.Generator())
