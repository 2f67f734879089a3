"""pFedMe in both forms, against loops in dense float64."""

import functools

import numpy as np
import pytest
import torch
from dense_admm import LeastSquares
from every_state import after, after_each_round, engines_agree
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
from torch import nn

from pl_fed.clients import PFedMe, PFedMeEpochs
from pl_fed.samplers import All, Uniform

PROBLEM = LeastSquares.drawn([8, 3, 12, 5, 7])
DATA = shared_out(PROBLEM.arrays, batch_size=100)
all_engines = pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
all_samplers = pytest.mark.parametrize("sampler", [All(), Uniform(2)], ids=["all", "2"])


def pfedme(kind=PFedMe, rate=0.05, steps=4, **kwargs):
    net = nn.Linear(3, 1, bias=False).double()
    nn.init.ones_(net.weight)
    settings = {"optimizer": sgd(rate), "criterion": HalfSquares(), "local_steps": steps, **kwargs}
    return kind(net, **settings)


def close(actual, expected, tolerance=1e-12):
    expected = torch.as_tensor(np.asarray(expected), dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@exhaustive_but("2.0-all-stacked", "1.0-2-one_by_one", "0.5-2-stacked", "0.5-all-one_by_one")
@pytest.mark.slow
@all_engines
@all_samplers
@pytest.mark.parametrize("beta", [1.0, 0.5, 2.0])
def test_rounds_equal_algorithm_1(engine, sampler, beta):
    """K = 3 steps on θ_i for each of R = 4 on w_i; w ← (1 − β) w + β mean of the cohort's."""
    lam, eta, rate = 2.0, 0.05, 0.1
    w, theta = np.ones(3), np.ones((5, 3))
    client = pfedme(rate=eta, lam=lam, personal_steps=3, personal_lr=rate)
    server = functools.partial(torch.optim.SGD, lr=beta)
    settings = {"sampler": sampler, "engine": engine, "server_optimizer": server}
    for state in after_each_round(client, DATA, 5, **settings):
        sent, losses = [], []
        for i in state["cohort"].tolist():
            local, theta[i] = w, w
            for _ in range(4):
                for _ in range(3):
                    slope = PROBLEM.gradient(i, theta[i]) + lam * (theta[i] - local)
                    theta[i] = theta[i] - rate * slope
                away = local - theta[i]
                losses.append(PROBLEM.loss(i, theta[i]) + lam / 2 * away @ away)
                local = local - eta * lam * away
            sent.append(local)
        w = (1 - beta) * w + beta * np.mean(sent, axis=0)
        close(state["w"], w)
        close(state["personal"], theta)
        assert float(state["report"]["train/loss"]) == pytest.approx(np.mean(losses), rel=1e-12)


@pytest.mark.slow
@all_engines
def test_two_steps_equal_hand_computed_steps(engine):
    """y = 8; λ = 1, K = 1, steps of 1/2 on θ, η = 1/4, R = 2.

    θ: 0 + (8 − 0)/2 = 4; w_i: 0 + 1/4 · 4 = 1. θ goes on: 4 + (4 − 3)/2 = 4.5; w_i: 1 + 3.5/4.
    In round 1 θ begins at w = 1.875: + (6.125)/2 = 4.9375.
    """
    settings = {"lam": 1.0, "personal_steps": 1, "personal_lr": 0.5, "criterion": HalfSquares()}
    client = PFedMe(Point().double(), optimizer=sgd(0.25), local_steps=2, **settings)
    data = shared_out(points([8.0]))
    state = after(client, data, 1, engine=engine)
    assert state["personal"].tolist() == [[4.5]]
    assert state["w"].tolist() == [1.875]
    client = PFedMe(Point().double(), optimizer=sgd(0.25), local_steps=1, **settings)
    assert after(client, data, 2, engine=engine)["personal"].tolist() == [[1 + (7 - 0) / 2]]


@pytest.mark.slow
@all_engines
def test_momentum_acts_on_w_and_weight_decay_on_f(engine):
    """θ_i takes its steps exactly, in any case."""
    lam, eta, rate = 2.0, 0.05, 0.1
    sent, ends = [], []
    for i in range(5):
        local, theta, velocity = np.ones(3), np.ones(3), 0.0
        for _ in range(4):
            for _ in range(3):
                slope = PROBLEM.gradient(i, theta) + 0.1 * theta
                theta = theta - rate * (slope + lam * (theta - local))
            velocity = 0.9 * velocity + lam * (local - theta)
            local = local - eta * velocity
        sent.append(local)
        ends.append(theta)
    optimizer = sgd(eta, momentum=0.9, weight_decay=0.1)
    client = pfedme(optimizer=optimizer, lam=lam, personal_steps=3, personal_lr=rate)
    actual = after(client, DATA, 1, engine=engine)
    close(actual["personal"], ends)
    close(actual["w"], np.mean(sent, axis=0))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_rounds_converge_to_the_minimiser_of_the_moreau_envelopes():
    """Theorem 1 of the paper: with K large, w equals (135), as in FLAME."""
    lam = 2.0
    client = pfedme(rate=1.2, steps=1, lam=lam, personal_steps=20, personal_lr=0.3)
    actual = after(client, DATA, 22)
    close(actual["w"], PROBLEM.solution(lam)[0], 1e-7)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_engines_and_chunks_agree(uncompiled):
    data = shared_out(classes([9, 5, 12, 4]))
    client = PFedMe(seeded(mlp), lam=2.0, personal_steps=2, optimizer=sgd(0.1), local_epochs=1)
    engines_agree(client, data, 2, uncompiled, Uniform(3))


@table_test(
    ("arguments", "match"),
    [
        ({"lam": 0.0}, "`lam` to be above 0, and finite, but got 0.0"),
        ({"personal_lr": -1.0}, "`personal_lr` to be above 0, and finite, but got -1.0"),
        ({"personal_steps": 0}, "`personal_steps` to be at least 1 but got 0"),
        ({"lr_scheduler": max}, "`lr_scheduler` to be None, .* but got"),
    ],
)
def test_invalid_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=f"Expected argument {match}"):
        pfedme(**arguments)


