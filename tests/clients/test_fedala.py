"""FedALA against whole rounds in NumPy: its weights, its start and its local steps."""

import math

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_for
from personal_models import trained, validated_by_training
from small_federations import (
    Cohorts,
    HalfSquares,
    Point,
    classes,
    draw_regressions,
    mlp,
    reals,
    run_rounds,
    samples_of,
    seeded,
    sgd,
    shared_out,
    two_layers,
)
from tables import table_test
from torch.testing import assert_close

from pl_fed.clients import FedALA
from pl_fed.optimizers import BoxSGD
from pl_fed.types import Batch

ENGINES = ["one_by_one", "stacked", "stacked_compiled"]


def minibatches(x, y, batch, steps):
    """Yield minibatches in the client's order, pass after pass."""
    firsts = range(0, len(x), batch)
    for step in range(steps):
        first = firsts[step % len(firsts)]
        yield x[first : first + batch], y[first : first + batch]


def gradients(body, head, x, y):
    """Return the gradients of ½ ‖HBx − y‖², the mean over a minibatch."""
    features = x @ body.T
    error = (features @ head.T - y) / len(x)
    return head.T @ error.T @ x, error.T @ features


def simulate(data, cohorts, settings, batch=4):
    """Return the global net, the clients' nets and their weights of the head."""
    start = [layer.weight.detach().numpy().copy() for layer in seeded(two_layers).double()]
    body, head = start
    nets = [(body, head)] * 3
    weights = [np.ones_like(head) for _ in range(3)]
    rounds = [0, 0, 0]
    for cohort in cohorts:
        ends = []
        for k in cohort:
            x, y = samples_of(data, k)
            own_head, per_pass = nets[k][1], math.ceil(len(x) / batch)
            passes = [0, settings["first_epochs"], 1][min(rounds[k], 2)]
            steps = passes * math.ceil(settings["share"] * per_pass)
            for inputs, targets in minibatches(x, y, batch, steps):
                mixed = own_head + (head - own_head) * weights[k]
                slope = gradients(body, mixed, inputs, targets)[1] * (head - own_head)
                weights[k] = np.clip(weights[k] - settings["eta"] * slope, 0, 1)
            net_body, net_head = body.copy(), own_head + (head - own_head) * weights[k]
            for inputs, targets in minibatches(x, y, batch, 2 * per_pass):
                to_body, to_head = gradients(net_body, net_head, inputs, targets)
                net_body, net_head = net_body - 0.05 * to_body, net_head - 0.05 * to_head
            nets[k] = (net_body, net_head)
            rounds[k] += 1
            ends.append(nets[k])
        body, head = (np.mean(parts, 0) for parts in zip(*ends))
    flat = [np.concatenate([part.ravel() for part in net]) for net in ((body, head), *nets)]
    return flat[0], np.stack(flat[1:]), np.stack([weight.ravel() for weight in weights])


@exhaustive_for("stacked_compiled")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_rounds_equal_numpy(uncompiled, engine):
    """Clients of one to four minibatches, a changing cohort, and weights that reach the bounds."""
    cohorts = [(0, 1), (1, 2), (0, 1), (0, 2), (0, 2), (1, 2)]
    for seed, (share, eta) in enumerate([(0.8, 40.0), (0.5, 5.0), (0.8, 40.0)]):
        data = shared_out(draw_regressions(seed, fewest=3, most=13), batch_size=4)
        client = FedALA(
            seeded(two_layers),
            mixing_lr=eta,
            mixing_share=share,
            first_epochs=4,
            criterion=HalfSquares(),
            optimizer=sgd(0.05),
            local_epochs=2,
        )
        settings = {"sampler": Cohorts(*cohorts), "shuffle": False, "engine": engine}
        outcome = run_rounds(client, data, rounds=len(cohorts), chunk_size=2, **settings)
        expected = {"first_epochs": 4, "share": share, "eta": eta}
        w, v, weights = simulate(data, cohorts, expected)
        np.testing.assert_allclose(outcome.w.numpy(), w, rtol=0, atol=1e-9)
        np.testing.assert_allclose(outcome.v.numpy(), v, rtol=0, atol=1e-9)
        np.testing.assert_allclose(outcome.states["weights"].numpy(), weights, atol=1e-9)
        assert (weights < 1).mean() > 0.01
        assert (weights > 0).any()
        if eta == 40.0:
            assert (weights == 0).any()


