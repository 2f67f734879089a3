"""FedTilt against plain loops over clients, steps and classes, and methods that it contains."""

import copy
import math

import pytest
import torch
from exhaustive import exhaustive_but, exhaustive_for
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
from torch.nn import functional as F  # noqa: N812

from pl_fed import Federation
from pl_fed.aggregators import TiltedMean
from pl_fed.clients import Ditto, FedAvg, FedTilt
from pl_fed.samplers import All, Uniform
from pl_fed.types import Batch

SIZES = [7, 3, 10, 2]
WHOLE = {"batch_size": 10}  # a step is one on all data of a client
ENGINES = ["one_by_one", "stacked", "stacked_compiled"]
all_engines = pytest.mark.parametrize("engine", ENGINES)


def fedtilt(kind=FedTilt, lr=0.1, net=mlp, **kwargs):
    return kind(seeded(net), **{"optimizer": sgd(lr), "local_steps": 2, **kwargs})


def own_data(arrays):
    for k in range(int(arrays.client.max()) + 1):
        yield arrays.inputs[arrays.client == k].double(), arrays.targets[arrays.client == k]


def tilted(values, tilt, weights):
    """(1/t) log of the mean of e^{t v}, as it is written down: the numbers are small."""
    weights = torch.tensor(weights, dtype=values.dtype)
    if tilt == 0:
        return (weights * values).sum() / weights.sum()
    return ((weights * (tilt * values).exp()).sum() / weights.sum()).log() / tilt


def two_level(net, x, y, tau, lam):
    losses = F.cross_entropy(net(x), y, reduction="none")
    own = [losses[y == label] for label in sorted(set(y.tolist()))]
    values = torch.stack(
        [tilted(client_losses, lam, [1.0] * len(client_losses)) for client_losses in own]
    )
    return tilted(values, tau, [float(len(client_losses)) for client_losses in own])


def descend(net, objective, lr, steps):
    """A copy of the net after plain gradient steps."""
    net = copy.deepcopy(net)
    for _ in range(steps):
        gradients = torch.autograd.grad(objective(net), list(net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients):
                parameter -= lr * gradient
    return net


def flatten_net(net):
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def distance(net, centre):
    pairs = zip(net.parameters(), centre.parameters())
    return sum((a - b.detach()).square().sum() for a, b in pairs)


def load_row(net, row):
    net = copy.deepcopy(net)
    nn.utils.vector_to_parameters(row, net.parameters())
    return net


def simulate(arrays, tau, lam, mu, rounds, lr=0.1, personal_lr=0.1, steps=2):
    """Algorithm 1 at q = 0 on full batches: w, and the rows of all v_n."""
    w = seeded(mlp).double()
    v = [copy.deepcopy(w) for _ in own_data(arrays)]
    for _ in range(rounds):
        sent = []
        for k, (x, y) in enumerate(own_data(arrays)):
            tilted_loss = lambda net, x=x, y=y: two_level(net, x, y, tau, lam)  # noqa: E731
            pulled = lambda net, w=w, f=tilted_loss: f(net) + mu / 2 * distance(net, w)  # noqa: E731
            sent.append(flatten_net(descend(w, tilted_loss, lr, steps)))
            v[k] = descend(v[k], pulled, personal_lr, steps)
        w = load_row(w, torch.stack(sent).mean(0))
    return flatten_net(w), torch.stack([flatten_net(personal_net) for personal_net in v])


@exhaustive_for("0.0--1.0", "5.0-0.0", "1.0-2.0")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tau", "lam"), [(0.0, 0.0), (1.0, 2.0), (-1.5, 3.0), (2.0, -4.0), (0.0, -1.0), (5.0, 0.0)]
)
def test_rounds_equal_a_plain_loop(uncompiled, tau, lam):
    """A traced step is tried once for each branch: a tilt that is 0, and one that is not."""
    arrays = classes(SIZES)
    client = fedtilt(tau=tau, lam=lam, mu=0.7, personal_lr=0.05)
    w, v = simulate(arrays, tau, lam, mu=0.7, rounds=3, personal_lr=0.05)
    traced = (tau, lam) in {(2.0, -4.0), (0.0, -1.0), (5.0, 0.0)}
    for engine in ENGINES if traced else ENGINES[:2]:
        outcome = run_rounds(client, shared_out(arrays, **WHOLE), 3, engine=engine, chunk_size=3)
        torch.testing.assert_close(outcome.w, w, rtol=0, atol=1e-12)
        torch.testing.assert_close(outcome.v, v, rtol=0, atol=1e-12)


