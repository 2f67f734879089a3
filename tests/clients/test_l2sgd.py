"""L2SGD against dense simulations that know all models at all times."""

import pytest
import torch
from exhaustive import exhaustive_but
from small_federations import (
    Cohorts,
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

from pl_fed.attacks import SameValue
from pl_fed.clients import L2SGD, FedAvg, Local
from pl_fed.samplers import Uniform

Y = torch.tensor([1.0, -2.0, 4.0, 9.0], dtype=torch.float64)
DATA = shared_out(points(*[[float(y)] * n for y, n in zip(Y, (1, 5, 2, 9))]))  # 1, 2, 1, 3 steps
ENGINES = ["one_by_one", "stacked", "stacked_compiled"]


def halve_per_round(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


@exhaustive_but("0.7-one_by_one", "0.0-one_by_one", "5.0-stacked", "0.7-stacked_compiled")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lam", [0.0, 0.7, 5.0])
def test_rounds_equal_a_dense_simulation(uncompiled, engine, lam):
    """With a changing cohort, unequal work, and a learning rate that is halved.

    The global model is the mean of all models after each round, also of the
    absent clients 0 and 3.
    """
    steps, x, eta = torch.tensor([1, 2, 1, 3]), torch.zeros_like(Y), 0.2
    cohorts = [(1, 2, 3), (0, 1, 2), (0, 1, 3)]
    for round, cohort in enumerate(cohorts):
        mean = x.mean()
        for k in cohort:
            x[k] += min(1.0, eta * lam * int(steps[k])) * (mean - x[k])
            for _ in range(steps[k]):
                x[k] -= eta * (x[k] - Y[k])
        eta /= 2
        client = L2SGD(
            Point(), lam, criterion=HalfSquares(), optimizer=sgd(0.2), lr_scheduler=halve_per_round
        )
        settings = {"engine": engine, "chunk_size": 2, "sampler": Cohorts(*cohorts)}
        result = run_rounds(client, DATA, rounds=round + 1, **settings)
        torch.testing.assert_close(result.v[:, 0], x, rtol=0, atol=1e-13)
        torch.testing.assert_close(result.w[0], x.mean(), rtol=0, atol=1e-13)
        torch.testing.assert_close(result.states["personal"], result.v, rtol=0, atol=0)


@pytest.mark.slow
def test_the_global_model_stays_the_mean_of_nets():
    client = L2SGD(seeded(mlp), 0.5, optimizer=sgd(0.1, momentum=0.5), local_epochs=2)
    result = run_rounds(client, shared_out(classes([7, 3, 10, 2, 5])), 12, sampler=Uniform(2))
    torch.testing.assert_close(result.w, result.v.mean(0), rtol=0, atol=1e-12)
    assert len(result.v.unique(dim=0)) == 5


@pytest.mark.slow
def test_forged_model_counts_once_in_a_full_cohort():
    """The mean includes the forged model once, also after many rounds."""
    client = L2SGD(Point(), 0.6, criterion=HalfSquares(), optimizer=sgd(0.2), local_steps=3)
    attack_settings = {"attack": SameValue(value=100.0), "ids": [0]}
    result = run_rounds(client, DATA, rounds=40, **attack_settings)
    expected = (100 + result.v[1:].sum()) / 4
    torch.testing.assert_close(result.w[0], expected, rtol=1e-12, atol=0)


@exhaustive_but("2.0")
@pytest.mark.slow
@pytest.mark.parametrize("lam", [0.5, 2.0])
def test_personal_models_end_between_local_models_and_the_mean(lam):
    """K = 1: x_i − ȳ = (1 − η)(1 − ηλ)(x_i − ȳ) + η (y_i − ȳ), so (y_i − ȳ) / (1 + λ − ηλ):
    the minimum of the paper's objective, (y_i + λȳ) / (1 + λ), up to η."""
    client = L2SGD(Point(), lam, criterion=HalfSquares(), optimizer=sgd(0.3), local_steps=1)
    result = run_rounds(client, DATA, rounds=80)
    expected = Y.mean() + (Y - Y.mean()) / (1 + lam - 0.3 * lam)
    torch.testing.assert_close(result.v[:, 0], expected, rtol=0, atol=1e-9)


def test_lambda_zero_equals_local_training():
    data, settings = shared_out(classes([7, 3, 10])), {"optimizer": sgd(0.1), "local_epochs": 2}
    result = run_rounds(L2SGD(seeded(mlp), 0.0, **settings), data, 3)
    expected = run_rounds(Local(seeded(mlp), **settings), data, 3)
    assert torch.equal(result.v, expected.v)
    torch.testing.assert_close(result.w, expected.v.mean(0), rtol=0, atol=1e-14)


def test_large_lambda_equals_fedavg():
    data, settings = shared_out(classes([7, 3, 10])), {"optimizer": sgd(0.1), "local_epochs": 2}
    result = run_rounds(L2SGD(seeded(mlp), 10.0, **settings), data, 3)
    expected = run_rounds(FedAvg(seeded(mlp), **settings), data, 3)
    torch.testing.assert_close(result.w, expected.w, rtol=0, atol=1e-13)


@table_test("lam", [-1.0, float("nan"), float("inf")])
def test_invalid_lambda_is_refused(lam):
    with pytest.raises(ValueError, match=f"`lam` to be at least 0, and finite, but got {lam}"):
        L2SGD(seeded(mlp), lam)
