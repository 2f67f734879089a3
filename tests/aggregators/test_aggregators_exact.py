"""Small numbers that can be checked by hand, and numpy."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from pl_fed.aggregators import Aggregator, Mean, Median
from pl_fed.types import RoundContext

UPLOADS = torch.tensor([[1.0, 10.0], [2.0, -4.0], [6.0, 0.0]])
SAMPLES = torch.tensor([1, 1, 2])
ROUND = RoundContext()


def random_uploads(n, d=257):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(n))


def test_mean_counts_each_client_once():
    assert torch.equal(Mean()(UPLOADS, SAMPLES, ROUND), torch.tensor([3.0, 2.0]))


def test_mean_by_samples():
    assert torch.equal(Mean("samples")(UPLOADS, SAMPLES, ROUND), torch.tensor([3.75, 1.5]))


def test_mean_by_samples_reads_the_proportions_only():
    once = Mean("samples")(UPLOADS, SAMPLES, ROUND)
    assert torch.equal(Mean("samples")(UPLOADS, SAMPLES * 0.125, ROUND), once)


def test_a_client_without_samples_has_no_say():
    uploads = torch.tensor([[1.0], [3.0], [1e30]])
    merged = Mean("samples")(uploads, torch.tensor([1, 1, 0]), ROUND)
    assert torch.equal(merged, torch.tensor([2.0]))


def test_median_of_an_odd_number():
    assert torch.equal(Median()(UPLOADS, SAMPLES, ROUND), torch.tensor([2.0, 0.0]))


def test_median_of_an_even_number_is_the_mean_of_the_middle_two():
    uploads = torch.cat([UPLOADS, torch.tensor([[100.0, 4.0]])])
    assert torch.equal(Median()(uploads, torch.ones(4), ROUND), torch.tensor([4.0, 2.0]))


def test_median_of_large_values_does_not_overflow():
    uploads = torch.tensor([[3e38], [3e38], [-3e38], [3.2e38]])
    assert_close(Median()(uploads, torch.ones(4), ROUND), torch.tensor([3e38]))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9, 10, 50])
def test_against_numpy(n):
    uploads, samples = random_uploads(n), torch.arange(1, n + 1)
    rows = uploads.double().numpy()
    by_hand = {
        Mean(): rows.mean(axis=0),
        Mean("samples"): np.average(rows, axis=0, weights=samples.numpy()),
        Median(): np.median(rows, axis=0),
    }
    for aggregator, expected in by_hand.items():
        merged = aggregator(uploads, samples, ROUND).double()
        assert_close(merged, torch.from_numpy(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("n", "most"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (9, 4), (10, 4)])
def test_the_median_withstands_a_minority(n, most):
    assert Median().max_byzantine(n) == most


def test_one_more_than_the_minority_moves_the_median():
    uploads = torch.tensor([[1.0], [2.0], [1e30], [1e30]])
    assert Median()(uploads, torch.ones(4), ROUND) > 1e29


def test_the_mean_withstands_none():
    assert Mean().max_byzantine(100) == 0
    assert Mean()(torch.tensor([[0.0], [1e30]]), torch.ones(2), ROUND) > 1e29


def test_mean_of_many_bfloat16_uploads_keeps_its_digits():
    uploads = torch.full((1000, 2), 1.0078125, dtype=torch.bfloat16)
    for aggregator in (Mean(), Mean("samples")):
        merged = aggregator(uploads, torch.ones(1000), ROUND)
        assert_close(merged, torch.full((2,), 1.0078125), rtol=1e-5, atol=0)


def test_the_users_matmul_precision_does_not_reach_the_mean():
    uploads, samples = random_uploads(64, 2000), torch.arange(1, 65)
    exact = Mean("samples")(uploads, samples, ROUND)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(Mean("samples")(uploads, samples, ROUND), exact)
    finally:
        torch.set_float32_matmul_precision(before)


def test_unknown_weighting_is_refused():
    with pytest.raises(ValueError, match=r"Expected argument `weighting` .* but got 'size'"):
        Mean("size")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(2), r"shape \[3\].*but got shape \[2\]"),
        (torch.zeros(3), r"not all 0 but got \[0.0, 0.0, 0.0\]"),
        (torch.tensor([1, -1, 1]), r"at least 0 .* but got \[1, -1, 1\]"),
        (torch.tensor([1.0, torch.nan, 1.0]), "at least 0 .* but got .*nan"),
    ],
)
def test_weights_that_are_none_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        Mean("samples")(UPLOADS, weights, ROUND)


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Aggregator()