@exhaustive_for("-inf")
@pytest.mark.slow
@pytest.mark.parametrize("tau", [50.0, -math.inf])
def test_engines_agree_on_large_tilts_and_parts_of_batches(uncompiled, tau):
    data = shared_out(classes([9, 5, 12, 4]))
    client = fedtilt(tau=tau, lam=-100.0, local_steps=None, local_epochs=2)
    first = run_rounds(client, data, 3, sampler=Uniform(3))
    for engine in ENGINES:
        again = run_rounds(client, data, 3, sampler=Uniform(3), engine=engine, chunk_size=2)
        assert first.distance(again) < 1e-10


# Propositions


DITTO_DATA = {"batch_size": 4}  # with parts of batches, and one sample by itself


@exhaustive_but("one_by_one")
@pytest.mark.slow
@all_engines
def test_zero_tilts_equal_ditto(uncompiled, engine):
    """Proposition 3, by the server's tilted mean."""
    data = shared_out(classes(SIZES), **DITTO_DATA)
    options = {"optimizer": sgd(0.1, momentum=0.5), "local_epochs": 2, "personal_lr": 0.07}
    ditto = Ditto(seeded(mlp), lam=0.3, **options)
    client = FedTilt(seeded(mlp), tau=0.0, lam=0.0, mu=0.3, **options)
    expected = run_rounds(ditto, data, 3)
    result = run_rounds(client, data, 3, engine=engine, aggregator=TiltedMean(q=0.0))
    assert expected.distance(result) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"weight": torch.tensor([1.0, 3.0, 0.5])}, {"ignore_index": 1}]
)
def test_class_weights_count_as_repeated_samples(options):
    options = {
        "optimizer": sgd(0.1),
        "local_epochs": 2,
        "criterion": nn.CrossEntropyLoss(**options),
    }
    data = shared_out(classes([7, 6, 10, 8]), **WHOLE)
    expected = run_rounds(Ditto(seeded(mlp), lam=0.3, **options), data)
    result = run_rounds(FedTilt(seeded(mlp), mu=0.3, **options), data)
    assert expected.distance(result) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("mu", [0.0, 5.0])
