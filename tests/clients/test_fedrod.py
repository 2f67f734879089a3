"""FedROD against whole rounds in NumPy: balanced softmax, and an own head that moves no body."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_for
from personal_models import trained, validated_by_training
from small_federations import (
    Cohorts,
    HalfSquares,
    classes,
    mlp,
    points,
    run_rounds,
    run_tried_rounds,
    seeded,
    sgd,
    shared_out,
)
from torch import nn

from pl_fed.attacks import RandomLabels
from pl_fed.clients import FedAvg, FedROD
from pl_fed.clients.contract import ClientRound, ModelRows
from pl_fed.types import Batch

ENGINES = ["one_by_one", "stacked", "stacked_compiled"]
HEAD = slice(25, 43)  # of the net `mlp`


def few_classes(seed=0):
    """Return data of three clients; the first one has no sample of class 1."""
    arrays = classes([7, 3, 10], seed=seed)
    arrays.targets[:7] = torch.where(arrays.targets[:7] == 1, 2, arrays.targets[:7])
    return shared_out(arrays, batch_size=4)


def samples_of(data, client):
    index = data.clients.train.samples(client)
    return data.clients.inputs[index].double().numpy(), data.clients.targets[index].numpy()


def split(row):
    """Return the body's weights and biases, and the head's."""
    return row[:20].reshape(5, 4), row[20:25], row[25:40].reshape(3, 5), row[40:]


def join(*parts):
    return np.concatenate([part.ravel() for part in parts])


def errors(logits, y):
    """Return the gradient of the mean cross entropy in the logits, and the loss of each sample."""
    shifted = logits - logits.max(1, keepdims=True)
    shares = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    losses = -np.log(shares[np.arange(len(y)), y])
    return (shares - np.eye(logits.shape[1])[y]) / len(y), losses


def descend(row, own, x, y, counts, settings):
    """Return the row and the own head after an epoch of minibatches of 4, and the mean loss."""
    lr, momentum, decay = settings
    speeds, losses = [np.zeros_like(row), np.zeros_like(own)], []
    with np.errstate(divide="ignore"):
        prior = np.log(counts)
    for first in range(0, len(x), 4):
        inputs, targets = x[first : first + 4], y[first : first + 4]
        body, bias, weights, offsets = split(row)
        features = np.tanh(inputs @ body.T + bias)
        logits = features @ weights.T + offsets
        error, balanced = errors(logits + prior, targets)
        slope = (error @ weights) * (1 - features**2)
        gradient = join(slope.T @ inputs, slope.sum(0), error.T @ features, error.sum(0))
        own_logits = features @ own[:15].reshape(3, 5).T + own[15:]
        own_error, personal = errors(logits + own_logits, targets)
        own_gradient = join(own_error.T @ features, own_error.sum(0))
        losses.append(balanced.mean() + personal.mean())
        speeds[0] = momentum * speeds[0] + gradient + decay * row
        speeds[1] = momentum * speeds[1] + own_gradient + decay * own
        row, own = row - lr * speeds[0], own - lr * speeds[1]
    return row, own, np.mean(losses)


def simulate(data, cohorts, settings):
    """Return the global row, the own heads, the clients' personal losses and those of rounds."""
    row = nn.utils.parameters_to_vector(seeded(mlp).double().parameters()).detach().numpy()
    own, reports = np.zeros((3, 18)), []
    for cohort in cohorts:
        ends, losses = [], []
        for k in cohort:
            x, y = samples_of(data, k)
            counts = np.bincount(y, minlength=3)
            end, own[k], loss = descend(row, own[k], x, y, counts, settings)
            ends.append(end)
            losses.append(loss)
        row = np.mean(ends, 0)
        reports.append(np.mean(losses))
    body, bias, weights, offsets = split(row)
    personal = []
    for k in range(3):
        x, y = samples_of(data, k)
        features = np.tanh(x @ body.T + bias)
        logits = features @ weights.T + offsets + features @ own[k, :15].reshape(3, 5).T
        personal.append(errors(logits + own[k, 15:], y)[1].mean())
    return row, own, personal, reports


