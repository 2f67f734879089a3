"""Local training is Ditto without a pull, to the last bit; it sends and gets nothing."""

import pytest
import torch
from exhaustive import exhaustive_but
from small_federations import (
    HalfSquares,
    Only,
    Point,
    classes,
    points,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)
from torch import nn

from pl_fed.clients import Ditto, Local
from pl_fed.samplers import Uniform

ENGINES = ["one_by_one", "stacked"]
all_engines = pytest.mark.parametrize("engine", ENGINES)


def net():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3))


@exhaustive_but("SGD-dtype0-one_by_one", "AdamW-dtype1-stacked")
@pytest.mark.slow
@all_engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "optimizer", [sgd(0.1, momentum=0.9), torch.optim.AdamW], ids=["SGD", "AdamW"]
)
def test_rounds_equal_ditto_with_lambda_zero_bit_for_bit(engine, dtype, optimizer):
    """With shuffled minibatches, dropout and cohorts that are drawn."""
    data = shared_out(classes([7, 3, 10, 5]))
    work = {"optimizer": optimizer, "local_epochs": 2}
    clients = Local(seeded(net), **work), Ditto(seeded(net), lam=0.0, **work)
    settings = {"rounds": 3, "dtype": dtype, "engine": engine, "sampler": Uniform(2)}
    local, ditto = (run_rounds(client, data, **settings) for client in clients)
    assert torch.equal(local.v, ditto.v)
    if engine == "one_by_one":
        pulled = run_rounds(Ditto(seeded(net), lam=0.01, **work), data, **settings)
        assert not torch.equal(pulled.v, ditto.v)


@all_engines
def test_clients_train_independently_of_each_other(engine):
    """η = 1/2 on ½ (v − y)²: half of the way to y in each round that a client takes part in."""
    client = Local(Point(), optimizer=sgd(0.5), criterion=HalfSquares(), local_steps=1)
    data = shared_out(points([2.0], [6.0]))
    together = run_rounds(client, data, rounds=2, engine=engine)
    assert together.v.tolist() == [[1.5], [4.5]]
    alone = run_rounds(client, data, rounds=2, engine=engine, sampler=Only(1))
    assert alone.v.tolist() == [[0.0], [4.5]]


@all_engines
def test_updates_are_zero_and_the_global_model_stays_unchanged(engine):
    client = Local(seeded(net), optimizer=sgd(0.1))
    outcome = run_rounds(client, shared_out(classes([7, 3])), engine=engine)
    assert torch.equal(outcome.w, client.row("global").data.double())
    assert all(report["train/update_norm"] == 0 for report in outcome.reports)
