"""Mean-regularised learning against dense simulations on points."""

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

from pl_fed.attacks import SameValue, SignFlipping
from pl_fed.clients import FLAME, Ditto, Local, MeanRegularized
from pl_fed.samplers import Uniform

Y = torch.tensor([1.0, -2.0, 4.0, 9.0], dtype=torch.float64)
DATA = shared_out(points(*[[float(y)] for y in Y]))
ENGINES = ["one_by_one", "stacked", "stacked_compiled"]


@exhaustive_but(
    "clients-one_by_one", "cohort-one_by_one", "cohort-stacked", "clients-stacked_compiled"
)
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mean", ["clients", "cohort"])
def test_rounds_equal_a_dense_simulation(uncompiled, engine, mean):
    theta, w, cohorts = torch.zeros_like(Y), torch.zeros(()), [(1, 2, 3), (0, 1, 2), (0, 1, 3)]
    for cohort in cohorts:
        chosen = torch.tensor(cohort)
        for _ in range(3):
            local_models = theta[chosen]
            theta[chosen] = local_models - 0.1 * (
                local_models - Y[chosen] + 0.7 * (local_models - w)
            )
        w = theta.mean() if mean == "clients" else theta[chosen].mean()
    client = MeanRegularized(
        Point(), 0.7, mean, criterion=HalfSquares(), optimizer=sgd(0.1), local_steps=3
    )
    settings = {"engine": engine, "chunk_size": 2, "sampler": Cohorts(*cohorts)}
    result = run_rounds(client, DATA, rounds=3, **settings)
    torch.testing.assert_close(result.v[:, 0], theta, rtol=0, atol=1e-13)
    torch.testing.assert_close(result.w[0], w, rtol=0, atol=1e-13)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_personal_models_end_between_local_models_and_the_mean():
    """At (y_i + λȳ) / (1 + λ), whatever the number of local steps."""
    client = MeanRegularized(
        Point(), 2.0, criterion=HalfSquares(), optimizer=sgd(0.25), local_steps=4
    )
    result = run_rounds(client, DATA, rounds=65)
    torch.testing.assert_close(result.v[:, 0], (Y + 2 * Y.mean()) / 3, rtol=0, atol=1e-9)
    torch.testing.assert_close(result.w[0], Y.mean(), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_the_global_model_stays_the_mean_of_all_clients():
    data, settings = shared_out(classes([7, 3, 10, 2, 5])), {"optimizer": sgd(0.1)}
    result = run_rounds(MeanRegularized(seeded(mlp), **settings), data, 12, sampler=Uniform(2))
    torch.testing.assert_close(result.w, result.v.mean(0), rtol=0, atol=1e-12)
    cohort_mean = MeanRegularized(seeded(mlp), mean="cohort", **settings)
    cohort_mean = run_rounds(cohort_mean, data, 12, sampler=Uniform(2))
    assert (cohort_mean.w - cohort_mean.v.mean(0)).abs().max() > 1e-3


@pytest.mark.slow
def test_both_means_are_equal_in_a_full_cohort():
    data, settings = shared_out(classes([7, 3, 10])), {"optimizer": sgd(0.1)}
    clients_mean, cohort_mean = (
        run_rounds(MeanRegularized(seeded(mlp), mean=mean, **settings), data, 3)
        for mean in ("clients", "cohort")
    )
    torch.testing.assert_close(clients_mean.w, cohort_mean.w, rtol=0, atol=1e-14)
    torch.testing.assert_close(clients_mean.v, cohort_mean.v, rtol=0, atol=1e-14)


@pytest.mark.slow
def test_lambda_zero_equals_local_training():
    data, settings = shared_out(classes([7, 3, 10])), {"optimizer": sgd(0.1), "local_epochs": 2}
    result = run_rounds(MeanRegularized(seeded(mlp), 0.0, **settings), data, 3)
    assert torch.equal(result.v, run_rounds(Local(seeded(mlp), **settings), data, 3).v)


@pytest.mark.slow
def test_first_round_trains_the_personal_models_of_ditto():
    data, settings = shared_out(classes([7, 3, 10])), {"optimizer": sgd(0.1), "local_epochs": 2}
    result = run_rounds(MeanRegularized(seeded(mlp), 0.5, **settings), data, 1)
    assert torch.equal(result.v, run_rounds(Ditto(seeded(mlp), 0.5, **settings), data, 1).v)


@table_test(
    ("arguments", "match"),
    [
        ({"lam": -1.0}, "`lam` to be at least 0, and finite, but got -1.0"),
        ({"lam": float("nan")}, "`lam` to be at least 0, and finite, but got nan"),
        ({"mean": "all"}, "`mean` to be 'clients' or 'cohort' but got 'all'"),
    ],
)
def test_invalid_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        MeanRegularized(seeded(mlp), **arguments)


@exhaustive_but("attack0")
@pytest.mark.slow
@pytest.mark.parametrize("attack", [SameValue(value=100.0), SignFlipping(of="model")])
def test_forged_model_counts_once_in_a_full_cohort(attack):
    """As in FLAME, where ρ is λα: the forged models of many rounds do not add up."""

    def ended(kind, **options):
        options = {"optimizer": sgd(0.2), "local_steps": 3, "criterion": HalfSquares(), **options}
        attack_settings = {"rounds": 12, "attack": attack, "ids": [0]}
        return float(run_rounds(kind(Point(), lam=0.6, **options), DATA, **attack_settings).w)

    expected = ended(FLAME, rho=0.15, pull_to="broadcast")
    assert ended(MeanRegularized, mean="cohort") == pytest.approx(expected)
    assert ended(MeanRegularized) == pytest.approx(expected)
