"""Weak DP: by hand, against numpy, and the law of its noise."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hostile_uploads import KINDS, hostile_uploads
from scipy.stats import kstest
from torch.testing import assert_close

from pl_fed.aggregators import CAF, FLTrust, KLoss, Mean, Median, RobustLearningRate, WeakDP
from pl_fed.random import key, normal_row
from pl_fed.types import RoundContext

ROWS = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, -2.0]], dtype=torch.float64)


def merge(aggregator, rows, **fields):
    context = RoundContext(clients=torch.arange(len(rows)), **fields)
    return aggregator(rows, torch.ones(len(rows)), context)


def test_mean_without_noise_equals_the_one_by_hand():
    notes = {}
    merged = merge(WeakDP(2.0, 0.0), ROWS, note=lambda word, n: notes.update({word: int(n)}))
    assert_close(merged, torch.tensor([0.5, 0.0], dtype=torch.float64))
    assert notes == {"clipped": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_results_equal_the_formula_and_the_noise(kind):
    for seed in range(3):
        rows = hostile_uploads(kind, 9, 3, seed=seed)
        norms = np.linalg.norm(rows.numpy(), axis=1, keepdims=True)
        expected = (rows.numpy() / np.maximum(1, norms / 3.0)).mean(0)
        expected += 0.5 * normal_row(key(seed, "weak dp", 4), 40).numpy()
        merged = merge(WeakDP(3.0, 0.5), rows, seed=seed, round=4)
        assert_close(merged, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


def test_noise_is_normal_with_the_standard_deviation():
    noise = merge(WeakDP(std=0.25), torch.zeros(2, 20_000, dtype=torch.float64), seed=3)
    assert kstest(noise.numpy() / 0.25, "norm").pvalue > 0.01


def test_noise_depends_on_seed_and_round_only():
    aggregator, context = WeakDP(std=1.0), RoundContext(seed=5, round=2)
    noise = aggregator(torch.zeros(2, 7), torch.ones(2), context)
    again = aggregator(torch.zeros(9, 7), torch.ones(9), replace(context, clients=torch.arange(9)))
    assert torch.equal(noise, again)
    for other in (replace(context, seed=6), replace(context, round=3)):
        assert not torch.isclose(noise, aggregator(torch.zeros(2, 7), torch.ones(2), other)).any()


def test_other_aggregators_merge_the_clipped_uploads():
    rows = hostile_uploads("far", 9, 3)
    assert_close(merge(WeakDP(None, 0.0, Median()), rows), merge(Median(), rows), rtol=0, atol=0)
    unit = rows / rows.norm(dim=1, keepdim=True)
    rlr = RobustLearningRate(threshold=4)
    assert_close(merge(WeakDP(1.0, 0.0, rlr), rows), merge(rlr, unit))


def test_wrapper_needs_what_its_aggregator_needs():
    assert WeakDP(aggregator=FLTrust()).needs_root
    assert WeakDP(aggregator=KLoss()).needs_start_losses
    assert not WeakDP().needs_root
    assert not WeakDP().needs_start_losses
    assert WeakDP(aggregator=Mean("samples")).final_aggregator.weighting == "samples"


def test_huge_uploads_are_clipped_to_the_bound():
    rows = torch.full((3, 4), 1e30)
    assert merge(WeakDP(3.0, 0.0), rows).norm() == pytest.approx(3.0)


@pytest.mark.parametrize(("name", "value"), [("max_norm", 0.0), ("std", -1.0)])
def test_arguments_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=r"Expected argument `.*` to be"):
        WeakDP(**{name: value})


def test_anything_but_an_aggregator_is_refused():
    with pytest.raises(TypeError, match="Expected argument `aggregator`"):
        WeakDP(aggregator=CAF)
