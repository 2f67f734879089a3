"""Detection and stealth of attackers: by hand, in whole rounds, and over several processes."""

import math
import threading
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from small_federations import (
    HalfSquares,
    Only,
    Point,
    mlp,
    points,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)
from small_federations import classes as make_classes

from pl_fed.aggregators import Aggregator, Bucketing
from pl_fed.attacks import Attack, FlippedLabels
from pl_fed.clients import FedAvg
from pl_fed.distributed.work_share import WorkShare
from pl_fed.engine.base import ATTACK_NUMBERS
from pl_fed.rounds.attack_measures import AttackMeasures
from pl_fed.types import RoundContext

NUMBERS = [1.0, 2.0, 3.0, 4.0, 50.0, 60.0]
DETECTION = [name for name in ATTACK_NUMBERS if name.startswith(("detection", "flagged"))]


class Constant(Attack):
    """Send a number."""

    def __init__(self, number):
        self.number = number

    def forge(self, honest, own, context):
        return torch.full_like(own, self.number)


class Judge(Aggregator):
    """Take the mean of the uploads between two bounds, and report the others."""

    def __init__(self, low=-math.inf, high=math.inf):
        super().__init__()
        self.low, self.high = low, high

    def forward(self, uploads, weights, context):
        rejected = (uploads[:, 0] < self.low) | (uploads[:, 0] > self.high)
        context.reject_rows(rejected)
        return uploads[~rejected].mean(0)

    def max_byzantine(self, num_uploads):
        return 0


class Trying(Constant):
    """Send a number, after an attempt to harm the aggregator."""

    def forge(self, honest, own, context):
        forged = super().forge(honest, own, context)
        context.simulate_merge(forged)
        context.reject(context.clients)  # an attacker cannot report others
        return forged


def estimate(rounds=1, **settings):
    client = FedAvg(Point(), criterion=HalfSquares(), optimizer=sgd(1.0), local_steps=1)
    client = settings.pop("client", client)
    data = settings.pop("data", None) or shared_out(points(*([n] for n in NUMBERS)), 10)
    reports = run_rounds(client, data, rounds, **settings).reports
    return [
        {
            name.removeprefix("train/"): float(value)
            for name, value in report.items()
            if name.removeprefix("train/") in ATTACK_NUMBERS
        }
        for report in reports
    ]


# Detection


@pytest.mark.parametrize("attack", [Constant(-20.0), Trying(-20.0)])
@pytest.mark.parametrize(
    ("judge", "flagged", "hits"),
    [
        (Judge(low=-5), 2, 2),
        (Judge(low=-5, high=55), 3, 2),
        (Judge(high=10), 2, 0),
        (Judge(high=55), 1, 0),
    ],
)
def test_precision_and_recall_by_hand(attack, judge, flagged, hits):
    (report,) = estimate(attack=attack, ids=[0, 1], aggregator=judge)
    assert (report["attackers"], report["flagged"], report["flagged_attackers"]) == (
        2,
        flagged,
        hits,
    )
    assert report["detection_precision"] == hits / flagged
    assert report["detection_recall"] == hits / 2


def test_precision_is_undefined_if_nothing_is_rejected():
    (report,) = estimate(attack=Constant(1.0), ids=[0], aggregator=Judge())
    assert math.isnan(report["detection_precision"])
    assert report["detection_recall"] == 0


def test_aggregator_that_reports_nothing_detects_nothing_and_misses_nothing():
    (report,) = estimate(attack=Constant(1.0), ids=[0])
    assert not {*DETECTION} & {*report}
    assert {"attack_distance", "attack_cosine"} <= {*report}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attack": Constant(-20.0), "ids": [0], "start_round": 3},
        {"attack": Constant(-20.0), "ids": [0], "sampler": Only(1, 2, 3)},
    ],
)
def test_round_without_attackers_has_no_numbers_of_attacks(settings):
    assert estimate(aggregator=Judge(high=10), **settings) == [{}]


def test_numbers_end_when_the_attack_stops():
    attack = {"attack": Constant(-20.0), "ids": [0], "start_round": 1, "stop_round": 2}
    reports = estimate(3, aggregator=Judge(low=-5), **attack)
    assert [set(report) == set(ATTACK_NUMBERS) for report in reports] == [False, True, False]


