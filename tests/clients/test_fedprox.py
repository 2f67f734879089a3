"""FedProx: a pull of strength μ to the broadcast; FedAvg where μ is 0."""

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

from pl_fed.clients import Ditto, FedAvg, FedProx

all_engines = pytest.mark.parametrize("engine", ["one_by_one", "stacked"])


@pytest.mark.slow
@all_engines
@pytest.mark.parametrize("mu", [0.0, 0.5, 3.0])
def test_rounds_equal_hand_computed_rounds(engine, mu):
    """w_k ← w_k − η (w_k − y_k + μ (w_k − w^t)), three times; the server takes the mean."""
    observed = [1.0, 4.0]
    client = FedProx(
        Point(start=2.0), mu, optimizer=sgd(0.25), criterion=HalfSquares(), local_steps=3
    )
    result = run_rounds(client, shared_out(points(*[[y] for y in observed])), 2, engine=engine)
    w = 2.0
    for _ in range(2):
        ends = []
        for y in observed:
            local_w = w
            for _ in range(3):
                local_w -= 0.25 * (local_w - y + mu * (local_w - w))
            ends.append(local_w)
        w = sum(ends) / 2
    assert float(result.w) == pytest.approx(w, abs=1e-12)


@exhaustive_but("one_by_one")
@pytest.mark.slow
@all_engines
def test_mu_zero_equals_fedavg_bit_for_bit(engine):
    data = shared_out(classes([7, 3, 10]))
    settings = {"optimizer": sgd(0.1, momentum=0.9), "local_epochs": 2}
    plain, prox = (
        run_rounds(kind(seeded(mlp), **settings, **more), data, 3, engine=engine)
        for kind, more in ((FedAvg, {}), (FedProx, {"mu": 0.0}))
    )
    assert torch.equal(plain.w, prox.w)


@exhaustive_but("one_by_one")
@pytest.mark.slow
@all_engines
def test_ditto_with_global_mu_trains_the_global_model_of_fedprox(engine):
    """Ditto's w is FedProx's, and v_k is pulled to it."""
    data = shared_out(classes([7, 3, 10]))
    settings = {"optimizer": sgd(0.1, momentum=0.9), "local_epochs": 2}
    prox = run_rounds(FedProx(seeded(mlp), 0.7, **settings), data, 3, engine=engine)
    ditto = Ditto(seeded(mlp), lam=0.3, global_mu=0.7, **settings)
    result = run_rounds(ditto, data, 3, engine=engine)
    torch.testing.assert_close(result.w, prox.w, rtol=0, atol=1e-14)
    plain = run_rounds(Ditto(seeded(mlp), lam=0.3, **settings), data, 3, engine=engine)
    assert not torch.allclose(result.w, plain.w)
    assert not torch.allclose(result.v, plain.v)


@pytest.mark.slow
def test_large_mu_keeps_clients_near_the_global_model():
    data = shared_out(classes([7, 3, 10]))
    reports = [
        run_rounds(FedProx(seeded(mlp), mu, optimizer=sgd(0.02), local_epochs=5), data, 1).reports
        for mu in (0.0, 1.0, 10.0)
    ]
    norms = [float(run_reports[0]["train/update_norm"]) for run_reports in reports]
    assert norms[0] > norms[1] > 2 * norms[2] > 0


@table_test("mu", [-0.1, float("nan"), float("inf")])
def test_invalid_mu_is_refused(mu):
    with pytest.raises(ValueError, match=f"`mu` to be at least 0, and finite, but got {mu}"):
        FedProx(Point(), mu)
    with pytest.raises(ValueError, match=f"`global_mu` to be at least 0, .* but got {mu}"):
        Ditto(Point(), global_mu=mu)