def test_worked_example_of_two_numbers():
    """θ = (1, 2), w = (2, 0), ∇ = (.3, −.2) at W = 1: W = (.7, .6) and θ̂ = (1.7, .8)."""
    client = FedALA(Point(2), mixed=["value"], criterion=HalfSquares()).double()
    round = client.new_round(samples=1)
    round.broadcast.parameters = torch.tensor([2.0, 0.0], dtype=torch.float64)
    round.states["personal"] = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    round.states["rounds"] += 2
    round = client.run_begin(round)
    assert round.preparation_steps["mixing"].tolist() == [[1]]
    client.row("mixing").data.copy_(round.models["mixing"].parameters[0])
    batch = Batch(torch.zeros(1, 1), torch.tensor([[1.7, 0.2]], dtype=torch.float64))
    with client.reading(round.client_rows(0)):
        client.preparation_step(batch, 0).backward()
    BoxSGD(client.mixing_model.parameters(), lr=1.0).step()
    round.models["mixing"].parameters = client.row("mixing").data[None].clone()
    client.end_preparation(round)
    torch.testing.assert_close(round.states["weights"], torch.tensor([[0.7, 0.6]]).double())
    start = round.models["personal"].parameters
    torch.testing.assert_close(start, torch.tensor([[1.7, 0.8]]).double())


def test_numbers_of_steps_on_the_weights():
    """None in a client's first round, several passes in the second, and one in each later one."""
    client = FedALA(seeded(mlp), mixing_share=0.8, first_epochs=3)
    for rounds, passes in ((0, 0), (1, 3), (2, 1), (7, 1)):
        for batches, share in ((1, 1), (2, 2), (5, 4), (10, 8), (11, 9)):
            round = client.new_round(steps=batches)
            round.states["rounds"] += rounds
            steps = client.run_begin(round).preparation_steps["mixing"]
            assert steps.tolist() == [[passes * share]]


@pytest.mark.slow
def test_first_round_is_that_of_the_global_model_and_of_no_weights_that_of_local_training():
    """W stays 1 without a learning rate: rounds of FedAvg; the tested model is that of a client."""
    data = validated_by_training(shared_out(classes([7, 3, 10])))
    settings = {"optimizer": sgd(0.1), "local_epochs": 2}
    fixed = trained(FedALA(seeded(mlp), mixing_lr=0.0, **settings), data, 3)
    learned = trained(FedALA(seeded(mlp), **settings), data, 3)
    assert (fixed.kept["weights"] == 1).all()
    assert (fixed.w - learned.w).abs().max() > 1e-6
    torch.testing.assert_close(fixed.kept["personal"].mean(0), fixed.w)
    loss = learned.metrics["personal"]["loss"].mean()
    assert loss < learned.metrics["global"]["loss"].mean()


@pytest.mark.slow
def test_first_round_starts_with_the_running_statistics_of_the_global_model():
    layer = torch.nn.BatchNorm1d(1, affine=False, momentum=0.5)
    net = torch.nn.Sequential(layer, torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    x = torch.tensor([[2.0], [4.0], [10.0], [14.0]])  # means 3 and 12, variances 2 and 8
    data = shared_out(reals(x, torch.zeros(4, 1), [0, 0, 1, 1]))
    client = FedALA(net, criterion=HalfSquares(), optimizer=sgd(0.0))
    outcome = run_rounds(client, data, 2, sampler=Cohorts([0], [1]))
    mean, variance = 0.5 * 3, 0.5 * 1 + 0.5 * 2  # of the global model after the first round
    expected = torch.tensor([[0.5 * mean + 0.5 * 12, 0.5 * variance + 0.5 * 8]]).double()
    assert_close(outcome.states["personal.statistics"][1:], expected)


def test_a_client_without_a_local_step_sends_nothing():
    class Waiting(FedALA):
        def begin(self, client):
            super().begin(client)
            if client.steps:
                client.steps["personal"] = client.steps["personal"] * (client.ids != 1)[:, None]

    client = Waiting(seeded(mlp), optimizer=sgd(0.1), local_steps=2)
    start = client.initial_row().double()
    outcome = run_rounds(client, shared_out(classes([7, 5, 10])), rounds=1)
    changes = outcome.states["personal"] - start
    assert not changes[1].any()
    torch.testing.assert_close(outcome.w - start, changes.mean(0), rtol=0, atol=1e-12)


@table_test(
    "arguments, match",
    [
        ({"mixing_lr": -1.0}, "`mixing_lr`"),
        ({"mixing_share": 0.0}, "`mixing_share`"),
        ({"mixing_share": 1.5}, "`mixing_share`"),
        ({"first_epochs": 0}, "`first_epochs`"),
        ({"mixed": ["9"]}, "`mixed` to list names among"),
        ({"mixed": []}, "`mixed` to name at least one part of the net but got an empty list"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        FedALA(mlp(), **arguments)
