"""APFL's mixtures, worked by hand on points; FedAvg and local training at their ends."""

import pytest
import torch
from exhaustive import exhaustive_but
from personal_models import trained, validated_by_training
from small_federations import (
    HalfSquares,
    Only,
    Point,
    classes,
    mlp,
    points,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn

from pl_fed.clients import APFL, FedAvg, Local

Y = (1.0, 5.0)
all_engines = pytest.mark.parametrize("engine", ["one_by_one", "stacked"])


def simulate(alpha, rounds, steps=2, lr=0.25, alpha_lr=0.0, start=2.0):
    """w, and each client's v, α and mixture."""
    w, v, alphas = start, [start] * 2, [alpha] * 2
    for _ in range(rounds):
        ends = []
        for k, y in enumerate(Y):
            local_w, slopes = w, []
            for _ in range(steps):
                mixed = alphas[k] * v[k] + (1 - alphas[k]) * local_w
                slopes.append((v[k] - local_w) * (mixed - y))
                local_w -= lr * (local_w - y)
                v[k] -= lr * alphas[k] * (mixed - y)
            alphas[k] = min(1.0, max(0.0, alphas[k] - alpha_lr * sum(slopes) / steps))
            ends.append(local_w)
        w = sum(ends) / 2
    return w, v, alphas, [a * local_model + (1 - a) * w for a, local_model in zip(alphas, v)]


@exhaustive_but(
    "0.3-0.3-one_by_one",
    "0.3-0.3-stacked",
    "1.0-0.0-one_by_one",
    "0.0-0.3-stacked",
    "0.3-50.0-one_by_one",
    "0.0-0.0-one_by_one",
)
@pytest.mark.slow
@all_engines
@pytest.mark.parametrize("alpha_lr", [0.0, 0.3, 50.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_rounds_of_two_clients_equal_hand_computed_rounds(engine, alpha, alpha_lr):
    """α goes down its derivative (v − w)(v̄ − y), the mean over the steps, and stays in [0, 1]."""
    data = validated_by_training(shared_out(points(*[[y] for y in Y])))
    client = APFL(
        Point(start=2.0), alpha, alpha_lr, optimizer=sgd(0.25), criterion=HalfSquares(),
        local_steps=2,
    )  # fmt: skip
    result = trained(client, data, 3, engine=engine)
    w, v, alphas, mixtures = simulate(alpha, 3, alpha_lr=alpha_lr)
    assert result.w.item() == pytest.approx(w, abs=1e-12)
    assert result.kept["local"].flatten().tolist() == pytest.approx(v, abs=1e-12)
    assert result.kept["alpha"].flatten().tolist() == pytest.approx(alphas, abs=1e-12)
    losses = [(mixed - y) ** 2 / 2 for mixed, y in zip(mixtures, Y)]
    assert result.metrics["personal"]["loss"].tolist() == pytest.approx(losses, abs=1e-12)


SETTINGS = {"optimizer": sgd(0.1, momentum=0.9), "local_epochs": 2}


def make_data():
    return shared_out(classes([9, 5, 12]), val_fraction=0.3)


@exhaustive_but("0.0-stacked", "0.4-one_by_one", "1.0-one_by_one")
@pytest.mark.slow
@all_engines
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_global_model_equals_fedavg(engine, alpha):
    plain = trained(FedAvg(seeded(mlp), **SETTINGS), make_data(), 3, engine=engine)
    result = trained(APFL(seeded(mlp), alpha, **SETTINGS), make_data(), 3, engine=engine)
    assert torch.equal(result.w, plain.w)
    if alpha == 0:
        torch.testing.assert_close(
            result.metrics["personal"]["loss"], plain.metrics["global"]["loss"], rtol=1e-12, atol=0
        )


@exhaustive_but("one_by_one")
@pytest.mark.slow
@all_engines
def test_alpha_one_equals_local_training(engine):
    alone = trained(Local(seeded(mlp), **SETTINGS), make_data(), 3, engine=engine)
    result = trained(APFL(seeded(mlp), 1.0, **SETTINGS), make_data(), 3, engine=engine)
    torch.testing.assert_close(result.kept["local"], alone.kept["personal"], rtol=0, atol=1e-13)
    torch.testing.assert_close(
        result.metrics["personal"]["loss"], alone.metrics["personal"]["loss"], rtol=1e-10, atol=0
    )


def test_absent_client_mixes_its_old_model_with_the_new_global_model():
    data = make_data()
    result = trained(APFL(seeded(mlp), 0.4, 0.1, **SETTINGS), data, 3, sampler=Only(1))
    personal = result.federation.session.states.begin(torch.arange(3)).models["personal"]
    first = APFL(seeded(mlp)).double().row("global").data
    assert torch.equal(result.kept["local"][0], first)
    assert result.kept["alpha"][[0, 2], 0].tolist() == [0.4, 0.4]
    assert result.kept["alpha"][1, 0] != 0.4
    torch.testing.assert_close(personal.parameters[0], 0.4 * first + 0.6 * result.w)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_learned_alpha_is_larger_for_a_client_with_different_data():
    """Where all clients have the same data, and where one has data of its own."""
    arrays = classes([40, 40, 40], seed=1)
    arrays.targets[80:] = (arrays.inputs[80:, 0] > 0).long()
    arrays.targets[:80] = 2 * (arrays.inputs[:80, 1] > 0).long()
    client = APFL(seeded(mlp), 0.5, 0.2, optimizer=sgd(0.2), local_epochs=2)
    alphas = trained(client, shared_out(arrays, batch_size=10), 15).kept["alpha"][:, 0]
    assert alphas[2] > 0.8 > alphas[:2].max()


def batch_norm_net():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def test_mixture_keeps_its_statistics_from_training():
    data = shared_out(classes([9, 6, 12]), batch_size=16)
    result = trained(APFL(seeded(batch_norm_net), 0.4, **SETTINGS), data)
    personal = result.federation.session.states.begin(torch.arange(3)).models["personal"]
    assert torch.equal(personal.statistics, result.kept["local.statistics"])
    assert len(personal.statistics.unique(dim=0)) == 3


@table_test(
    ("arguments", "match"),
    [
        ({"alpha": 1.1}, r"`alpha` to be in \[0, 1\] but got 1.1"),
        ({"alpha": float("nan")}, r"`alpha` to be in \[0, 1\] but got nan"),
        ({"alpha_lr": -1.0}, "`alpha_lr` to be at least 0, and finite, but got -1.0"),
    ],
)
def test_invalid_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        APFL(Point(), **arguments)
