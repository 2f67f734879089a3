"""MAPPER's mixtures, worked by hand on points, and its choice of λ made anew."""

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
from torch.nn.functional import cross_entropy

from pl_fed.clients import Local, Mapper

Y = (1.0, 5.0)
LAMS = (0.2, 0.5, 0.9)
all_engines = pytest.mark.parametrize("engine", ["one_by_one", "stacked"])


def candidate(lam, v, w, y, steps, lr, momentum):
    """Where SGD takes v by ½ (λ v + (1 − λ) w^t − y)², and w by ½ (λ v + (1 − λ) w − y)²."""
    local_w, fast_v, fast_w = w, 0.0, 0.0
    for _ in range(steps):
        slope_v = lam * (lam * v + (1 - lam) * w - y)
        slope_w = (1 - lam) * (lam * v + (1 - lam) * local_w - y)
        fast_v, fast_w = momentum * fast_v + slope_v, momentum * fast_w + slope_w
        v, local_w = v - lr * fast_v, local_w - lr * fast_w
    return v, local_w, (lam * v + (1 - lam) * w - y) ** 2


def simulate(rounds, steps=3, lr=0.25, momentum=0.5, start=2.0):
    """Return w, each client's v, and its index of λ."""
    w, v, choice = start, [start] * 2, [None] * 2
    for _ in range(rounds):
        ends = []
        for k, y in enumerate(Y):
            candidates = [candidate(lam, v[k], w, y, steps, lr, momentum) for lam in LAMS]
            choice[k] = min(range(3), key=lambda i: candidates[i][2])
            v[k], end, _ = candidates[choice[k]]
            ends.append(end)
        w = sum(ends) / 2
    return w, v, choice


@exhaustive_but("0.5-one_by_one", "0.0-stacked")
@pytest.mark.slow
@all_engines
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_rounds_of_two_clients_equal_hand_computed_rounds(engine, momentum):
    """The mean is over the w of all clients, not of the last client alone."""
    data = validated_by_training(shared_out(points(*[[y] for y in Y])))
    client = Mapper(
        Point(start=2.0), LAMS, optimizer=sgd(0.25, momentum=momentum), criterion=HalfSquares(),
        local_steps=3,
    )  # fmt: skip
    for rounds in (1, 3):
        result = trained(client, data, rounds, engine=engine)
        w, v, choice = simulate(rounds, momentum=momentum)
        assert result.w.item() == pytest.approx(w, abs=1e-12)
        assert result.kept["local"].flatten().tolist() == pytest.approx(v, abs=1e-12)
        assert result.kept["choice"].flatten().tolist() == choice
        mixed = [LAMS[i] * local_model + (1 - LAMS[i]) * w for i, local_model in zip(choice, v)]
        losses = [(prediction - y) ** 2 / 2 for prediction, y in zip(mixed, Y)]
        assert result.metrics["personal"]["loss"].tolist() == pytest.approx(losses, abs=1e-12)


@pytest.mark.slow
def test_lambda_one_equals_local_training():
    data = shared_out(classes([9, 5, 12]), val_fraction=0.3)
    settings = {"optimizer": sgd(0.1, momentum=0.9), "local_epochs": 2}
    alone = trained(Local(seeded(mlp), **settings), data, 3)
    result = trained(Mapper(seeded(mlp), [1.0], **settings), data, 3)
    torch.testing.assert_close(result.kept["local"], alone.kept["personal"])
    assert torch.equal(result.w, Mapper(seeded(mlp)).double().row("global").data)


SIZES = [30, 24, 12, 20, 3]


@pytest.mark.slow
def test_clients_choose_the_best_lambda_or_the_middle_lambda_without_data():
    """Training with a single λ gives the candidate of that λ."""
    arrays, settings = classes(SIZES, seed=3), {"optimizer": sgd(0.5), "local_epochs": 5}
    data = shared_out(arrays, val_fraction=0.3)
    object.__setattr__(data.clients.val, "offsets", data.clients.val.offsets.clone())
    data.clients.val.offsets[-1] = data.clients.val.offsets[-2]  # the last client has none
    result = trained(Mapper(seeded(mlp), LAMS, **settings), data, 1)
    start = Mapper(seeded(mlp)).double().row("global").data
    losses = torch.zeros(len(SIZES), 3)
    rows, net = [], mlp().double()
    for i, lam in enumerate(LAMS):
        alone = trained(Mapper(seeded(mlp), [lam], **settings), data, 1, sampler=Only(*range(5)))
        rows.append(alone.kept["local"])
        for k in range(4):
            index = data.clients.val.samples(k)
            mixture = lam * alone.kept["local"][k] + (1 - lam) * start
            nn.utils.vector_to_parameters(mixture, net.parameters())
            outputs = net(data.clients.inputs[index].double())
            losses[k, i] = cross_entropy(outputs, data.clients.targets[index]).detach()
    expected = [*losses[:4].argmin(1).tolist(), 1]
    assert result.kept["choice"][:, 0].tolist() == expected
    assert len(set(expected)) > 1
    for k, i in enumerate(expected):
        torch.testing.assert_close(result.kept["local"][k], rows[i][k])


@table_test("lams", [[], [0.0, 0.5], [0.5, 1.1], [0.5, 0.5], [float("nan")]])
def test_invalid_lambdas_are_refused(lams):
    with pytest.raises(ValueError, match=r"`lams` to be distinct numbers in \(0, 1\] but got \["):
        Mapper(Point(), lams)