@exhaustive_for("stacked_compiled")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_rounds_equal_numpy(uncompiled, engine):
    """Own heads, also of clients that did not train, are on the current body and generic head."""
    cohorts = [(0, 1), (1, 2), (0, 2), (0, 1)]
    for seed in range(3 if engine == "one_by_one" else 1):
        data = validated_by_training(few_classes(seed))
        options = sgd(0.2, momentum=0.8, weight_decay=0.1)
        client = FedROD(seeded(mlp), optimizer=options, local_epochs=1)
        settings = {"shuffle": False, "engine": engine, "chunk_size": 2}
        outcome = run_rounds(client, data, rounds=4, sampler=Cohorts(*cohorts), **settings)
        w, own, personal, losses = simulate(data, cohorts, (0.2, 0.8, 0.1))
        np.testing.assert_allclose(outcome.w.numpy(), w, rtol=0, atol=1e-9)
        np.testing.assert_allclose(outcome.states["own"].numpy(), own, rtol=0, atol=1e-9)
        v = np.tile(w, (3, 1))
        v[:, HEAD] += own
        np.testing.assert_allclose(outcome.v.numpy(), v, rtol=0, atol=1e-9)
        reports = [float(report["train/loss"]) for report in outcome.reports]
        np.testing.assert_allclose(reports, losses, rtol=1e-6)
        result = trained(client, data, 4, Cohorts(*cohorts), **settings)
        measured = result.metrics["personal"]["loss"].numpy()
        np.testing.assert_allclose(measured, personal, rtol=1e-6)


def step(client, logits, targets, counts):
    """Return the outputs of a local step of a net with these logits."""
    round = ClientRound(
        ids=torch.tensor([0]),
        samples=torch.ones(1, 1),
        validation_samples=torch.zeros(1, 1),
        broadcast=ModelRows(client.row("global").data, torch.zeros(0)),
        states={"own": client.state_defaults()["own"][None]},
        class_counts=torch.tensor([counts], dtype=torch.float64),
        steps={"global": torch.ones(1, 1, dtype=torch.int64)},
    )
    client.run_begin(round)
    client.row("personal").data.copy_(round.models["personal"].parameters[0])
    with client.reading(round.client_rows(0)):
        return client.training_step(Batch(logits, torch.tensor(targets)), 0)


def identity():
    net = nn.Linear(3, 3, bias=False).double()
    nn.init.eye_(net.weight)
    return net


@pytest.mark.parametrize(
    ("logits", "target", "counts", "expected"),
    [
        ([1.0, 0.0, -1.0], 0, [8.0, 4.0, 1.0], 0.1830351613),
        ([0.5, 0.5, 0.0], 2, [8.0, 4.0, 1.0], 3.0342149860),
        ([1.0, 0.0, -1.0], 0, [8.0, 0.0, 0.0], 0.0),  # absent classes
    ],
)
def test_balanced_softmax_has_the_values_by_hand(logits, target, counts, expected):
    client = FedROD(identity()).double()
    logits = torch.tensor([logits], dtype=torch.float64)
    outputs = step(client, logits, [target], counts)
    assert outputs["balanced"].item() == pytest.approx(expected, abs=1e-9)
    plain = nn.functional.cross_entropy(logits, torch.tensor([target]))
    assert outputs["personal"].item() == pytest.approx(float(plain), abs=1e-12)


@pytest.mark.slow
def test_equal_class_counts_make_the_global_model_that_of_fedavg():
    arrays = classes([6, 3, 12])
    arrays.targets[:] = torch.arange(21) % 3
    data, settings = shared_out(arrays), {"optimizer": sgd(0.1, momentum=0.5), "local_epochs": 2}
    plain = run_rounds(FedAvg(seeded(mlp), **settings), data, rounds=3)
    result = run_rounds(FedROD(seeded(mlp), **settings), data, rounds=3)
    torch.testing.assert_close(result.w, plain.w, rtol=0, atol=1e-12)
    assert (result.v - result.w)[:, :25].count_nonzero() == 0


