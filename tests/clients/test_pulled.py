"""The pulls that Ditto and Finetuning offer, against float64 formulas and finite differences."""

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_for
from hypothesis import given, settings
from hypothesis import strategies as st
from small_federations import Recurrent, classes, mlp, reals, run_rounds, seeded, sgd, shared_out
from tables import table_test
from torch import nn

from pl_fed.clients import Ditto, Finetuning, Local
from pl_fed.tasks import LanguageModelling, TokenClassification
from pl_fed.types import Batch

INPUTS, CLASSES = 4, 3


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def probabilities(row, x):
    """Return the probabilities of a linear layer; its row is weight, then bias."""
    weight, bias = np.split(row, [INPUTS * CLASSES])
    return softmax(x @ weight.reshape(CLASSES, INPUTS).T + bias)


def fisher(row, x, y):
    """The mean of the samples' squared gradients: (p − e_y) xᵀ, and p − e_y for the bias."""
    residual = probabilities(row, x) - np.eye(CLASSES)[y]
    weights = np.square(residual[:, :, None] * x[:, None, :]).mean(0)
    return np.concatenate([weights.ravel(), np.square(residual).mean(0)])


def objective(v, w, x, y, lam, regularizer):
    p, q = probabilities(v, x), probabilities(w, x)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    if regularizer == "l2":
        return loss + lam / 2 * np.square(v - w).sum()
    if regularizer == "fisher":
        return loss + lam / 2 * (fisher(w, x, y) * np.square(v - w)).sum()
    divergence = (p * np.log(p / q)).sum(1) + (q * np.log(q / p)).sum(1)
    return loss + lam / 2 * divergence.mean()


def slope(function, at, step=1e-6):
    ways = step * np.eye(len(at))
    return np.array([(function(at + way) - function(at - way)) / (2 * step) for way in ways])


