"""Per-FedAvg's step, against Hessians written out, and against automatic meta-gradients."""

import functools

import pytest
import torch
from exhaustive import exhaustive_but
from personal_models import trained, validated_by_training
from small_federations import (
    HalfSquares,
    Point,
    Views,
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
from torch.nn.functional import cross_entropy

from pl_fed.clients import FedAvg, PerFedAvg
from pl_fed.models import MLP
from pl_fed.types import Batch

ALPHA = 0.4


def make_batch(size, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=draw, dtype=torch.float64)
    return Batch(x, torch.randint(3, (size,), generator=draw))


def linear(**kwargs):
    return PerFedAvg(seeded(lambda: nn.Linear(4, 3)), **{"adaptation_lr": ALPHA, **kwargs}).double()


def loss_at(w, batch, part):
    outputs = batch.inputs[part] @ w[:12].view(3, 4).T + w[12:]
    return cross_entropy(outputs, batch.targets[part])


def derivatives(w, batch, part):
    """The gradient, and the Hessian; zeros on an empty part."""
    if not len(batch.targets[part]):
        return torch.zeros_like(w), w.new_zeros(15, 15)

    def loss(w):
        return loss_at(w, batch, part)

    gradient = torch.autograd.functional.jacobian(loss, w)
    return gradient, torch.autograd.functional.hessian(loss, w)


def take_step(client, batch):
    client.zero_grad()
    loss = client.training_step(batch, 0)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in client.global_model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("size", [9, 7, 4, 2, 1])
@pytest.mark.parametrize(
    ("hessian", "tolerance"), [("exact", 1e-12), ("none", 1e-12), ("difference", 1e-6)]
)
def test_step_equals_the_formula_of_the_paper(size, hessian, tolerance):
    """(I − α ∇²f(w; D″)) ∇f(w − α ∇f(w; D); D′), where a part is empty in small minibatches."""
    client, batch = linear(hessian=hessian), make_batch(size)
    outer, inner, third = (slice(i, None, 3) for i in range(3))
    w = client.row("global").data.clone()
    there = w - ALPHA * derivatives(w, batch, inner)[0]
    expected = derivatives(there, batch, outer)[0]
    if hessian != "none":
        expected = expected - ALPHA * derivatives(w, batch, third)[1] @ expected
    value, gradient = take_step(client, batch)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=tolerance)
    assert value == pytest.approx(loss_at(there, batch, outer).item(), rel=1e-12)


def test_step_on_one_batch_equals_the_gradient_of_the_adapted_loss():
    """MAML: ∇ of f(w − α ∇f(w)), by automatic differentiation."""
    batch = make_batch(5)
    threefold = Batch(batch.inputs.repeat_interleave(3, 0), batch.targets.repeat_interleave(3))
    client = linear(hessian="exact")
    w = client.row("global").data.clone().requires_grad_()
    everything = slice(None)
    (inner,) = torch.autograd.grad(loss_at(w, batch, everything), w, create_graph=True)
    (expected,) = torch.autograd.grad(loss_at(w - ALPHA * inner, batch, everything), w)
    torch.testing.assert_close(take_step(client, threefold)[1], expected, rtol=0, atol=1e-12)


def test_smaller_difference_is_more_exact():
    exact = take_step(linear(hessian="exact"), make_batch(9))[1]
    errors = [
        float((take_step(linear(difference=delta), make_batch(9))[1] - exact).norm())
        for delta in (1.0, 0.1, 0.01)
    ]
    assert errors[0] > 50 * errors[1] > 2500 * errors[2] > 0  # of the second order


@pytest.mark.slow
def test_adaptation_rate_zero_equals_fedavg_on_a_third_of_the_minibatch():
    """Three equal samples in each minibatch, so that a third of it is as good as the whole."""
    arrays = classes([4, 4])
    arrays.inputs[:], arrays.targets[:] = arrays.inputs[:1], arrays.targets[:1]
    data = shared_out(arrays)
    for hessian in ("difference", "exact", "none"):
        client = PerFedAvg(seeded(mlp), 0.0, hessian, optimizer=sgd(0.1), local_steps=3)
        plain = FedAvg(seeded(mlp), optimizer=sgd(0.1), local_steps=3)
        result, expected = run_rounds(client, data), run_rounds(plain, data)
        torch.testing.assert_close(result.w, expected.w, rtol=0, atol=1e-12)


