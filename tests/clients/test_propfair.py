"""PropFair: its loss by hand, and whole rounds in NumPy."""

import math

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_for
from small_federations import (
    HalfSquares,
    classes,
    mlp,
    reals,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn

from pl_fed.clients import FedAvg, PropFair

SIZES = [7, 3, 10]


def fair(net=None, **arguments):
    return PropFair(nn.Linear(1, 1) if net is None else net, **arguments)


@pytest.mark.parametrize(
    ("tail", "loss", "expected", "slope"),
    [
        ("relative", 0.5, 0.1053605157, 1 / 4.5),
        ("relative", 4.9, 0.98, 1 / 5),
        ("relative", 40.0, 8.0, 1 / 5),
        ("huber", 0.5, 0.1053605157, 1 / 4.5),
        ("huber", 4.9, math.log(25) + 0.5, 5.0),
        ("huber", 40.0, math.log(25) + 35.2 / 0.2, 5.0),
        ("huber", 4.8, math.log(25), 5.0),
        ("relative", -1.0, -math.log(1.2), 1 / 6),
    ],
)
def test_losses_equal_hand_computed_ones(tail, loss, expected, slope):
    value = torch.tensor(loss, dtype=torch.float64, requires_grad=True)
    result = fair(tail=tail).fair_loss(value)
    assert result.item() == pytest.approx(expected, abs=1e-10)
    result.backward()
    assert value.grad.item() == pytest.approx(slope, abs=1e-10)


def test_huber_tail_continues_the_logarithm_with_its_slope():
    client = fair(ceiling=2.0, epsilon=0.5, tail="huber")
    losses = torch.tensor([1.5 - 1e-7, 1.5 + 1e-7], dtype=torch.float64)
    low, high = client.fair_loss(losses).tolist()
    assert (high - low) / 2e-7 == pytest.approx(2.0, rel=1e-6)


def algorithm_1(data, rounds, lr, ceiling, epsilon, tail, batch=4, passes=2):
    """Return w after rounds of linear regressions, by the gradient of the logarithm in NumPy."""
    w, beyond = seeded(line).double().weight.detach().numpy()[0].copy(), 0
    for _ in range(rounds):
        models = []
        for k in range(len(SIZES)):
            index = data.clients.train.samples(k)
            x, y = data.clients.inputs[index].numpy(), data.clients.targets[index].numpy()[:, 0]
            model = w.copy()
            for first in list(range(0, len(x), batch)) * passes:
                inputs, targets = x[first : first + batch], y[first : first + batch]
                errors = inputs @ model - targets
                loss, gradient = (errors**2).mean() / 2, inputs.T @ errors / len(inputs)
                factor = 1 / (ceiling - loss)
                if ceiling - loss < epsilon:
                    factor = 1 / ceiling if tail == "relative" else 1 / epsilon
                    beyond += 1
                model -= lr * factor * gradient
            models.append(model)
        w = np.mean(models, 0)
    return w, beyond


def line():
    return nn.Linear(2, 1, bias=False)


@exhaustive_for("huber-one_by_one", "relative-stacked")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
@pytest.mark.parametrize("tail", ["relative", "huber"])
def test_rounds_equal_algorithm_1(engine, tail):
    total = 0
    for seed in range(4):
        draw = np.random.default_rng(seed)
        owner = np.repeat(np.arange(len(SIZES)), SIZES)
        x, slopes = draw.normal(size=(len(owner), 2)), 2 * draw.normal(size=(len(SIZES), 2))
        arrays = reals(x, (x * slopes[owner]).sum(1, keepdims=True), owner)
        data = shared_out(arrays, batch_size=4)
        settings = {"ceiling": 3.0, "epsilon": 0.8, "tail": tail}
        client = PropFair(
            seeded(line), **settings, optimizer=sgd(0.1), criterion=HalfSquares(), local_epochs=2
        )
        result = run_rounds(client, data, 3, shuffle=False, engine=engine, chunk_size=2)
        w, beyond = algorithm_1(data, 3, 0.1, **settings)
        np.testing.assert_allclose(result.w.numpy(), w, rtol=0, atol=1e-9)
        total += beyond
    assert total > 5  # the tail counts


def test_huge_ceiling_is_fedavg_with_a_shorter_step():
    """−ln(1 − ℓ / M) · M → ℓ."""
    data = shared_out(classes(SIZES))
    settings = {"local_epochs": 2}
    fair_client = PropFair(seeded(mlp), ceiling=1e6, optimizer=sgd(1e5), **settings)
    plain = run_rounds(FedAvg(seeded(mlp), optimizer=sgd(0.1), **settings), data, 2).w
    torch.testing.assert_close(run_rounds(fair_client, data, 2).w, plain, rtol=0, atol=1e-5)


@table_test(
    ("arguments", "message"),
    [
        ({"ceiling": 0.0}, r"`ceiling` to be .* but got 0\.0"),
        ({"epsilon": -1.0}, r"`epsilon` to be .* but got -1\.0"),
        ({"epsilon": 6.0}, r"`epsilon` to be at most `ceiling` = 5\.0 but got 6\.0"),
        ({"tail": "flat"}, r"`tail` to be .* but got 'flat'"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=rf"Expected argument {message}"):
        fair(**arguments)
