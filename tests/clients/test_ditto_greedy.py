"""λ that is chosen for each step: against steps that are tried by hand."""

import pytest
import torch
from exhaustive import exhaustive_but
from personal_models import trained
from small_federations import (
    HalfSquares,
    Point,
    classes,
    mlp,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn
from torch.nn.functional import cross_entropy

from pl_fed.clients import Ditto, DittoGreedy
from pl_fed.types import Batch

SIZES = [30, 24, 12, 8, 40, 16, 3]
LAMS = (0.0, 0.5, 3.0)


def make_data(**kwargs):
    return shared_out(classes(SIZES, seed=4), batch_size=64, val_fraction=0.3, **kwargs)


def simulate(data, steps, enough, lr=0.3, personal_lr=0.2, fixed=0.7, rounds=2):
    """Plain torch, with full batches: w, all v, and the λ of the last round's last step."""

    def loss(row, index):
        weight, bias, weight2, bias2 = row.split([20, 5, 15, 3])
        hidden = torch.tanh(data.clients.inputs[index].double() @ weight.view(5, 4).T + bias)
        return cross_entropy(hidden @ weight2.view(3, 5).T + bias2, data.clients.targets[index])

    def slope(row, index):
        return torch.autograd.functional.jacobian(lambda at: loss(at, index), row)

    w = nn.utils.parameters_to_vector(seeded(mlp).double().parameters()).detach()
    v, choices = [w.clone() for _ in SIZES], [[] for _ in SIZES]
    for _ in range(rounds):
        ends = []
        for k in range(len(SIZES)):
            train, val = data.clients.train.samples(k), data.clients.val.samples(k)
            local_w = w.clone()
            for _ in range(steps):
                local_w = local_w - lr * slope(local_w, train)
                there = [
                    v[k] - personal_lr * (slope(v[k], train) + lam * (v[k] - w)) for lam in LAMS
                ]
                if len(val) >= enough:
                    best = min(range(3), key=lambda i: float(loss(there[i], val)))
                    v[k], lam = there[best], LAMS[best]
                else:
                    lam = fixed
                    v[k] = v[k] - personal_lr * (slope(v[k], train) + lam * (v[k] - w))
                choices[k].append(lam)
            ends.append(local_w)
        w = torch.stack(ends).mean(0)
    return w, torch.stack(v), choices


@exhaustive_but("1-one_by_one", "4-stacked", "4-stacked_compiled")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked", "stacked_compiled"])
@pytest.mark.parametrize("enough", [1, 4])
def test_each_step_uses_the_lambda_with_the_lowest_validation_loss(uncompiled, engine, enough):
    data = make_data()
    assert data.clients.val.sizes.min() < 4 < data.clients.val.sizes.max()
    client = DittoGreedy(
        seeded(mlp), LAMS, lam=0.7, min_validation=enough, optimizer=sgd(0.3), personal_lr=0.2,
        local_steps=4,
    )  # fmt: skip
    result = run_rounds(client, data, 2, engine=engine)
    w, v, choices = simulate(data, 4, enough)
    lams = {lam for client_choices in choices for lam in client_choices}
    assert lams >= {0.0, 3.0, *([0.7] if enough == 4 else [])}
    torch.testing.assert_close(result.w, w, rtol=0, atol=1e-10)
    torch.testing.assert_close(result.v, v, rtol=0, atol=1e-10)
    mean = sum(sum(client_choices[4:]) for client_choices in choices) / (4 * len(SIZES))
    assert float(result.reports[-1]["train/lam"]) == pytest.approx(mean)


@pytest.mark.parametrize(("rate", "best"), [(0.3, 0.5), (0.15, 3.0)])
def test_candidate_steps_use_the_current_learning_rate(rate, best):
    """v = y = 10, w^t = 0: the steps lead to 8.5 or 1, or at half the rate to 9.25 or 5.5."""
    client = DittoGreedy(Point(start=10.0), [0.5, 3.0], 0.5, criterion=HalfSquares())
    rows = {
        "broadcast": torch.tensor([0.0]),
        "lams": torch.tensor([0.5, 3.0]),
        "personal.lr": torch.tensor([rate]),
        "validation_samples": torch.tensor([4.0]),
        "validation.inputs": torch.zeros(5),
        "validation.targets": torch.tensor([6.0, 6.0, 6.0, 6.0, 1e6]),
    }
    batch = Batch(torch.zeros(2, 1), torch.full((2, 1), 10.0))
    with client.reading(rows):
        assert client.training_step(batch, 0)["lam"].item() == best


@pytest.mark.slow
def test_single_lambda_equals_ditto():
    settings = {"optimizer": sgd(0.3), "local_epochs": 2, "global_mu": 0.2}
    result = trained(DittoGreedy(seeded(mlp), [0.5], 0.5, **settings), make_data(), 3)
    expected = trained(Ditto(seeded(mlp), 0.5, **settings), make_data(), 3)
    torch.testing.assert_close(result.w, expected.w)
    torch.testing.assert_close(result.kept["personal"], expected.kept["personal"])


@pytest.mark.slow
def test_without_any_validation_data_lambda_is_fixed():
    settings = {"optimizer": sgd(0.3), "local_epochs": 2}
    data = shared_out(classes([7, 3, 10]))
    result = run_rounds(DittoGreedy(seeded(mlp), LAMS, 0.5, **settings), data)
    expected = run_rounds(Ditto(seeded(mlp), 0.5, **settings), data)
    assert result.distance(expected) < 1e-12


def batch_norm_net():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@table_test(
    ("make", "arguments", "match"),
    [
        (mlp, {"lams": []}, r"`lams` to be distinct numbers but got \[\]"),
        (mlp, {"lams": [-1.0]}, "`lams` to be at least 0, and finite, but got -1.0"),
        (mlp, {"min_validation": 0}, "`min_validation` to be at least 1 but got 0"),
        (mlp, {"regularizer": "kl"}, "`regularizer` to be l2 but got 'kl'"),
        (batch_norm_net, {}, "`net` to have no running statistics but got 1.running_mean"),
    ],
)
def test_invalid_arguments_are_refused(make, arguments, match):
    with pytest.raises(ValueError, match=match):
        DittoGreedy(make(), **arguments)