@pytest.mark.slow
@pytest.mark.parametrize("regularizer", ["l2", "fisher", "kl"])
@given(seed=st.integers(0, 2**16), size=st.integers(1, 6), lam=st.floats(0, 20))
@settings(max_examples=15, deadline=None)
def test_value_and_gradient_equal_the_formula(regularizer, seed, size, lam):
    draw = np.random.default_rng(seed)
    x, y = draw.normal(size=(size, INPUTS)), draw.integers(CLASSES, size=size)
    v, w = draw.normal(size=(2, INPUTS * CLASSES + CLASSES))
    client = Ditto(nn.Linear(INPUTS, CLASSES), lam=lam, regularizer=regularizer).double()
    client.row("personal").data.copy_(torch.tensor(v))
    client.row("global").data.copy_(torch.tensor(draw.normal(size=len(w))))  # it has moved on
    batch = Batch(torch.tensor(x), torch.tensor(y))
    with client.reading({"broadcast": torch.tensor(w)}):
        loss = client.pulled_loss(batch, {"personal": lam})
    assert loss.item() == pytest.approx(objective(v, w, x, y, lam, regularizer), rel=1e-9)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in client.personal_model.parameters()])
    expected = slope(lambda at: objective(at, w, x, y, lam, regularizer), v)
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-4, atol=1e-6)
    assert all(p.grad is None for p in client.global_model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("regularizer", ["fisher", "kl"])
def test_pull_vanishes_at_the_centre(regularizer):
    data = shared_out(classes([7, 3, 10]), batch_size=16)
    settings = {"optimizer": sgd(0.1), "local_steps": 1}
    ditto = Ditto(seeded(mlp), lam=50.0, regularizer=regularizer, **settings)
    local = Local(seeded(mlp), **settings)
    results, expected = (run_rounds(client, data, 1) for client in (ditto, local))
    torch.testing.assert_close(results.v, expected.v, rtol=0, atol=1e-14)
    later = [run_rounds(client, data, 2).v for client in (ditto, local)]
    assert (later[0] - later[1]).abs().max() > 1e-3


@pytest.mark.parametrize("regularizer", ["fisher", "kl"])
def test_centre_has_no_dropout_and_stays_in_training_mode(regularizer):
    net = nn.Sequential(nn.Linear(INPUTS, 5), nn.Dropout(0.5), nn.Linear(5, CLASSES))
    client = Ditto(net, lam=1.0, regularizer=regularizer).double().train()
    broadcast = client.row("global").data.clone()
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(6, INPUTS, generator=draw, dtype=torch.float64)
    batch = Batch(x, torch.arange(6) % CLASSES)
    results = []
    for key in (1, 2):
        client.draws.start(key)
        assert client.global_model(x).equal(client.global_model(x)) is False
        with client.reading({"broadcast": broadcast}):
            results.append(client._describe_centre(batch))
    assert all(module.training for module in client.global_model.modules())
    if regularizer == "fisher":
        assert all(torch.equal(row, results[1][name]) for name, row in results[0].items())
    else:
        torch.testing.assert_close(results[0], client.global_model.eval()(x))
        assert torch.equal(*results)


@pytest.mark.slow
def test_larger_lambda_gives_predictions_nearer_to_the_global_model():
    data = shared_out(classes([12, 9, 15]), batch_size=16)
    x = data.clients.inputs.double()
    distances = []
    for lam in (0.0, 1.0, 20.0):
        client = Ditto(
            seeded(mlp), lam, regularizer="kl", optimizer=sgd(0.1), local_steps=1,
            personal_steps=30,
        )  # fmt: skip
        outcome = run_rounds(client, data, 2)
        net, global_net = mlp().double(), mlp().double()
        nn.utils.vector_to_parameters(outcome.w, global_net.parameters())
        nn.utils.vector_to_parameters(outcome.v[0], net.parameters())
        difference = net(x).softmax(1) - global_net(x).softmax(1)
        distances.append(difference.detach().abs().mean().item())
    assert distances[0] > 1.3 * distances[1] > 2 * distances[2]


@table_test("kind", [Ditto, Finetuning])
def test_an_unknown_regularizer_is_refused(kind):
    with pytest.raises(ValueError, match=r"`regularizer` to be 'l2', .* but got 'l1'"):
        kind(mlp(), regularizer="l1")
    with pytest.raises(ValueError, match=r"`lam` to be at least 0, and finite, but got -1"):
        kind(mlp(), lam=-1)


@exhaustive_for("fisher-one_by_one_compiled", "kl-one_by_one_compiled")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "one_by_one_compiled"])
@pytest.mark.parametrize("regularizer", ["l2", "fisher", "kl"])
def test_centre_and_its_statistics_stay_fixed_during_a_round(uncompiled, engine, regularizer):
    """However many steps w takes in the round, v is pulled to the w^t that was sent."""
    data = shared_out(classes([6, 8]), batch_size=4)

    def after(global_steps, rounds=1):
        net = seeded(
            lambda: nn.Sequential(nn.Linear(INPUTS, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
        )
        options = {"optimizer": sgd(0.1), "local_steps": global_steps, "personal_steps": 3}
        client = Ditto(net, lam=2.0, regularizer=regularizer, **options)
        return run_rounds(client, data, rounds, engine=engine)

    one_step, five_steps = after(1), after(5)
    assert torch.equal(one_step.v, five_steps.v)
    assert not torch.equal(one_step.w_statistics, five_steps.w_statistics)
    later = after(1, rounds=2)
    assert not torch.equal(later.v, after(5, rounds=2).v), "the next w^t is another"


@table_test("task", [LanguageModelling(), TokenClassification(num_classes=CLASSES)])
def test_divergence_of_sequences_is_that_of_the_tokens_probabilities(task):
    net = nn.Linear(INPUTS, CLASSES)
    client = Ditto(net, lam=2.0, regularizer="kl", task=task).double()
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, INPUTS, generator=draw, dtype=torch.float64)
    tokens = torch.randint(CLASSES, (2, 5), generator=draw)
    v, w = torch.randn(2, INPUTS * CLASSES + CLASSES, generator=draw, dtype=torch.float64)
    client.row("personal").data.copy_(v)
    with client.reading({"broadcast": w}):
        loss = client.pulled_loss(Batch(x, tokens), {"personal": 2.0})
    flat = x.flatten(0, 1).numpy(), tokens.flatten().numpy()
    expected = objective(v.numpy(), w.numpy(), *flat, 2.0, "kl")
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_divergence_is_refused_without_classes():
    data = shared_out(reals(torch.randn(6, 3), torch.randn(6, 1), [0, 0, 0, 1, 1, 1]))
    client = Ditto(nn.Linear(3, 1), regularizer="kl", criterion=nn.MSELoss())
    with pytest.raises(ValueError, match="`regularizer` to be l2 or fisher if targets are no"):
        run_rounds(client, data)


def test_fisher_is_refused_for_nets_without_per_sample_gradients():
    data, net = shared_out(classes([4, 4])), Recurrent()
    with pytest.raises(ValueError, match=r"to be l2 or kl for a net that torch\.func\.vmap"):
        run_rounds(Ditto(net, regularizer="fisher"), data)


@pytest.mark.slow
@pytest.mark.parametrize("regularizer", ["l2", "fisher", "kl"])
def test_scale_of_class_weights_does_not_matter(regularizer):
    results = []
    for weights in (None, [10.0, 10.0, 10.0]):
        criterion = nn.CrossEntropyLoss(weights and torch.tensor(weights).double())
        client = Ditto(seeded(mlp), regularizer=regularizer, criterion=criterion, local_epochs=2)
        results.append(run_rounds(client, shared_out(classes([5, 6]))))
    assert results[0].distance(results[1]) < 1e-10
