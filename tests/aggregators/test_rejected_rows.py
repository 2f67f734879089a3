"""The clients whose uploads an aggregator leaves out: by small numbers, and in any order."""

from dataclasses import replace

import pytest
import torch
from test_aggregator_contract import CONFIGURATIONS as AGGREGATORS
from test_aggregator_contract import context, make
from test_preaggregator_contract import CONFIGURATIONS as PRE_AGGREGATORS

from pl_fed.aggregators import (
    CAF,
    MDA,
    SMEA,
    Bucketing,
    Bulyan,
    Chain,
    Clipping,
    DnC,
    FLTrust,
    KLoss,
    KNorm,
    Krum,
    Mean,
    NearestNeighborMixing,
    NormFilter,
    SignGuard,
)
from pl_fed.aggregators.base import PreAggregator
from pl_fed.types import RoundContext

CLIENTS = torch.tensor([70, 20, 50, 10, 60, 30, 40])
NUMBERS = torch.tensor([[1.0], [1.5], [90.0], [2.0], [2.5], [1.9], [-60.0]])
OUTLIERS = torch.tensor([[2.0, 0.0], [1.0, 0.0], [2.0, 90.0], [3.0, 0.0], [2.5, 0.0]])
DIRECTIONS = torch.tensor([[1.0, 1.0], [1.0, 2.0], [2.0, 1.0], [-1.0, -2.0], [90.0, 90.0]])


def log_rejected(aggregator, rows, clients, num_byzantine=0, **fields):
    """Return the rejected ids and the logged number of dropped uploads."""
    rejected, dropped = [], []
    now = RoundContext(
        num_byzantine=num_byzantine,
        clients=clients,
        losses=torch.zeros(len(clients)),
        note=lambda word, number: dropped.append(int(number)) if word == "dropped" else None,
        reject=lambda ids: rejected.extend(ids.tolist()),
        **fields,
    )
    aggregator(rows, torch.ones(len(rows)), now)
    return rejected, sum(dropped)


@pytest.mark.parametrize(
    ("aggregator", "rows", "num_byzantine", "expected"),
    [
        (Krum(), NUMBERS, 1, [70, 20, 50, 10, 60, 40]),
        (Krum(num_selected=3), NUMBERS, 2, [70, 50, 60, 40]),
        (Krum(num_selected=None), NUMBERS, 2, [50, 40]),
        (Bulyan(), NUMBERS, 1, [70, 50]),  # -60 and 1 are nearest to each other; 40 < 70
        (MDA(), NUMBERS, 2, [50, 40]),
        (SMEA(), NUMBERS, 2, [50, 40]),
        (KNorm(), NUMBERS, 3, [50, 60, 40]),
        (DnC(), OUTLIERS, 1, [50]),
        (CAF(), OUTLIERS, 1, [50]),
        (SignGuard(coordinates=1.0), DIRECTIONS, 0, [10, 60]),
        (Chain([NormFilter(multiple=2.0)], Mean()), NUMBERS, 0, [50, 40]),
        (Chain([NormFilter(multiple=2.0)], KNorm(1)), NUMBERS, 0, [50, 40, 60]),
        (Chain([Clipping(10.0)], KNorm(1)), OUTLIERS, 0, [50]),
        (Mean(), NUMBERS, 0, []),
    ],
)
def test_rejected_clients_equal_those_by_hand(aggregator, rows, num_byzantine, expected):
    clients = CLIENTS[: len(rows)]
    assert log_rejected(aggregator, rows, clients, num_byzantine) == (expected, len(expected))


def test_krum_without_neighbours_rejects_the_clients_that_it_does_not_draw():
    aggregator = Krum(num_selected=2, num_byzantine=6, without_neighbours="first")
    rows = torch.eye(7)
    rejected, dropped = log_rejected(aggregator, rows, CLIENTS)
    merged = aggregator(rows, torch.ones(7), RoundContext(clients=CLIENTS))
    assert rejected == CLIENTS[merged == 0].tolist()
    assert dropped == len(rejected) == 5


def test_k_loss_rejects_all_clients_but_the_selected_one():
    losses = torch.tensor([0.5, 4.0, 0.25])
    rejected = log_rejected(KLoss(1), NUMBERS[:3], CLIENTS[:3], start_losses=losses)
    assert rejected == ([20, 50], 2)


def test_fltrust_rejects_clients_without_trust():
    root = torch.tensor([1.0, 0.0])
    rows = torch.tensor([[2.0, 0.0], [-3.0, 0.0], [1.0, 1.0], [0.0, 5.0]])
    assert log_rejected(FLTrust(), rows, CLIENTS[:4], root=root) == ([20, 10], 2)


@pytest.mark.parametrize("pre_aggregator", [Bucketing(), NearestNeighborMixing()])
def test_rows_that_mix_clients_are_counted_but_reject_nobody(pre_aggregator):
    chain = Chain([pre_aggregator], KNorm(1))
    assert log_rejected(chain, NUMBERS, CLIENTS) == ([], 1)


def test_filter_before_a_mixture_rejects_its_clients():
    chain = Chain([NormFilter(multiple=2.0), Bucketing()], KNorm(1))
    assert log_rejected(chain, NUMBERS, CLIENTS) == ([50, 40], 3)


def test_context_without_ids_counts_the_rejected_uploads():
    notes = {}
    now = RoundContext(root=torch.tensor([1.0]), note=lambda word, n: notes.update({word: int(n)}))
    FLTrust()(torch.tensor([[1.0], [-1.0]]), torch.ones(2), now)
    assert notes == {"dropped": 1}


def collect(stage, rows, now, mixes=False):
    rejected, dropped = [], []
    noted = replace(
        now,
        note=lambda word, number: dropped.append(int(number)) if word == "dropped" else None,
        reject=lambda ids: rejected.extend(ids.tolist()),
    )
    stage(rows, torch.arange(1, len(rows) + 1), noted)
    assert mixes or len(rejected) == sum(dropped)
    return sorted(rejected)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [*AGGREGATORS, *PRE_AGGREGATORS],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_rejected_clients_do_not_depend_on_the_order_of_uploads(kind, arguments):
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        rows = torch.randn(12, 9, generator=draw, dtype=torch.float64) + 1
        rows[:3] *= torch.tensor([[50.0], [-20.0], [0.0]])
        now = replace(
            context(rows), num_byzantine=2, clients=torch.randperm(40, generator=draw)[:12]
        )
        order = torch.randperm(12, generator=draw)
        mixes = issubclass(kind, PreAggregator) or kind is Chain
        expected = collect(make(kind, arguments), rows, now, mixes)
        assert set(expected) <= set(now.clients.tolist())
        assert collect(make(kind, arguments), rows[order], now.select(order), mixes) == expected
