"""FedNova: closed forms on quadratics with unequal steps; FedAvg with equal steps."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_but
from small_federations import (
    HalfSquares,
    Point,
    classes,
    mlp,
    points,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test

from pl_fed.aggregators import AFL, Chain, Clipping, Mean, Median, Term
from pl_fed.attacks import SignFlipping
from pl_fed.clients import FedAS, FedAvg, FedNova
from pl_fed.optimizers import LocalCosine
from pl_fed.preflight.rules import check_local_schedule

all_engines = pytest.mark.parametrize("engine", ["one_by_one", "stacked"])


class StepsById(FedNova):
    """Client k takes k + 1 steps."""

    def begin(self, client):
        super().begin(client)
        if client.steps:
            client.steps["global"] = client.ids[:, None] + 1


class AveragedStepsById(FedAvg):
    """Client k takes k + 1 steps, and updates are merged as they are."""

    def begin(self, client):
        super().begin(client)
        if client.steps:
            client.steps["global"] = client.ids[:, None] + 1


def gradient_weights(steps, momentum):
    """Return ‖a‖₁ by the recursion of SGD with momentum."""
    total, weight = 0.0, 0.0
    for _ in range(steps):
        weight = momentum * weight + 1
        total += weight
    return total


@all_engines
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_rounds_equal_the_formula(engine, momentum, weighting):
    observed, sizes, lr, w = np.array([1.0, -2.0, 4.0]), np.array([2, 1, 3]), 0.1, 2.0
    data = shared_out(points(*[[float(y)] * n for y, n in zip(observed, sizes)]))
    client = StepsById(
        Point(start=w), optimizer=sgd(lr, momentum=momentum), criterion=HalfSquares(), local_steps=1
    )
    result = run_rounds(client, data, 3, engine=engine, aggregator=Mean(weighting))
    p = np.full(3, 1 / 3) if weighting == "uniform" else sizes / sizes.sum()
    work = np.array([gradient_weights(k + 1, momentum) for k in range(3)])
    for _ in range(3):
        changes = []
        for k, y in enumerate(observed):
            x, velocity = w, 0.0
            for _ in range(k + 1):
                velocity = momentum * velocity + (x - y)
                x -= lr * velocity
            changes.append(x - w)
        w += (p * work).sum() * (p * np.array(changes) / work).sum()
    assert float(result.w) == pytest.approx(w, rel=1e-10)


@all_engines
def test_a_schedule_of_local_steps_normalises_by_the_sum_of_its_rates(engine):
    observed, w = [1.0, -2.0, 4.0], 2.0
    client = StepsById(
        Point(start=w),
        optimizer=sgd(0.2),
        lr_scheduler=LocalCosine,
        criterion=HalfSquares(),
        local_steps=1,
    )
    schedule = LocalCosine(torch.optim.SGD([torch.zeros(1)], lr=0.2))
    rates = [np.array(schedule.local_rates(0.2, k + 1, 0, 0)) for k in range(3)]
    data = shared_out(points(*[[y] for y in observed]))
    result = run_rounds(client, data, 3, engine=engine)
    work = np.array([own.sum() for own in rates])
    for _ in range(3):
        changes = [(1 - np.prod(1 - own)) * (y - w) for own, y in zip(rates, observed)]
        w += float(work.mean() * (np.array(changes) / work).mean())
    assert float(result.w) == pytest.approx(w, rel=1e-10)


def test_momentum_beside_a_schedule_of_local_steps_is_refused():
    for momentum, is_refused in ((0.0, False), (0.9, True)):
        client = FedNova(
            seeded(mlp), optimizer=sgd(0.1, momentum=momentum), lr_scheduler=LocalCosine
        )
        client.check(None, None)
        client.configure_optimizers()
        with pytest.raises(ValueError, match="FedNova") if is_refused else nullcontext():
            check_local_schedule(client, 1)


@pytest.mark.exhaustive
def test_fixed_point_is_the_minimum_where_fedavg_has_another():
    """Theorem 1 of the paper on quadratics: small steps, and many rounds."""
    observed = [0.0, 1.0, 5.0]
    data = shared_out(points(*[[y] for y in observed]))
    options = {"optimizer": sgd(0.02), "criterion": HalfSquares(), "local_steps": 1}
    nova, average = (
        float(run_rounds(kind(Point(start=2.4), **options), data, 120, engine="stacked").w)
        for kind in (StepsById, AveragedStepsById)
    )
    assert nova == pytest.approx(2.0, abs=0.02), "the mean of the observations"
    shares = np.array([1, 2, 3]) / 6
    assert average == pytest.approx(float(shares @ observed), abs=0.02), "weighted by steps"


@exhaustive_but("uniform-one_by_one", "samples-stacked")
@all_engines
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.slow
def test_equal_steps_are_fedavg_bit_for_bit(engine, weighting):
    data = shared_out(classes([7, 5, 8]))
    options = {"optimizer": sgd(0.1, momentum=0.9), "local_steps": 3}
    nova, average = (
        run_rounds(kind(seeded(mlp), **options), data, 3, engine=engine, aggregator=Mean(weighting))
        for kind in (FedNova, FedAvg)
    )
    assert torch.equal(nova.w, average.w)


def test_broken_uploads_count_in_no_mean():
    class Broken(StepsById):
        """Client 2 sends NaN."""

        def end_round(self, client):
            change = super().end_round(client)
            return torch.where(client.ids[:, None] == 2, torch.nan, change)

    data = shared_out(points([1.0], [3.0], [100.0]))
    options = {"optimizer": sgd(0.5), "criterion": HalfSquares(), "local_steps": 1}
    result = run_rounds(Broken(Point(), **options), data, 1)
    assert float(result.w) == pytest.approx(1.5 * (0.5 / 1 + 2.25 / 2) / 2, abs=1e-12)


@pytest.mark.slow
def test_forged_uploads_and_other_aggregators_are_normalised_too():
    data = shared_out(points([1.0], [3.0], [4.0]))
    options = {"optimizer": sgd(0.5), "criterion": HalfSquares(), "local_steps": 1}
    run = run_rounds(StepsById(Point(), **options), data, 1, aggregator=Median())
    assert float(run.w) == pytest.approx(2 * sorted([0.5, 2.25 / 2, 3.5 / 3])[1], abs=1e-12)
    forged = run_rounds(
        StepsById(Point(), **options), data, 1, attack=SignFlipping(), ids=[2], engine="stacked"
    )
    assert float(forged.w) == pytest.approx(2 * (0.5 + 2.25 / 2 - 3.5 / 3) / 3, abs=1e-12)


@table_test(
    "optimizer, message",
    [
        (lambda p: torch.optim.Adam(p), "normalise the updates, but got Adam"),
        (sgd(0.1, momentum=0.9, nesterov=True), "but got SGD.nesterov=True"),
        (sgd(0.1, momentum=0.9, dampening=0.5), "but got SGD.dampening=0.5"),
        (sgd(0.1, momentum=1.0), "a momentum below 1 at most, because its coefficients"),
    ],
    ids=str,
)
def test_other_optimizers_are_refused(optimizer, message):
    client = FedNova(seeded(mlp), optimizer=optimizer)
    with pytest.raises(ValueError, match=message):
        run_rounds(client, shared_out(classes([7, 5])), 1)


def test_momentum_that_clients_keep_is_refused():
    client = FedNova(seeded(mlp), optimizer=sgd(0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"`federation\.engine\.keep_optimizer_state` to be false"):
        run_rounds(client, shared_out(classes([7, 5])), 1, keep_optimizer_state=True)


@pytest.mark.parametrize("algorithm", [FedNova, FedAS])
def test_aggregators_with_weights_of_their_own_are_refused(algorithm):
    data = shared_out(classes([8] * 3))
    client = algorithm(seeded(mlp), optimizer=sgd(0.1))
    for aggregator in (AFL(), Term(1.0), Chain([Clipping()], AFL())):
        with pytest.raises(ValueError, match=r"without weights of its own .* but got (AFL|Term)"):
            run_rounds(client, data, aggregator=aggregator)
    run_rounds(client, data, 1, aggregator=Term(0.0))