def test_attackers_on_data_count():
    (report,) = estimate(
        client=FedAvg(seeded(mlp), optimizer=sgd(), local_steps=1),
        data=shared_out(make_classes([5, 5, 5, 5])),
        attack=FlippedLabels(),
        ids=[2],
        aggregator=Judge(),
    )
    assert (report["attackers"], report["flagged"]) == (1, 0)
    assert 0 < report["attack_distance"] < 100


def test_broken_uploads_of_attackers_are_the_servers_not_the_aggregators():
    (report,) = estimate(
        attack=Constant(math.nan), ids=[0], aggregator=Judge(high=55), max_rejected=1.0
    )
    assert report == {}


def test_rejected_bucket_rejects_no_single_client():
    uploads = torch.tensor([[0.0], [1.0], [2.0], [9.0], [9.0]])
    measures, ids = AttackMeasures(), torch.tensor([7, 3, 5, 2, 4])
    context = RoundContext(clients=ids, losses=torch.zeros(5), reject=measures.flag)
    prepared = Bucketing(2)(uploads, torch.ones(5), context)
    prepared.context.reject_rows(torch.tensor([True, False, True]))
    assert measures._flagged is None


# Stealth


def test_distance_and_cosine_by_hand():
    (report,) = estimate(attack=Constant(-20.0), ids=[0, 1])
    # 3, 4, 50, 60: mean 29.25, variance 675.6875
    assert report["attack_distance"] == pytest.approx(49.25 / math.sqrt(675.6875))
    assert report["attack_cosine"] == pytest.approx(-1)
    (report,) = estimate(attack=Constant(29.25), ids=[0, 1])
    assert report["attack_distance"] == pytest.approx(0)
    assert report["attack_cosine"] == pytest.approx(1)


def test_stealth_is_undefined_without_a_spread_or_a_direction():
    (report,) = estimate(attack=Constant(-20.0), ids=[0, 1, 2, 3, 4])
    assert report["attack_distance"] == math.inf, "of a single benign client"
    (report,) = estimate(attack=Constant(0.0), ids=[0])
    assert math.isnan(report["attack_cosine"])
    (report,) = estimate(attack=Constant(1.0), ids=[0, 1, 2, 3, 4, 5])
    assert math.isnan(report["attack_distance"])


def test_stealth_agrees_with_a_formula_in_float64():
    generator = torch.Generator().manual_seed(3)
    for count, byzantine in ((7, 2), (12, 5), (3, 1)):
        rows = torch.randn(count, 40, generator=generator)
        attackers = torch.arange(count) < byzantine
        measures = AttackMeasures()
        share = WorkShare.single_process(torch.arange(count))
        measures.add(share, rows, attackers, ~attackers)
        report = measures.report()
        benign, forged = rows[~attackers].double(), rows[attackers].double()
        mean = benign.mean(0)
        spread = (benign - mean).square().sum(1).mean().sqrt()
        distance = (forged - mean).norm(dim=1).mean() / spread
        cosine = torch.cosine_similarity(forged, mean[None]).mean()
        assert float(report["train/attack_distance"]) == pytest.approx(float(distance), rel=1e-5)
        assert float(report["train/attack_cosine"]) == pytest.approx(float(cosine), abs=1e-6)


@dataclass
class Threads:
    """Two threads that add up tensors as processes do."""

    rank: int
    size: int
    barrier: threading.Barrier
    slots: list

    def home_ranks(self, clients):
        return clients % self.size

    def sum(self, tensor):
        self.slots[self.rank] = tensor.clone()
        self.barrier.wait(20)
        total = sum(self.slots)
        self.barrier.wait(20)
        return total


def test_two_processes_measure_what_one_measures():
    rows = torch.randn(9, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    attackers = torch.arange(9) % 4 == 0
    workers = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 0])
    alone = AttackMeasures()
    alone.add(WorkShare.single_process(torch.arange(9)), rows, attackers, ~attackers)
    barrier, slots, reports = threading.Barrier(2), [None, None], [None, None]

    def work(rank):
        share = WorkShare(Threads(rank, 2, barrier, slots), torch.arange(9), workers)
        measures = AttackMeasures()
        measures.flag(torch.tensor([4, 5]))
        measures.add(share, rows[workers == rank], attackers, ~attackers)
        reports[rank] = measures.report()

    threads = [threading.Thread(target=partial(work, rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reports[0] == reports[1]
    for name, value in alone.report().items():
        assert float(reports[0][name]) == pytest.approx(float(value), rel=1e-12)
    assert reports[0]["train/detection_recall"] == 1 / 3