@exhaustive_but(
    "<lambda>0-1-one_by_one",
    "<lambda>0-3-stacked",
    "<lambda>1-3-one_by_one",
    "<lambda>1-1-stacked",
    "optimizer2-3-one_by_one",
)
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    "optimizer",
    [
        sgd(0.05),
        sgd(0.05, momentum=0.9, weight_decay=0.5),
        functools.partial(torch.optim.Adam, lr=0.05),
    ],
)
def test_clients_are_evaluated_after_adaptation(engine, steps, optimizer):
    """v ← v − α (v − ȳ), whatever takes the steps of the rounds."""
    observed = ([1.0, 3.0], [4.0, 8.0, 6.0])
    data = validated_by_training(shared_out(points(*observed), batch_size=8))
    client = PerFedAvg(
        Point(start=10.0), ALPHA, adaptation_steps=steps, optimizer=optimizer,
        criterion=HalfSquares(), local_steps=1,
    )  # fmt: skip
    result = trained(client, data, engine=engine)
    expected = []
    for own in observed:
        mean = sum(own) / len(own)
        v = mean + (float(result.w) - mean) * (1 - ALPHA) ** steps
        expected.append(sum((v - y) ** 2 / 2 for y in own) / len(own))
    losses = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(result.metrics["personal"]["loss"], losses)


@pytest.mark.slow
def test_rounds_minimise_the_loss_after_adaptation():
    """½ (w − α (w − y) − y)² has the gradient (1 − α)² (w − y), and y has the mean 3."""
    data = shared_out(points([1.0] * 3, [5.0] * 3))
    client = PerFedAvg(
        Point(start=9.0), ALPHA, optimizer=sgd(0.5), criterion=HalfSquares(), local_steps=1
    )
    result = run_rounds(client, data, 2)
    assert result.w.item() == pytest.approx(3 + 6 * (1 - 0.5 * (1 - ALPHA) ** 2) ** 2, rel=1e-6)


@table_test(
    ("arguments", "match"),
    [
        ({"adaptation_lr": -1.0}, "`adaptation_lr` to be at least 0, and finite, but got -1.0"),
        ({"difference": 0.0}, "`difference` to be above 0, and finite, but got 0"),
        ({"difference": -1e-3}, "`difference` to be above 0, and finite, but got -0.001"),
        ({"hessian": "hf"}, "`hessian` to be 'difference', 'exact' or 'none' but got 'hf'"),
        ({"adaptation_steps": 0}, "`adaptation_steps` to be at least 1 but got 0"),
    ],
)
def test_invalid_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        PerFedAvg(Point(), **arguments)


def test_running_statistics_are_refused():
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    with pytest.raises(ValueError, match=r"`net` to have no running .* but got 1.running_mean"):
        PerFedAvg(net)


@pytest.mark.slow
def test_empty_parts_of_a_minibatch_are_not_run():
    data = shared_out(classes([5, 4, 1], shape=(2, 2)))
    client = PerFedAvg(seeded(Views), optimizer=sgd(0.1), local_epochs=1)
    result = [run_rounds(client, data, engine=engine) for engine in ("one_by_one", "stacked")]
    assert result[0].distance(result[1]) < 1e-12


@exhaustive_but("one_by_one")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_differences_are_taken_in_full_precision(engine):
    """Between points that bfloat16 does not tell apart: much nearer than without the product."""
    data = shared_out(classes([30], shape=(64,)), batch_size=30)
    half = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    result = {}
    for hessian, autocast in (("exact", None), ("difference", half), ("none", None)):
        settings = {"adaptation_lr": 0.5, "hessian": hessian, "optimizer": sgd(0.1)}
        client = PerFedAvg(seeded(lambda: MLP(64, [32], 3)), local_steps=5, **settings)
        settings = {"engine": engine, "dtype": torch.float32, "autocast": autocast}
        result[hessian] = run_rounds(client, data, rounds=1, **settings).w
    far = (result["none"] - result["exact"]).norm()
    assert (result["difference"] - result["exact"]).norm() < far / 4