def test_optimizers_other_than_sgd_are_refused():
    match = r"Expected argument `optimizer` to build torch\.optim\.SGD but got Adam"
    with pytest.raises(ValueError, match=match):
        run_rounds(pfedme(optimizer=torch.optim.Adam), DATA, rounds=0)


# As FLAME's paper compares with it


@exhaustive_but("all-one_by_one", "2-stacked")
@pytest.mark.slow
@all_engines
@all_samplers
def test_epochs_then_one_step_equal_a_dense_simulation(engine, sampler):
    """θ_i is kept; w_i = w − η λ (w − θ_i)."""
    lam, eta = 2.0, 0.3
    w, theta = np.ones(3), np.ones((5, 3))
    client = pfedme(PFedMeEpochs, rate=0.1, lam=lam, eta=eta)
    for state in after_each_round(client, DATA, 5, sampler=sampler, engine=engine):
        sent = []
        for i in state["cohort"].tolist():
            for _ in range(4):
                slope = PROBLEM.gradient(i, theta[i]) + lam * (theta[i] - w)
                theta[i] = theta[i] - 0.1 * slope
            sent.append(w - eta * lam * (w - theta[i]))
        w = np.mean(sent, axis=0)
        close(state["w"], w)
        close(state["personal"], theta)


@table_test("arguments", [{"lam": 0.0}, {"eta": 0.0}, {"eta": float("nan")}])
def test_invalid_arguments_are_refused_with_epochs(arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"`{name}` to be above 0, and finite, but got {value}"):
        PFedMeEpochs(Point(), **arguments)


@exhaustive_but("one_by_one")
@pytest.mark.slow
@all_engines
def test_weight_decay_is_part_of_the_loss(engine):
    """The minimum of (w − 8)²/2 + w²/2 is at 4, for θ and w; θ need not be exact before."""
    client = PFedMe(
        Point(),
        lam=15.0,
        personal_steps=4,
        personal_lr=0.05,
        optimizer=sgd(0.2, weight_decay=1.0),
        criterion=HalfSquares(),
        local_steps=10,
    )
    end = after(client, shared_out(points([8.0])), 4, engine=engine)
    close(end["w"], [4.0], 1e-6)
    close(end["personal"].flatten(), [4.0], 1e-6)


def test_weight_decay_of_a_parameter_group_counts():
    def build(parameters):
        own = [part if isinstance(part, dict) else {"params": [part]} for part in parameters]
        return torch.optim.SGD([{"weight_decay": 0.3, **part} for part in own], lr=0.1)

    client = PFedMe(Point(), optimizer=build)
    client.check(shared_out(points([8.0])).clients, client.population)
    assert client.weight_decay == 0.3
    groups = client.objective.build_optimizer(client.trained_parameters).param_groups
    assert [group["weight_decay"] for group in groups] == [0.0, 0.0]
