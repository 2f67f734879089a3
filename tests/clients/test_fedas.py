"""FedAS against whole rounds in NumPy: prototypes, alignment, local steps and Fisher traces."""

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_but
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
from tables import table_test
from torch import nn

from pl_fed.attacks import RandomLabels
from pl_fed.clients import FedAS, FedPer, PFedFDA

ENGINES = ["one_by_one", "stacked", "stacked_compiled"]


def two_layers():
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 3, bias=False))


def samples_of(data, client):
    index = data.clients.train.samples(client)
    return data.clients.inputs[index].double().numpy(), data.clients.targets[index].numpy()


def errors(body, head, x, y):
    """Return the gradients of the cross entropy in the logits, [samples, classes]."""
    logits = x @ body.T @ head.T
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True) - np.eye(3)[y]


def minibatches(x, y):
    return [(x[first : first + 4], y[first : first + 4]) for first in range(0, len(x), 4)]


def align(body, prototypes, x, y, lr):
    for inputs, targets in minibatches(x, y):
        features, slope = inputs @ body.T, np.zeros((len(inputs), len(body)))
        for label in np.unique(targets):
            rows = targets == label
            slope[rows] = 2 * (features[rows] - prototypes[label]) / rows.sum() / len(body)
        body = body - lr * slope.T @ inputs
    return body


def descend(body, head, x, y, lr):
    for inputs, targets in minibatches(x, y):
        error = errors(body, head, inputs, targets) / len(inputs)
        features = inputs @ body.T
        body, head = body - lr * head.T @ error.T @ inputs, head - lr * error.T @ features
    return body, head


def trace(body, head, x, y):
    error, features = errors(body, head, x, y), x @ body.T
    squares = np.square(error).sum(1) * np.square(features).sum(1)
    return (squares + np.square(error @ head).sum(1) * np.square(x).sum(1)).sum()


def simulate(data, cohorts, fisher_weights, lr=0.2):
    """Return the server's body and the models of the clients' last rounds, as rows."""
    body, head = (layer.weight.detach().numpy().copy() for layer in seeded(two_layers).double())
    first_head, models = head, [(body, head)] * 3
    for cohort in cohorts:
        traces = []
        for k in cohort:
            x, y = samples_of(data, k)
            last_body, own_head = models[k]
            prototypes = {label: (x @ last_body.T)[y == label].mean(0) for label in np.unique(y)}
            start = align(body, prototypes, x, y, 0.1)
            models[k] = descend(start, own_head, x, y, lr)
            traces.append(trace(*models[k], x, y))
        weights = np.array(traces) if fisher_weights else np.ones(len(cohort))
        bodies = [models[k][0] for k in cohort]
        body = np.average(bodies, axis=0, weights=weights)
    flat = [np.concatenate([part.ravel() for part in net]) for net in ((body, first_head), *models)]
    return flat[0], np.stack(flat[1:])


@exhaustive_but("True-one_by_one", "False-one_by_one", "True-stacked")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fisher_weights", [True, False])
def test_rounds_equal_numpy(uncompiled, engine, fisher_weights):
    cohorts = [(0, 1), (1, 2), (0, 2), (0, 1)]
    for seed in range(3 if engine == "one_by_one" else 1):
        data = shared_out(classes([7, 3, 10], seed=seed), batch_size=4)
        client = FedAS(
            seeded(two_layers),
            alignment_lr=0.1,
            fisher_weights=fisher_weights,
            optimizer=sgd(0.2),
            local_epochs=1,
        )
        settings = {"sampler": Cohorts(*cohorts), "shuffle": False, "engine": engine}
        outcome = run_rounds(client, data, rounds=4, chunk_size=2, **settings)
        w, v = simulate(data, cohorts, fisher_weights)
        np.testing.assert_allclose(outcome.w.numpy(), w, rtol=0, atol=1e-9)
        np.testing.assert_allclose(outcome.v.numpy(), v, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_without_alignment_and_traces_the_server_is_that_of_fedper():
    """The tested models differ: FedPer's has the broadcast body."""
    data = validated_by_training(shared_out(classes([7, 3, 10])))
    settings = {"optimizer": sgd(0.1, momentum=0.5), "local_epochs": 2}
    plain = trained(FedPer(seeded(mlp), **settings), data, 3)
    for options in ({"alignment_epochs": 0}, {"alignment_lr": 0.0}):
        client = FedAS(seeded(mlp), fisher_weights=False, **options, **settings)
        result = trained(client, data, 3)
        torch.testing.assert_close(result.w, plain.w, rtol=0, atol=1e-12)
        torch.testing.assert_close(result.kept["own"], plain.kept["own"], rtol=0, atol=1e-12)
    loss, broadcast_loss = (run.metrics["personal"]["loss"].mean() for run in (result, plain))
    assert loss < broadcast_loss


def test_only_the_body_and_the_trace_cross_the_network():
    assert FedAS(seeded(mlp)).upload_numbers == 26
    assert FedAS(seeded(mlp), fisher_weights=False).upload_numbers == 25


def test_poisoned_labels_without_a_prototype_do_not_align_the_body():
    """Own samples have class 0 alone; the attack gives them classes 0 to 2."""
    arrays = classes([6, 6])
    arrays.targets[:6] = 0
    client = FedAS(seeded(mlp), alignment_epochs=2, optimizer=sgd(0.1))
    settings = {"attack": RandomLabels(), "ids": [0]}
    outcome = run_rounds(client, shared_out(arrays), rounds=2, **settings)
    assert outcome.v.isfinite().all()
    assert {float(report["train/rejected"]) for report in outcome.reports} == {0.0}


@pytest.mark.slow
def test_data_without_classes_are_refused():
    client = FedAS(seeded(lambda: mlp(inputs=1, num_classes=1)), criterion=HalfSquares())
    with pytest.raises(ValueError, match="Expected one class id for each sample for FedAS"):
        run_tried_rounds(client, shared_out(points([1.0, 2.0], [3.0])), rounds=0)


@table_test(
    "arguments, match",
    [
        ({"alignment_lr": -1.0}, "`alignment_lr`"),
        ({"alignment_epochs": -1}, "`alignment_epochs`"),
        (
            {"head": "9"},
            "`head` to be a module with trainable parameters, such as 0, 2",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        FedAS(mlp(), **arguments)


@pytest.mark.parametrize("algorithm", [FedAS, PFedFDA])
def test_nets_without_a_body_are_refused(algorithm):
    with pytest.raises(ValueError, match="`net` to have a body to train below its head"):
        algorithm(nn.Linear(4, 3))