def test_new_client_begins_with_the_global_model():
    data = validated_by_training(few_classes())
    result = trained(FedROD(seeded(mlp), optimizer=sgd(0.1)), data, 2, sampler=Cohorts((0, 1)))
    losses = [result.metrics[model]["loss"] for model in ("global", "personal")]
    torch.testing.assert_close(losses[0][2], losses[1][2], rtol=1e-12, atol=0)
    assert (losses[0] > losses[1])[:2].all()


def test_whole_model_crosses_the_network_without_the_own_head():
    client = FedROD(seeded(mlp))
    assert (client.upload_numbers, client.download_numbers) == (43, 43)
    assert len(client.state_defaults()["own"]) == 18


@pytest.mark.slow
def test_a_head_of_several_layers_is_added_parameter_by_parameter():
    data = validated_by_training(few_classes())
    client = FedROD(seeded(deep), head="head", optimizer=sgd(0.2), local_epochs=2)
    outcomes = [run_tried_rounds(client, data, rounds=3, engine=e) for e in ENGINES[:2]]
    assert outcomes[0].distance(outcomes[1]) < 1e-10
    first = outcomes[0]
    head = client.row("global").layout.positions("head")
    torch.testing.assert_close(first.v[:, head], first.w[head] + first.states["own"])
    assert first.states["own"].abs().amin(1).min() > 0


def deep():
    body = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
    return nn.Sequential(OrderedDict(body=body, head=mlp(4, inputs=5)))


class DeepHead(nn.Module):
    """A body, and a head with running statistics."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.slow
def test_own_head_is_evaluated_with_its_own_running_statistics():
    data = validated_by_training(shared_out(classes([20, 24, 16]), batch_size=8))
    client = FedROD(seeded(DeepHead), head="head", optimizer=sgd(0.5), local_epochs=2)
    result = trained(client, data, 4)
    for k in range(3):
        net = result.federation.model_of(k)
        kept = result.kept["personal.statistics"][k]
        assert torch.equal(net.head[1].running_mean, kept[:6])
        assert torch.equal(net.head[1].running_var, kept[6:12])
        inputs, targets = (torch.from_numpy(part) for part in samples_of(data, k))
        loss = nn.functional.cross_entropy(net(inputs), targets).item()
        assert loss == pytest.approx(result.metrics["personal"]["loss"][k].item(), abs=1e-9)
    assert not torch.equal(kept, result.client.statistics("global").data)


def test_labels_of_absent_classes_by_an_attack_leave_losses_finite():
    arrays = classes([6, 6])
    arrays.targets[:6] = 0
    client = FedROD(seeded(mlp), optimizer=sgd(0.1), local_epochs=2)
    outcome = run_rounds(client, shared_out(arrays), attack=RandomLabels(), ids=[0])
    for report in outcome.reports:
        assert float(report["train/rejected"]) == 0.0
        assert report["train/loss"].isfinite()
    assert outcome.v.isfinite().all()


@pytest.mark.slow
def test_data_without_classes_are_refused():
    client = FedROD(seeded(lambda: mlp(inputs=1, num_classes=1)), criterion=HalfSquares())
    with pytest.raises(ValueError, match="Expected one class id for each sample for FedROD"):
        run_tried_rounds(client, shared_out(points([1.0, 2.0], [3.0])), rounds=0)


def test_criterion_without_a_finite_value_for_absent_classes_is_refused():
    client = FedROD(seeded(mlp), criterion=nn.CrossEntropyLoss(label_smoothing=0.1))
    with pytest.raises(ValueError, match="Expected argument `criterion` to be a cross entropy wi"):
        run_rounds(client, few_classes(), rounds=0)


def test_head_that_the_net_lacks_is_refused():
    with pytest.raises(ValueError, match="argument `head` to be a module with trainable"):
        FedROD(mlp(), head="9")
