"""FoolsGold against its algorithm in numpy, over rounds with changing cohorts, and by hand."""

import numpy as np
import pytest
import torch
from hostile_uploads import KINDS, hostile_uploads
from torch import nn
from torch.testing import assert_close

from pl_fed.aggregators import (
    CRFL,
    Bucketing,
    Chain,
    Clipping,
    FoolsGold,
    NearestNeighborMixing,
    WeakDP,
)
from pl_fed.aggregators.foolsgold import find_foolsgold_weights
from pl_fed.nets.rows import RowLayout
from pl_fed.preflight.privacy_rules import describe_unfit_aggregator
from pl_fed.types import RoundContext

SUMS = torch.tensor(
    [[1, 0, 0.2], [0, 1, 0.1], [-0.3, 0.2, 1], [0.6, 0.62, 0.1], [0.6, 0.6, 0.1]],
    dtype=torch.float64,
)


def context(clients, **fields):
    return RoundContext(clients=torch.as_tensor(clients), **fields)


def weigh_by_numpy(sums):
    """The weights of the authors' code, row by row."""
    n = len(sums)
    norms = np.linalg.norm(sums, axis=1)
    cosines = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if i != j and norms[i] * norms[j] > 0:
                cosines[i, j] = sums[i] @ sums[j] / (norms[i] * norms[j])
    largest = cosines.max(1) + 1e-5
    pardoned = cosines.copy()
    for i in range(n):
        for j in range(n):
            if i != j and largest[i] < largest[j]:
                pardoned[i, j] = cosines[i, j] * largest[i] / largest[j]
    alphas = np.clip(1 - pardoned.max(1), 0, 1)
    alphas /= alphas.max()
    alphas[alphas == 1] = 0.99
    return np.clip(np.log(alphas / (1 - alphas) + 1e-5) + 0.5, 0, 1)


def test_weights_equal_the_hand_computed_example():
    aggregator = FoolsGold(divisor="none")
    merged = aggregator(SUMS, torch.ones(5), context(range(5)))
    weights = torch.tensor([0.717486, 0.651431, 1, 0, 0], dtype=torch.float64)
    assert_close(merged, weights @ SUMS, rtol=1e-6, atol=1e-6)
    assert weigh_by_numpy(SUMS.numpy()) == pytest.approx(weights.numpy(), abs=1e-6)
    for divisor, number in (("clients", 5), ("weights", weights.sum())):
        result = FoolsGold(divisor=divisor)(SUMS, torch.ones(5), context(range(5)))
        assert_close(result, merged / number, rtol=1e-6, atol=1e-6)


def test_rounds_with_changing_cohorts_equal_numpy():
    draw = torch.Generator().manual_seed(0)
    aggregator, sums = FoolsGold(divisor="none"), np.zeros((12, 7))
    for round_number in range(8):
        clients = torch.randperm(12, generator=draw)[:6]
        rows = torch.randn(6, 7, generator=draw, dtype=torch.float64)
        rows[clients < 4] += 2  # sybils
        merged = aggregator(rows, torch.ones(6), context(clients, round=round_number))
        sums[clients.numpy()] += rows.numpy()
        expected = weigh_by_numpy(sums[clients.numpy()]) @ rows.numpy()
        assert_close(merged, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)
    seen = aggregator.sums.ids
    assert_close(aggregator.sums.rows, torch.from_numpy(sums)[seen])


@pytest.mark.parametrize("kind", KINDS)
def test_results_on_hostile_uploads_equal_numpy(kind):
    for seed in range(6):
        for n in (8, 11):
            rows = hostile_uploads(kind, n, 3, seed=seed)
            alphas = weigh_by_numpy(rows.numpy())
            divisors = {"none": 1, "clients": n, "weights": max(1, alphas.sum())}
            for divisor, number in divisors.items():
                rejected = []
                now = context(range(n), reject=lambda ids, into=rejected: into.extend(ids.tolist()))
                merged = FoolsGold(divisor=divisor)(rows, torch.ones(n), now)
                expected = torch.from_numpy(alphas @ rows.numpy() / number)
                assert_close(merged, expected, rtol=1e-12, atol=1e-12)
                assert rejected == np.flatnonzero(alphas == 0).tolist()


def test_sybils_are_left_out_and_reported():
    rejected = []
    rows = torch.eye(6).double()
    rows[3:] = torch.tensor([1.0, 1, 1, 1, 1, 1]) / 9
    now = context([4, 8, 2, 9, 1, 6], reject=lambda clients: rejected.extend(clients.tolist()))
    merged = FoolsGold()(rows, torch.ones(6), now)
    assert rejected == [9, 1, 6]
    assert_close(merged, rows[:3].mean(0), rtol=1e-9, atol=1e-9)


def test_one_direction_gives_no_step_and_zero_rows_are_similar_to_none():
    rows = torch.tensor([[1.0, 2.0]]).repeat(4, 1) * torch.tensor([[1.0], [2], [0.1], [1e30]])
    merged = FoolsGold()(rows, torch.ones(4), context(range(4)))
    assert torch.equal(merged, torch.zeros(2))
    rows[1:] = 0
    merged = FoolsGold(divisor="none")(rows, torch.ones(4), context(range(4)))
    assert torch.equal(merged, rows[0])
    assert torch.equal(FoolsGold()(rows * 0, torch.ones(4), context(range(4))), torch.zeros(2))


