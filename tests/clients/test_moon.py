"""MOON against whole rounds in NumPy, with the gradient of the contrast by hand."""

import math

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_for
from small_federations import (
    Cohorts,
    HalfSquares,
    classes,
    draw_regressions,
    mlp,
    run_rounds,
    run_tried_rounds,
    samples_of,
    seeded,
    sgd,
    shared_out,
    two_layers,
)
from tables import table_test
from torch import nn

from pl_fed.clients import FedAvg, Moon
from pl_fed.types import Batch

ENGINES = ["one_by_one", "stacked", "stacked_compiled"]


def compare(z, other):
    """Return the cosine similarities of rows, and their gradients in z."""
    norms, other_norms = (np.linalg.norm(rows, axis=1, keepdims=True) for rows in (z, other))
    similarity = (z * other).sum(1, keepdims=True) / norms / other_norms
    return similarity, other / norms / other_norms - similarity * z / norms**2


def descend(body, head, broadcast, previous, x, y, mu, tau, lr=0.05):
    """Return body and head after two passes in minibatches of 4."""
    for first in [*range(0, len(x), 4)] * 2:
        inputs, targets = x[first : first + 4], y[first : first + 4]
        z, z_global, z_previous = (inputs @ rows.T for rows in (body, broadcast, previous))
        error = (z @ head.T - targets) / len(inputs)
        to_global, slope_global = compare(z, z_global)
        to_previous, slope_previous = compare(z, z_previous)
        weight = 1 / (1 + np.exp((to_global - to_previous) / tau)) / tau
        slope = error @ head + mu * weight * (slope_previous - slope_global) / len(inputs)
        body, head = body - lr * slope.T @ inputs, head - lr * error.T @ z
    return body, head


def simulate(data, cohorts, mu, tau):
    """Return the global net's row, and those of the clients' last models."""
    body, head = (layer.weight.detach().numpy() for layer in seeded(two_layers).double())
    models = [(body, head)] * 3
    for cohort in cohorts:
        for k in cohort:
            models[k] = descend(
                body, head, body, models[k][0], *samples_of(data, k), mu=mu, tau=tau
            )
        body, head = (np.mean([models[k][part] for k in cohort], 0) for part in (0, 1))
    rows = [np.concatenate([part.ravel() for part in net]) for net in ((body, head), *models)]
    return rows[0], np.stack(rows[1:])


@exhaustive_for("stacked_compiled")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_rounds_equal_numpy(uncompiled, engine):
    cohorts = [(0, 1), (1, 2), (0, 1), (0, 2)]
    for seed, (mu, tau) in enumerate([(1.0, 0.5), (5.0, 1.0), (1.0, 0.5)]):
        data = shared_out(draw_regressions(seed), batch_size=4)
        settings = {"optimizer": sgd(0.05), "criterion": HalfSquares(), "local_epochs": 2}
        client = Moon(seeded(two_layers), mu, tau, **settings)
        settings = {"sampler": Cohorts(*cohorts), "shuffle": False, "engine": engine}
        outcome = run_rounds(client, data, rounds=4, chunk_size=2, **settings)
        w, models = simulate(data, cohorts, mu, tau)
        np.testing.assert_allclose(outcome.w.numpy(), w, rtol=0, atol=1e-9)
        np.testing.assert_allclose(outcome.states["previous"].numpy(), models, atol=1e-9)


def test_contrast_of_one_sample():
    """z = z_g = (1, 0) and z_p = (0, 1): the contrast is ln(1 + e^(−1/τ)); .1269280110 if τ = ½."""
    net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)).double()
    client = Moon(net, mu=3.0, criterion=HalfSquares()).double()
    row = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    client.row("global").data.copy_(row)
    round = client.run_begin(client.new_round())
    round.states["previous"] = torch.tensor([[0.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    batch = Batch(torch.ones(1, 1).double(), torch.full((1, 1), 3.0).double())
    with client.reading(round.client_rows(0)):
        outputs = client.training_step(batch, 0)
    assert outputs["contrast"].item() == pytest.approx(math.log1p(math.exp(-2)), abs=1e-12)
    assert outputs["contrast"].item() == pytest.approx(0.1269280110, abs=1e-10)
    assert outputs["loss"].item() == pytest.approx(2.0 + 3 * 0.1269280110, abs=1e-9)


@pytest.mark.slow
def test_first_round_and_no_contrast_are_those_of_fedavg():
    """At first the last model is the global one: both similarities have the same gradient."""
    data, settings = shared_out(classes([7, 3, 10])), {"optimizer": sgd(0.1), "local_epochs": 2}
    for mu, rounds in ((1.0, 1), (0.0, 3)):
        outcome = run_rounds(Moon(seeded(mlp), mu=mu, **settings), data, rounds)
        plain = run_rounds(FedAvg(seeded(mlp), **settings), data, rounds)
        torch.testing.assert_close(outcome.w, plain.w, rtol=0, atol=1e-12)
    other = run_rounds(Moon(seeded(mlp), mu=1.0, **settings), data, 3)
    assert (other.w - plain.w).abs().max() > 1e-4


def batch_norm_net():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def test_running_statistics_are_those_of_the_local_model_alone():
    """Without a contrast: the passes of the other models leave no trace."""
    data, settings = shared_out(classes([8, 12])), {"optimizer": sgd(0.1), "local_steps": 3}
    outcome = run_rounds(Moon(seeded(batch_norm_net), mu=0.0, **settings), data, 3)
    plain = run_rounds(FedAvg(seeded(batch_norm_net), **settings), data, 3)
    torch.testing.assert_close(outcome.w_statistics, plain.w_statistics, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_features_of_zero_have_a_finite_gradient():
    def dead():
        net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
        nn.init.constant_(net[0].bias, -100.0)
        return net

    client = Moon(seeded(dead), mu=5.0, optimizer=sgd(0.1), local_steps=2)
    for engine in ("one_by_one", "stacked"):
        outcome = run_rounds(client, shared_out(classes([5, 8])), rounds=2, engine=engine)
        assert outcome.w.isfinite().all()
        assert {float(report["train/rejected"]) for report in outcome.reports} == {0.0}


def test_a_net_without_a_separate_head_is_refused_before_training():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return 2 * self.last(self.body(x))

    with pytest.raises(ValueError, match="to return the head's outputs, but got other outputs"):
        run_tried_rounds(Moon(seeded(Scaled)), shared_out(classes([5, 8])), rounds=0)


@table_test(
    "arguments, match",
    [
        ({"mu": -1.0}, "`mu`"),
        ({"temperature": 0.0}, "`temperature`"),
        ({"head": "9"}, "`head` to be a module with trainable parameters, such as 0, 2, but got"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        Moon(mlp(), **arguments)
