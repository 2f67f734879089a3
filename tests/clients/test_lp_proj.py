"""ADMM-based Lp-Proj-2 against Algorithm 2 of FLAME's paper with a dense P, in float64."""

import numpy as np
import pytest
import torch
from dense_admm import LeastSquares
from every_state import (
    after,
    after_each_round,
    cohorts_weights_and_engines,
    engines_agree,
)
from exhaustive import exhaustive_but
from small_federations import HalfSquares, classes, mlp, points, seeded, sgd, shared_out
from tables import table_test
from torch import nn

from pl_fed import Federation
from pl_fed.aggregators import Krum, Mean, Median
from pl_fed.clients import FLAME, LpProj
from pl_fed.functional.projection import SparseProjection
from pl_fed.samplers import All, Uniform
from pl_fed.types import Batch

D = 7
PROBLEM = LeastSquares.drawn([8, 3, 12, 5, 7], d=D)
DATA = shared_out(PROBLEM.arrays, batch_size=100)
START = np.linspace(-1, 2, D)


def lp_proj(dimensions=3, kind=LpProj, rate=0.1, steps=4, **kwargs):
    net = nn.Linear(D, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.from_numpy(START)[None])
    settings = {"optimizer": sgd(rate), "criterion": HalfSquares(), "local_steps": steps, **kwargs}
    return kind(net, **({"dimensions": dimensions} if kind is LpProj else {}), **settings)


def close(actual, expected, tolerance=1e-12):
    expected = torch.as_tensor(np.asarray(expected), dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def matrix(short, seed=0):
    """The dense P."""
    return SparseProjection(D, short, seed).double()(torch.eye(D, dtype=torch.float64)).T.numpy()


@pytest.mark.slow
@cohorts_weights_and_engines
def test_rounds_equal_algorithm_2(engine, weights, sampler):
    lam, rho, alpha, p = 1.3, 0.4, PROBLEM.alpha(weights), matrix(3, seed=5)
    theta, local, dual = np.tile(START, (5, 1)), np.tile(p @ START, (5, 1)), np.zeros((5, 3))
    client = lp_proj(lam=lam, rho=rho, weights=weights, projection_seed=5)
    for state in after_each_round(client, DATA, 6, sampler=sampler, engine=engine):
        w, losses = (local + dual / rho).mean(0), []
        for i in state["cohort"].tolist():
            for _ in range(4):
                apart = p @ theta[i] - local[i]
                losses.append(PROBLEM.loss(i, theta[i]) + lam / 2 * apart @ apart)
                theta[i] = theta[i] - 0.1 * (PROBLEM.gradient(i, theta[i]) + lam * p.T @ apart)
            stiffness = lam * alpha[i]
            local[i] = (stiffness * p @ theta[i] + rho * w - dual[i]) / (stiffness + rho)
            dual[i] = dual[i] + rho * (local[i] - w)
        close(state["personal"], theta)
        close(state["local"], local)
        close(state["dual"], dual)
        after_round = (local + dual / rho).mean(0)
        close(torch.from_numpy(p) @ state["w"], after_round)
        close(state["w"], START + p.T @ (after_round - p @ START))
        assert float(state["report"]["train/loss"]) == pytest.approx(np.mean(losses), rel=1e-12)


@exhaustive_but("2")
@pytest.mark.slow
@pytest.mark.parametrize("sampler", [All(), Uniform(2)], ids=["all", "2"])
def test_projection_of_full_dimension_equals_flame(sampler):
    """P is an order and signs then."""
    actual = after(lp_proj(D, rho=0.3), DATA, 5, sampler=sampler)
    expected = after(lp_proj(kind=FLAME, rho=0.3), DATA, 5, sampler=sampler)
    close(actual["w"], expected["w"])
    close(actual["personal"], expected["personal"])


def test_krum_compares_projected_uploads():
    """Krum selects the u_i nearest to the others; w is that u_i."""
    client, p = lp_proj(3), torch.from_numpy(matrix(3))
    state = after(client, DATA, 1, aggregator=Krum(num_byzantine=1))
    u = state["local"] + state["dual"] / 0.1
    gaps = torch.cdist(u, u).square()
    best = gaps.sort(1).values[:, 1:3].sum(1).argmin()  # n − f − 2 = 2 neighbours
    close(p @ state["w"], u[best])
    assert not torch.allclose(p @ state["w"], u.mean(0))


def test_the_pull_acts_in_the_span_of_the_rows_only():
    """Without data, as η = 1 and λ = 1 say: P θ_i goes to w_i = 0, the rest of θ_i stays."""
    client, p = lp_proj(3, lam=1.0).double(), torch.from_numpy(matrix(3))
    theta = client.row("personal").data
    before = theta.clone()
    empty_batch = torch.zeros(1, D, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    with client.reading({"local": torch.zeros(3, dtype=torch.float64)}):
        client.training_step(Batch(*empty_batch), 0).backward()
    after_step = theta - client.personal_model.weight.grad.flatten()
    close(after_step, before - p.T @ (p @ before))
    close(p @ after_step, torch.zeros(3))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_engines_and_chunks_agree_on_all_states(uncompiled):
    data = shared_out(classes([9, 5, 12, 4]))
    client = LpProj(seeded(mlp), dimensions=6, optimizer=sgd(0.3, momentum=0.5), local_epochs=2)
    first = engines_agree(client, data, 3, uncompiled, Uniform(3))
    assert first["local"].shape == first["dual"].shape == (4, 6)


def test_only_personal_models_are_evaluated():
    assert lp_proj().evaluated == ("personal",)


@table_test(
    ("arguments", "match"),
    [
        ({"dimensions": 0}, "`dimensions` to be at least 1 but got 0"),
        ({"dimensions": 8}, "`dimensions` to be at most the number of .* 7, but got 8"),
        ({"lam": 0.0}, "`lam` to be above 0, and finite, but got 0.0"),
        ({"rho": 0.0}, "`rho` to be above 0, and finite, but got 0.0"),
    ],
)
def test_invalid_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=f"Expected argument {match}"):
        lp_proj(**arguments)


def test_a_mean_by_samples_is_refused_and_a_median_is_not():
    data = shared_out(points([1.0], [2.0]))
    settings = {"dimensions": 1, "criterion": HalfSquares(), "optimizer": sgd(0.1)}
    client = LpProj(nn.Linear(1, 1).double(), **settings)
    Federation(All(), Median(), seed=0).setup(client, data, "fit")
    with pytest.raises(ValueError, match="`weighting` of Mean to be 'uniform' for LpProj"):
        Federation(All(), Mean("samples"), seed=0).setup(client, data, "fit")