def test_global_model_equals_fedavg(mu):
    data = shared_out(classes(SIZES), **DITTO_DATA)
    expected = run_rounds(fedtilt(FedAvg), data, 3)
    result = run_rounds(fedtilt(mu=mu), data, 3, aggregator=TiltedMean())
    torch.testing.assert_close(result.w, expected.w, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_huge_pull_equals_fedavg():
    """Proposition 1, μ → ∞: v_n is the w that the round began with."""
    data = shared_out(classes(SIZES), **DITTO_DATA)
    client = fedtilt(mu=1e9, personal_lr=1e-9)
    before = run_rounds(fedtilt(FedAvg), data, 2)
    after = run_rounds(client, data, 3, aggregator=TiltedMean())
    assert (after.v - before.w).abs().max() < 1e-8
    expected = run_rounds(fedtilt(FedAvg), data, 3)
    torch.testing.assert_close(after.w, expected.w, rtol=0, atol=1e-12)


class SendsPersonal(FedTilt):
    """v_n = w_n: the pulled model starts at w^t and is uploaded."""

    def begin(self, client):
        client.models["personal"].parameters[:] = client.broadcast.parameters

    def end_round(self, client):
        return client.models["personal"].parameters - client.broadcast.parameters


@pytest.mark.slow
def test_uploaded_personal_model_equals_fedprox():
    """Proposition 2, against F_n(w_n) + μ/2 ‖w_n − w^t‖² by itself."""
    arrays, mu = classes(SIZES), 2.0
    client = fedtilt(SendsPersonal, mu=mu, local_steps=4)
    data = shared_out(arrays, **WHOLE)
    outcome = run_rounds(client, data, 3, aggregator=TiltedMean())
    w = seeded(mlp).double()
    for _ in range(3):
        solved = []
        for x, y in own_data(arrays):
            prox = lambda net, x=x, y=y, w=w: (  # noqa: E731
                F.cross_entropy(net(x), y) + mu / 2 * distance(net, w)
            )
            solved.append(flatten_net(descend(w, prox, 0.1, 4)))
        w = load_row(w, torch.stack(solved).mean(0))
    torch.testing.assert_close(outcome.w, flatten_net(w), rtol=0, atol=1e-12)
    torch.testing.assert_close(outcome.states["personal"], torch.stack(solved), rtol=0, atol=1e-12)


# The objective


def make_batch(y, mask=None):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(len(y), 4, generator=draw, dtype=torch.float64)
    return Batch(x, torch.tensor(y), None if mask is None else torch.tensor(mask))


def test_infinite_tilts_take_extremes():
    client = fedtilt().double()
    batch = make_batch([2, 0, 0, 2, 2, 1, 1], [True] * 6 + [False])
    losses = F.cross_entropy(
        client.global_model(batch.inputs), batch.targets, reduction="none"
    ).detach()[:6]
    own = [losses[batch.targets[:6] == label] for label in range(3)]
    for tau, over in ((math.inf, max), (-math.inf, min)):
        for lam, within in ((math.inf, max), (-math.inf, min), (0.0, torch.mean)):
            client.tau, client.lam = tau, lam
            expected = over(within(group) for group in own)
            torch.testing.assert_close(client.tilted_loss("global", batch), expected)


def test_the_objective_has_the_pull_on_v_only():
    """R(w) + R(v) + μ/2 ‖v − w^t‖²."""
    client = fedtilt(tau=2.0, lam=-1.0, mu=3.0).double()
    centre = client.row("global").data.clone()
    client.row("global").data.add_(0.2)
    client.row("personal").data.sub_(0.1)
    batch = make_batch([2, 0, 0, 1])
    losses = [
        two_level(net, batch.inputs, batch.targets, 2.0, -1.0)
        for net in (client.global_model, client.personal_model)
    ]
    expected = sum(losses) + 1.5 * 0.01 * len(centre)
    with client.reading({"broadcast": centre}):
        torch.testing.assert_close(client.training_step(batch, 0), expected)


def test_a_negative_tilt_within_classes_disregards_an_outlier():
    """The gradient is that of the sample with the large loss, half of it, or zero."""
    client = fedtilt(net=lambda: nn.Linear(4, 3)).double()
    batch = make_batch([0, 0])
    with torch.no_grad():
        client.global_model.weight.mul_(0)
        client.global_model.bias.mul_(0)
        batch.inputs[1] *= 0
    batch.inputs[0] = 1.0
    with torch.no_grad():
        client.global_model.weight[0] = -5.0
    shares = []
    for lam in (100.0, 0.0, -100.0):
        client.zero_grad()
        client.lam = lam
        client.tilted_loss("global", batch).backward()
        shares.append(float(client.global_model.weight.grad[0, 0]))
    assert shares == pytest.approx([-1.0, -0.5, 0.0], abs=1e-6)


# Refusals


@table_test(
    "arguments",
    [
        {"tau": math.nan},
        {"lam": math.nan},
        {"mu": -0.1},
        {"mu": math.inf},
        {"mu": math.nan},
        {"personal_lr": -1.0},
        {"personal_lr": math.inf},
        {"local_steps": 0},
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(arguments):
    name, value = next(iter(arguments.items()))
    with pytest.raises(ValueError, match=rf"Expected argument `{name}` .* but got {value}\."):
        fedtilt(**arguments)


def test_real_targets_are_refused_before_training():
    client = FedTilt(Point(), criterion=HalfSquares())
    match = (
        r"class id for each sample, as FedTilt .* but got targets of torch.float\d+ and shape \[2"
    )
    with pytest.raises(ValueError, match=match):
        Federation(All(), seed=0).setup(client, shared_out(points([1.0], [2.0])), "fit")
