import pytest
import torch

from pl_fed.partitioners import Dirichlet

LABELS = torch.arange(10).repeat(200)


def shares(beta, seed, num_clients=5):
    parts = Dirichlet(beta).split(LABELS, num_clients, torch.Generator().manual_seed(seed))
    return torch.stack([LABELS[part].bincount(minlength=10) for part in parts], dim=1) / 200


@pytest.mark.slow
def test_shares_have_the_variance_of_the_dirichlet_law():
    # Each share has mean 1/K and variance (1/K)(1 - 1/K) / (Kβ + 1).
    for beta in (0.5, 2.0):
        drawn = torch.stack([shares(beta, seed) for seed in range(60)])
        assert float(drawn.mean()) == pytest.approx(0.2)
        assert float(drawn.var()) == pytest.approx(0.16 / (5 * beta + 1), rel=0.1)


def test_large_beta_gives_equal_shares_and_small_beta_single_clients():
    assert (shares(1e6, 0) - 0.2).abs().max() < 0.01
    assert shares(1e-3, 0, num_clients=2).max(1).values.mean() > 0.97


@pytest.mark.slow
@pytest.mark.parametrize(("num_clients", "beta"), [(500, 0.1), (1000, 0.01), (2000, 0.5)])
def test_every_client_has_a_sample_even_if_redrawing_fails(num_clients, beta):
    parts = Dirichlet(beta).split(LABELS, num_clients, torch.Generator().manual_seed(0))
    assert min(len(part) for part in parts) == 1
    assert sum(len(part) for part in parts) == 2000


def test_min_size_is_reached_by_moving_the_fewest_samples():
    partitioner = Dirichlet(min_size=3)
    counts = torch.tensor([[9, 0, 1], [4, 0, 2]])
    filled = partitioner._move_samples(counts.clone())
    # Client 1 takes three samples of client 0, which has 13: of class 0 each time.
    assert filled.tolist() == [[6, 3, 1], [4, 0, 2]]


def test_parts_have_at_least_min_size_samples():
    parts = Dirichlet(0.1, min_size=40).split(LABELS, 40, torch.Generator().manual_seed(0))
    assert min(len(part) for part in parts) >= 40


def test_errors_name_the_values():
    for beta in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"`beta` to be above 0, and finite, but got {beta}"):
            Dirichlet(beta)
    with pytest.raises(ValueError, match=r"`beta` to be at most 1e\+300 but got 1e\+308"):
        Dirichlet(1e308)
    parts = Dirichlet(1e300).split(LABELS, 10, torch.Generator().manual_seed(0))
    assert {len(part) for part in parts} == {200}, "the same mix for all"
    with pytest.raises(ValueError, match="`min_size` to be at least 1 but got 0"):
        Dirichlet(min_size=0)
    with pytest.raises(ValueError, match=r"samples \(2000\) but got 100 x 21 = 2100"):
        Dirichlet(min_size=21).split(LABELS, 100, torch.Generator())
