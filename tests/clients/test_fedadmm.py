"""FedADMM against the same in dense float64."""

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
from exhaustive import exhaustive_but, exhaustive_for
from small_federations import HalfSquares, classes, mlp, seeded, sgd, shared_out
from torch import nn

from pl_fed import Federation
from pl_fed.aggregators import Mean
from pl_fed.clients import FedADMM
from pl_fed.samplers import All, Uniform
from pl_fed.types import Batch

pytestmark = pytest.mark.slow

PROBLEM = LeastSquares.drawn([8, 3, 12, 5, 7])
DATA = shared_out(PROBLEM.arrays, batch_size=100)


def fedadmm(rho=0.3, rate=0.6, steps=4, **kwargs):
    net = nn.Linear(3, 1, bias=False).double()
    nn.init.ones_(net.weight)
    settings = {"optimizer": sgd(rate), "criterion": HalfSquares(), "local_steps": steps}
    return FedADMM(net, rho=rho, **settings, **kwargs)


def close(actual, expected, tolerance=1e-12):
    expected = torch.as_tensor(np.asarray(expected), dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@exhaustive_for("all-samples-stacked", "2-uniform-stacked")
@cohorts_weights_and_engines
def test_rounds_equal_admm_on_equation_19(engine, weights, sampler):
    """Steps on α f(w_i) + ⟨π_i, w_i − w⟩ + ρ/2 ‖w_i − w‖², then π_i, and the mean of all u_i."""
    rho, alpha = 0.3, PROBLEM.alpha(weights)
    local, dual = np.ones((5, 3)), np.zeros((5, 3))
    client = fedadmm(rho, weights=weights)
    for state in after_each_round(client, DATA, 6, sampler=sampler, engine=engine):
        w, losses = (local + dual / rho).mean(0), []
        for i in state["cohort"].tolist():
            for _ in range(4):
                away = local[i] - w
                loss = alpha[i] * PROBLEM.loss(i, local[i]) + dual[i] @ away + rho / 2 * away @ away
                losses.append(loss)
                slope = alpha[i] * PROBLEM.gradient(i, local[i]) + dual[i] + rho * away
                local[i] = local[i] - 0.6 * slope
            dual[i] = dual[i] + rho * (local[i] - w)
        close(state["personal"], local)
        close(state["dual"], dual)
        close(state["w"], (local + dual / rho).mean(0))
        assert float(state["report"]["train/loss"]) == pytest.approx(np.mean(losses), rel=1e-12)


@exhaustive_but("uniform-5-50")
@pytest.mark.parametrize(
    ("weights", "cohort_size", "rounds"), [("uniform", 5, 50), ("samples", 2, 130)]
)
def test_rounds_converge_to_the_minimiser_of_the_weighted_loss(weights, cohort_size, rounds):
    """Σ α_i ∇f_i(w) = 0 where all w_i = w and Σ π_i = 0, with however few steps in a round."""
    alpha = PROBLEM.alpha(weights)
    hessian = sum(a * h for a, h in zip(alpha, PROBLEM.hessians))
    right = sum(a * h @ e for a, h, e in zip(alpha, PROBLEM.hessians, PROBLEM.estimates))
    client = fedadmm(rho=0.2, rate=1.0, steps=3, weights=weights)
    actual = after(client, DATA, rounds, sampler=Uniform(cohort_size))
    close(actual["w"], np.linalg.solve(hessian, right), 1e-7)
    close(actual["personal"], np.tile(actual["w"], (5, 1)), 1e-6)
    close(actual["dual"].sum(0), np.zeros(3), 1e-6)


def test_objective_equals_hand_computed_values():
    """α = 1/4, y − w_i = 2: ½ + 3 · (1 − 5) + 0.5/2 · 16 = −7.5, and slopes that add up."""
    client = fedadmm(rho=0.5).double()
    client.population = type(client.population)(clients=4, cohort=4, samples=4)
    client.row("personal").data.copy_(torch.tensor([1.0, 0.0, 0.0]))
    rows = {
        "broadcast": torch.tensor([5.0, 0.0, 0.0], dtype=torch.float64),
        "dual": torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64),
        "samples": torch.ones(1, dtype=torch.float64),
    }
    x = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    with client.reading(rows):
        loss = client.training_step(Batch(x, torch.tensor([[3.0]], dtype=torch.float64)), 0)
    loss.backward()
    assert loss.item() == 0.5 - 12.0 + 4.0
    assert client.personal_model.weight.grad.tolist() == [[-0.5 + 3.0 - 2.0, 0.0, 0.0]]


def test_mixed_precision_keeps_the_price_at_the_global_model_at_zero():
    client = FedADMM(nn.Linear(20, 5))
    round = client.run_begin(client.new_round())
    dual = torch.full((105,), 1.003)  # the product is 105.315, and 105 in bfloat16
    round.states["dual"], round.broadcast.parameters[:] = dual[None], dual.sign()
    client.row("personal").data.copy_(round.broadcast.parameters)
    batch = Batch(torch.ones(5, 20), torch.arange(5))
    with client.reading(round.client_rows(0)), torch.autocast("cpu", torch.bfloat16):
        loss, plain = client.training_step(batch, 0), client.loss("personal", batch)
    assert loss.item() == pytest.approx(plain.item(), abs=1e-3)


@pytest.mark.exhaustive
def test_engines_and_chunks_agree_on_all_states(uncompiled):
    data = shared_out(classes([9, 5, 12, 4]))
    client = FedADMM(seeded(mlp), optimizer=sgd(0.3), local_epochs=2, weights="samples")
    assert {"dual", "sent"} <= set(engines_agree(client, data, 3, uncompiled, Uniform(3)))


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match=r"Expected argument `rho` to be above 0, .* but got 0"):
        fedadmm(rho=0)
    with pytest.raises(ValueError, match=r"Expected argument `weights` .* but got 'n'"):
        fedadmm(weights="n")
    match = "Expected argument `weighting` of Mean to be 'uniform' for FedADMM"
    with pytest.raises(ValueError, match=match):
        Federation(All(), Mean("samples"), seed=0).setup(fedadmm(), DATA, "fit")
