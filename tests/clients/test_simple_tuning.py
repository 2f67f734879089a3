"""Simple-Tuning: FedAvg's global model with a new head."""

import numpy as np
import pytest
import torch
from personal_models import trained, validated_by_training
from small_federations import classes, seeded, sgd, shared_out
from tables import table_test
from torch import nn

from pl_fed.clients import FedAvg, SimpleTuning
from pl_fed.clients.simple_tuning import find_head_bounds
from pl_fed.nets.rows import RowLayout
from pl_fed.random import key, uniforms


def deep():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def own_data(batch_size=100):
    return validated_by_training(shared_out(classes([7, 3, 10]), batch_size=batch_size))


def new_head(seed=0, inputs=6, outputs=3):
    """Return the documented draw of the new head: weight [outputs, inputs] and bias."""
    start = 4 * inputs + inputs  # the numbers of the body
    positions = torch.arange(start, start + outputs * (inputs + 1))
    draws = uniforms(key(seed, "simple-tuning"), positions).numpy()
    head = ((2 * draws - 1) / np.float32(np.sqrt(inputs))).astype(np.float64)
    return head[: outputs * inputs].reshape(outputs, inputs), head[outputs * inputs :]


def tune_with_numpy(w, x, y, weight, bias, lr, steps):
    """Return the loss of softmax regression on the body's features after full-batch steps."""
    first, shift = w[:24].reshape(6, 4), w[24:30]
    features, labels = np.tanh(x @ first.T + shift), np.eye(3)[y]
    for _ in range(steps):
        scores = np.exp(features @ weight.T + bias)
        error = (scores / scores.sum(1, keepdims=True) - labels) / len(y)
        weight, bias = weight - lr * error.T @ features, bias - lr * error.sum(0)
    scores = features @ weight.T + bias
    return float(np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y]))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_personal_loss_equals_numpy(engine):
    data = own_data()
    settings = {"tuning_steps": 3, "tuning_lr": 0.3, "head_seed": 5, "optimizer": sgd(0.1)}
    result = trained(SimpleTuning(seeded(deep), **settings), data, 2, engine=engine)
    losses, head = [], new_head(seed=5)
    for client in range(3):
        index = data.clients.train.samples(client)
        x, y = data.clients.inputs[index].double().flatten(1), data.clients.targets[index]
        losses.append(tune_with_numpy(result.w.numpy(), x.numpy(), y.numpy(), *head, 0.3, 3))
    measured = result.metrics["personal"]["loss"]
    np.testing.assert_allclose(measured, losses, rtol=0, atol=1e-6)
    assert result.kept == {}


@pytest.mark.slow
def test_global_model_equals_fedavg():
    settings = {"optimizer": sgd(0.1, momentum=0.9), "local_epochs": 2}
    plain = trained(FedAvg(seeded(deep), **settings), own_data(2), 3)
    tuned = trained(SimpleTuning(seeded(deep), **settings), own_data(2), 3)
    assert torch.equal(plain.w, tuned.w)
    assert plain.metrics["global"]["loss"].equal(tuned.metrics["global"]["loss"])


@pytest.mark.slow
def test_personal_models_do_not_depend_on_the_head_of_the_global_model():
    def personal_loss(factor):
        net = seeded(deep)
        with torch.no_grad():
            net[3].weight.mul_(factor)
        client = SimpleTuning(net, tuning_epochs=2, optimizer=sgd(0.0))
        return trained(client, own_data(), 1).metrics

    one, other = personal_loss(1.0), personal_loss(-7.0)
    assert torch.equal(one["personal"]["loss"], other["personal"]["loss"])
    assert not torch.equal(one["global"]["loss"], other["global"]["loss"])


@pytest.mark.slow
def test_no_tuning_leaves_the_new_head():
    data = own_data()
    for nothing in ({"tuning_epochs": 0}, {"tuning_steps": 0}):
        result = trained(SimpleTuning(seeded(deep), optimizer=sgd(0.1), **nothing), data, 1)
        index = data.clients.train.samples(1)
        x, y = data.clients.inputs[index].double().flatten(1), data.clients.targets[index]
        loss = tune_with_numpy(result.w.numpy(), x.numpy(), y.numpy(), *new_head(), 0.0, 0)
        assert result.metrics["personal"]["loss"][1].item() == pytest.approx(loss, abs=1e-6)


def test_bounds_are_those_of_the_fan_in_and_normalisation_keeps_its_values():
    net = nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(9), nn.Conv2d(2, 3, 5, bias=False))
    bounds = find_head_bounds(RowLayout.from_parameters(net), ["0", "1", "2"])
    expected = [0.5] * 45 + [0.0] * 18 + [50**-0.5] * 150
    torch.testing.assert_close(bounds, torch.tensor(expected))


def test_new_heads_fill_their_range_and_differ_between_seeds():
    heads = [new_head(seed)[0].ravel() for seed in range(60)]
    numbers = np.stack(heads) * np.sqrt(6)
    assert -1 <= numbers.min() < -0.98
    assert 0.98 < numbers.max() < 1
    assert abs(numbers.mean()) < 0.06
    assert len(np.unique(numbers)) > 0.99 * numbers.size


@table_test(
    "arguments, match",
    [
        ({"tuning_lr": -1.0}, "`tuning_lr`"),
        ({"tuning_steps": 1, "tuning_epochs": 1}, "tuning_steps"),
        ({"head_seed": -1}, "`head_seed`"),
        ({"own": []}, "a head with a weight of two or more dimensions but got no part"),
        ({"own": ["3.bias"]}, "a weight of two or more dimensions but got 3.bias"),
        ({"own": ["9"]}, "`own`"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        SimpleTuning(deep(), **arguments)