def test_sums_of_large_uploads_stay_finite():
    huge = torch.full((2, 2), 3e38)
    aggregator = FoolsGold()
    for _ in range(3):
        aggregator(huge, torch.ones(2), context(range(2)))
    assert aggregator.sums.rows.isfinite().all()


def test_sybils_of_any_length_are_found():
    rows = torch.tensor([[1, 0.0], [0, 1], [-1, 0.3], [1, 1], [1, 1], [1, 1]], dtype=torch.float64)
    for length in (1.0, 1e200):
        rejected = []
        now = context(range(6), reject=lambda ids, into=rejected: into.extend(ids.tolist()))
        lengths = torch.tensor([[1.0]] * 3 + [[length]] * 3, dtype=torch.float64)
        FoolsGold()(lengths * rows, torch.ones(6), now)
        assert rejected == [3, 4, 5]


def test_broken_uploads_do_not_enter_the_memory():
    aggregator = FoolsGold()
    with pytest.raises(ValueError, match=r"NaN or infinity in rows \[1\]"):
        aggregator(torch.tensor([[1.0], [torch.nan]]), torch.ones(2), context(range(2)))
    assert not len(aggregator.sums.ids)


def test_output_share_compares_the_largest_weights_of_the_output_layer():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    layout = RowLayout.from_parameters(net)
    draw = torch.Generator().manual_seed(1)
    broadcast = torch.randn(layout.numel, generator=draw, dtype=torch.float64)
    aggregator, sums = FoolsGold(output_share=0.5, divisor="none"), np.zeros((5, 8))
    for _ in range(3):
        rows = torch.randn(5, layout.numel, generator=draw, dtype=torch.float64)
        now = context(range(5), broadcast=broadcast, layout=layout)
        merged = aggregator(rows, torch.ones(5), now)
        sums += layout.views(rows)["1.weight"].flatten(1).numpy()
        sizes = layout.views(broadcast)["1.weight"].abs().numpy()
        mask = np.stack([row >= np.sort(row)[-2] for row in sizes]).flatten()
        expected = weigh_by_numpy(sums * mask) @ rows.numpy()
        assert_close(merged, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)
        broadcast = broadcast.flip(0)


def test_weights_do_not_depend_on_the_order_of_rows():
    cosines = torch.corrcoef(torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).double())
    cosines.fill_diagonal_(0)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    weights = find_foolsgold_weights(cosines)
    assert torch.equal(find_foolsgold_weights(cosines[order][:, order]), weights[order])


def test_weights_have_the_same_bits_for_any_order_of_the_cohort():
    """The last numbers of the result are the weights: each client has one coordinate of its own."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        uploads = torch.randn(7, 9, generator=draw, dtype=torch.float64)
        uploads = torch.cat([uploads, torch.eye(7, dtype=torch.float64)], 1)
        weights = []
        for order in [torch.arange(7), *(torch.randperm(7, generator=draw) for _ in range(3))]:
            merged = FoolsGold(divisor="none")(uploads[order], torch.ones(7), context(order))
            weights.append(merged[-7:])
        assert all(torch.equal(other, weights[0]) for other in weights[1:])


def test_pre_aggregators_that_merge_clients_are_refused():
    with pytest.raises(
        ValueError, match=r"`federation.pre_aggregators` .* for FoolsGold, .* but got Bucketing"
    ):
        Chain([Clipping(), Bucketing()], FoolsGold())
    now = context(range(5), num_byzantine=1)
    for first in (Clipping(), NearestNeighborMixing()):
        assert Chain([first], FoolsGold())(SUMS, torch.ones(5), now).isfinite().all()


@pytest.mark.parametrize("wrapper", [WeakDP, CRFL])
def test_memory_of_clients_is_declared_through_other_aggregators(wrapper):
    outer = wrapper(aggregator=FoolsGold())
    assert outer.remembers_clients
    assert not wrapper().remembers_clients
    with pytest.raises(ValueError, match=r"for FoolsGold, .* but got Bucketing"):
        Chain([Bucketing()], outer)
    assert "remembers the uploads" in describe_unfit_aggregator(WeakDP(aggregator=FoolsGold()), 8)


def test_missing_facts_are_refused():
    rows, ones = torch.eye(3), torch.ones(3)
    with pytest.raises(ValueError, match=r"`context.clients` to be 3 different ids"):
        FoolsGold()(rows, ones, RoundContext())
    with pytest.raises(ValueError, match=r"`context.clients` to be 3 different ids"):
        FoolsGold()(rows, ones, context([0, 1, 1]))
    by_output = FoolsGold(output_share=1.0)
    with pytest.raises(ValueError, match=r"`context.layout` .* for FoolsGold but got None"):
        by_output(rows, ones, context(range(3)))
    conv = RowLayout.from_parameters(nn.Conv2d(1, 1, 1))
    with pytest.raises(ValueError, match="argument `net` to end with a linear layer for FoolsGold"):
        by_output(rows, ones, context(range(3), layout=conv))
    longer = RowLayout.from_parameters(nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"3 numbers .* FoolsGold, .* got one of 10 numbers"):
        by_output(rows, ones, context(range(3), layout=longer, broadcast=torch.zeros(3)))
    with pytest.raises(ValueError, match="argument `output_share` to be above 0"):
        FoolsGold(output_share=0.0)
