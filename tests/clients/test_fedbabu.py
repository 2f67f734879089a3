"""FedBABU against its two phases in NumPy, and the head that nobody moves."""

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_but
from personal_models import trained, validated_by_training
from small_federations import (
    Cohorts,
    HalfSquares,
    classes,
    draw_regressions,
    mlp,
    run_rounds,
    samples_of,
    seeded,
    sgd,
    shared_out,
    two_layers,
)
from tables import table_test
from torch import nn

from pl_fed import DifferentialPrivacy
from pl_fed.attacks import GaussianNoise
from pl_fed.clients import FedAvg, FedBABU, Finetuning
from pl_fed.samplers import Poisson

ENGINES = ["one_by_one", "stacked"]
HEAD = slice(25, 43)  # of the net `mlp`


def descend(body, head, x, y, epochs, lr, momentum, decay, moves=("body",)):
    """Return body and head after epochs of minibatches of 4, each with its own momentum."""
    weights = {"body": body.copy(), "head": head.copy()}
    speeds = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for _ in range(epochs):
        for first in range(0, len(x), 4):
            inputs, features = x[first : first + 4], x[first : first + 4] @ weights["body"].T
            error = (features @ weights["head"].T - y[first : first + 4]) / len(inputs)
            gradients = {"head": error.T @ features, "body": weights["head"].T @ error.T @ inputs}
            for part in moves:
                slope = gradients[part] + decay * weights[part]
                speeds[part] = momentum * speeds[part] + slope
                weights[part] -= lr * speeds[part]
    return weights["body"], weights["head"]


def simulate(data, cohorts, lr, momentum, decay, finetuning):
    """Return the global row after rounds of two epochs, and the loss of each tuned net."""
    start = seeded(two_layers).double()
    body, head = (layer.weight.detach().numpy().copy() for layer in start)
    for cohort in cohorts:
        ends = [
            descend(body, head, *samples_of(data, client), 2, lr, momentum, decay)[0]
            for client in cohort
        ]
        body = np.mean(ends, 0)
    losses = []
    for client in range(3):
        x, y = samples_of(data, client)
        tuned, tuned_head = descend(body, head, x, y, *finetuning)
        losses.append(np.square(x @ tuned.T @ tuned_head.T - y).sum(1).mean() / 2)
    return np.concatenate([body.ravel(), head.ravel()]), losses


@exhaustive_but("net-moves0-one_by_one", "head-moves1-stacked", "body-moves2-one_by_one")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("part", "moves"), [("net", ("body", "head")), ("head", ("head",)), ("body", ("body",))]
)
def test_rounds_and_tuning_equal_numpy(engine, part, moves):
    """Momentum and weight decay move the body alone, and in the tuning the tuned part alone."""
    cohorts = [(0, 1), (1, 2), (0, 2)]
    for seed in range(4):
        data = validated_by_training(shared_out(draw_regressions(seed), batch_size=4))
        client = FedBABU(
            seeded(two_layers),
            finetune_part=part,
            finetune_epochs=3,
            finetune_lr=0.02,
            criterion=HalfSquares(),
            optimizer=sgd(0.05, momentum=0.8, weight_decay=0.1),
            local_epochs=2,
        )
        settings = {"sampler": Cohorts(*cohorts), "shuffle": False, "engine": engine}
        result = trained(client, data, 3, **settings)
        decay = 0.1 if part == "net" else 0.0
        tuning = (3, 0.02, 0.8, decay, moves)
        w, losses = simulate(data, cohorts, 0.05, 0.8, 0.1, tuning)
        np.testing.assert_allclose(result.w.numpy(), w, rtol=0, atol=1e-9)
        measured = result.metrics["personal"]["loss"].numpy()
        np.testing.assert_allclose(measured, losses, rtol=1e-6)
        assert result.kept == {}


@pytest.mark.slow
def test_head_is_frozen_to_the_bit_whatever_moves_the_rest():
    """Adam with weight decay, the server's weight decay, forged uploads, and noise of privacy."""
    start = seeded(mlp).double()
    head = torch.cat([start[2].weight.flatten(), start[2].bias])
    client = FedBABU(seeded(mlp), optimizer=decaying_adam, local_epochs=2)
    data = shared_out(classes([7, 3, 10, 2]))
    disturbances = [
        {},
        {"engine": "stacked"},
        {"server_optimizer": sgd(1.0, momentum=0.9, weight_decay=0.1)},
        {"attack": GaussianNoise(), "ids": [1]},
        {
            "privacy": DifferentialPrivacy(clip_norm=1.0, delta=1e-3, noise_multiplier=1.0),
            "sampler": Poisson(0.7),
        },
    ]
    for settings in disturbances:
        outcome = run_rounds(client, data, rounds=3, **settings)
        assert torch.equal(outcome.w[HEAD], head), settings
        assert (outcome.w[:25] != torch.cat([p.flatten() for p in start[0].parameters()])).all()


def decaying_adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@pytest.mark.slow
def test_empty_head_equals_finetuning_of_fedavg():
    settings = {"optimizer": sgd(0.1, momentum=0.9, weight_decay=0.01), "local_epochs": 2}
    data = validated_by_training(shared_out(classes([7, 3, 10])))
    own = trained(FedBABU(seeded(mlp), [], finetune_epochs=2, **settings), data)
    tuned = trained(Finetuning(seeded(mlp), finetune_epochs=2, **settings), data)
    assert torch.equal(own.w, tuned.w)
    assert own.metrics["personal"]["loss"].equal(tuned.metrics["personal"]["loss"])


@pytest.mark.slow
def test_body_differs_from_that_of_fedavg_and_no_tuning_is_the_global_model():
    data = validated_by_training(shared_out(classes([7, 3, 10])))
    for nothing in ({"finetune_epochs": 0}, {"finetune_steps": 0}):
        result = trained(FedBABU(seeded(mlp), optimizer=sgd(0.1), **nothing), data)
        assert result.metrics["personal"]["loss"].equal(result.metrics["global"]["loss"])
    plain = trained(FedAvg(seeded(mlp), optimizer=sgd(0.1)), data)
    assert (plain.w - result.w)[:25].abs().max() > 1e-4


def test_only_the_body_crosses_the_network():
    client = FedBABU(seeded(mlp))
    assert (client.upload_numbers, client.download_numbers) == (25, 25)
    assert client.unsent_positions.tolist() == list(range(25, 43))
    named = FedBABU(seeded(mlp), head=["0", "2.bias"])
    assert named.upload_numbers == 15


@table_test(
    "arguments, match",
    [
        ({"finetune_part": "tail"}, "`finetune_part`"),
        ({"finetune_lr": -1.0}, "`finetune_lr`"),
        ({"finetune_steps": 1, "finetune_epochs": 1}, "finetune_steps"),
        ({"head": ["9"]}, "argument `head` to list names among 0.weight"),
        ({"head": ["0", "2"]}, "`head` to leave a body to train but got 0, 2"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        FedBABU(mlp(), **arguments)


def test_net_of_one_module_needs_a_named_head():
    with pytest.raises(ValueError, match="Expected argument `head` to be a list for a net with"):
        FedBABU(nn.Linear(2, 2))
