"""pFedFDA against whole rounds in NumPy: heads from moments, and β by cross-validation."""

import numpy as np
import pytest
import torch
from further_cases import mark_if
from personal_models import trained, validated_by_training
from small_federations import (
    Cohorts,
    HalfSquares,
    classes,
    mlp,
    points,
    run_rounds,
    run_tried_rounds,
    samples_of,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn

from pl_fed.aggregators import Mean
from pl_fed.clients import FedBABU, PFedFDA
from pl_fed.functional.discriminants import factor_covariance, linear_discriminant

ENGINES = ["one_by_one", "stacked", "stacked_compiled"]
EPSILON = 1e-4


def two_layers():
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 3))


def head_of(means, covariance, priors):
    """Return the weights [classes, d] and the biases of the linear discriminant."""
    d = len(covariance)
    covariance = (1 - EPSILON) * covariance + EPSILON * np.trace(covariance) / d * np.eye(d)
    weights = np.stack([np.linalg.solve(covariance, mean) for mean in means])
    quadratic = np.array([mean @ weight for mean, weight in zip(means, weights)])
    return weights, np.log(priors) - quadratic / 2


def log_shares(z, head):
    scores = z @ head[0].T + head[1]
    scores = scores - scores.max(1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(1, keepdims=True))


def measure(z, y, server_means, ridge):
    means = server_means.copy()
    for label in np.unique(y):
        if (y == label).sum() > 2:
            means[label] = z[y == label].mean(0)
    centred = z - means[y]
    covariance = sum((np.outer(row, row) for row in centred), np.zeros((z.shape[1],) * 2))
    return means, covariance / max(len(z) - 1, 1) + ridge * np.eye(z.shape[1])


def choose(z, y, server, priors, ridge, single):
    """Return β₁ and β₂ by a loop over all pairs and both folds."""
    fold = np.array([(y[:place] == label).sum() % 2 for place, label in enumerate(y)])
    used = np.array([(y == label).sum() >= 2 for label in y])
    if not used.any():
        return 0.0, 0.0
    losses = {}
    for second in np.linspace(0, 1, 11):
        for first in np.linspace(0, 1, 11):
            if single and first != second:
                continue
            loss = 0.0
            for held_out in (0, 1):
                fit, test = used & (fold != held_out), used & (fold == held_out)
                means, covariance = measure(z[fit], y[fit], server[0], ridge)
                means = first * means + (1 - first) * server[0]
                covariance = second * covariance + (1 - second) * server[1]
                logs = log_shares(z[test], head_of(means, covariance, priors))
                loss -= logs[np.arange(test.sum()), y[test]].mean()
            losses[first, second] = loss
    least = min(losses.values())
    return next(pair for pair, loss in losses.items() if loss <= least * (1 + 1e-9))


def adapt(body, x, y, server, priors, ridge, single):
    z = x @ body.T
    first, second = choose(z, y, server, priors, ridge, single)
    means, covariance = measure(z, y, server[0], ridge)
    mixed = (
        first * means + (1 - first) * server[0],
        second * covariance + (1 - second) * server[1],
    )
    return mixed, (first, second)


def descend(body, head, x, y, lr):
    for first in range(0, len(x), 4):
        inputs, targets = x[first : first + 4], y[first : first + 4]
        errors = np.exp(log_shares(inputs @ body.T, head)) - np.eye(3)[targets]
        body = body - lr * (errors @ head[0] / len(inputs)).T @ inputs
    return body


def simulate(data, cohorts, by_samples, ridge, single, lr=0.2):
    """Return the server's body, means and covariance, all clients' heads, and the chosen β."""
    net = seeded(two_layers).double()
    body, first_head = (layer.weight.detach().numpy().copy() for layer in net)
    server, samples, priors = (first_head, np.eye(5)), [], []
    for k in range(data.clients.num_clients):
        x, y = samples_of(data, k)
        samples.append((x.astype(np.float64), y))
        shares = np.bincount(y, minlength=3) / len(y) + EPSILON
        priors.append(shares / shares.sum())
    betas = []
    for cohort in cohorts:
        bodies, moments = [], []
        for k in cohort:
            own = descend(body, head_of(*server, priors[k]), *samples[k], lr)
            mixed, beta = adapt(own, *samples[k], server, priors[k], ridge, single)
            bodies.append(own)
            moments.append(mixed)
            betas.append(beta)
        weights = [len(samples[k][1]) if by_samples else 1 for k in cohort]
        body = np.average(bodies, axis=0, weights=weights)
        server = tuple(np.average(part, axis=0, weights=weights) for part in zip(*moments))
    heads = []
    for (x, y), prior in zip(samples, priors):
        mixed, beta = adapt(body, x, y, server, prior, ridge, single)
        betas.append(beta)
        heads.append(np.concatenate([part.ravel() for part in head_of(*mixed, prior)]))
    return body, server, np.stack(heads), betas


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "options"),
    [
        ("uniform", {"ridge": 0.0}),
        mark_if(True, "samples", {}),
        ("samples", {"single_beta": True, "ridge": 0.0}),
    ],
)
def test_rounds_equal_numpy_and_engines_each_other(uncompiled, weights, options):
    cohorts, chosen = [(0, 1), (1, 2), (0, 2), (3, 1)], set()
    for seed in (0, 3):  # without a ridge, the weights of seed 3 are up to 14,000
        data = shared_out(classes([17, 5, 30, 2], seed=seed), batch_size=4)
        client = PFedFDA(seeded(two_layers), optimizer=sgd(0.2), local_epochs=1, **options)
        expected = {"ridge": options.get("ridge", 1.0), "single": "single_beta" in options}
        body, server, heads, betas = simulate(data, cohorts, weights == "samples", **expected)
        chosen.update(betas)
        settings = {"aggregator": Mean(weights), "shuffle": False, "chunk_size": 2}
        outcomes = [
            run_rounds(client, data, 4, sampler=Cohorts(*cohorts), engine=engine, **settings)
            for engine in (ENGINES if seed == 0 and weights == "samples" else ENGINES[:2])
        ]
        largest = max(1.0, np.abs(heads).max())
        for outcome in outcomes:
            assert outcome.distance(outcomes[0]) <= 1e-10 * largest
            close = {"rtol": 0, "atol": 1e-9}
            np.testing.assert_allclose(outcome.w[:20].numpy(), body.ravel(), **close)
            np.testing.assert_allclose(outcome.v[:, :20].numpy(), [body.ravel()] * 4, **close)
            np.testing.assert_allclose(outcome.v[:, 20:] / largest, heads / largest, **close)
            for name, rows in zip(("means", "covariance"), server):
                np.testing.assert_allclose(outcome.server_states[name], rows.ravel(), **close)
    assert len(chosen) > 5  # neither always 0 nor always 1


def test_head_of_the_paper_in_numbers():
    means = torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    covariance = torch.tensor([[1.0, 0.2], [0.2, 2.0]], dtype=torch.float64)
    priors = torch.tensor([0.25, 0.75], dtype=torch.float64)
    factor = factor_covariance(covariance, shrinkage=0.0)
    weights, biases = linear_discriminant(means, factor, priors.log())
    expected = [[0.0, 0.0], [2.0408163265306123, -0.20408163265306123]]
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-14)
    np.testing.assert_allclose(biases, [-1.3862943611, -2.3284983990], rtol=0, atol=1e-10)
    shrunk = factor_covariance(covariance, shrinkage=0.5)
    np.testing.assert_allclose(shrunk @ shrunk.T, [[1.25, 0.1], [0.1, 1.75]], atol=1e-14)


@pytest.mark.slow
def test_without_evidence_for_own_moments_it_is_fedbabu():
    """Two samples of a class in no fold and with no mean: β is 0, and the head stays as it was."""
    arrays = classes([1, 1, 1])
    arrays.targets[:] = 1
    data, settings = shared_out(arrays), {"optimizer": sgd(0.3, momentum=0.5), "local_steps": 3}
    outcome = run_rounds(PFedFDA(seeded(mlp), **settings), data, rounds=3)
    net = seeded(mlp).double()
    shares = torch.tensor([1e-4, 1.0001, 1e-4], dtype=torch.float64) / 1.0003
    weight = net[2].weight.detach()
    net[2].bias.data = shares.log() - weight.square().sum(1) / 2
    babu = run_rounds(FedBABU(net, finetune_epochs=0, **settings), data, rounds=3)
    torch.testing.assert_close(outcome.w[:25], babu.w[:25], rtol=0, atol=1e-12)
    torch.testing.assert_close(outcome.v, babu.v, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_clients_with_few_or_equal_samples_have_finite_heads():
    """A covariance of zeros has no inverse, so β₂ = 1 loses."""
    arrays = classes([1, 6, 8, 2])
    arrays.inputs[1:7] = 1.0
    data = validated_by_training(shared_out(arrays))
    for engine in ENGINES[:2]:
        client = PFedFDA(seeded(mlp), ridge=0.0, optimizer=sgd(0.1))
        result = trained(client, data, engine=engine)
        assert result.w.isfinite().all()
        assert result.metrics["personal"]["loss"].isfinite().all()
        assert result.kept == {}


def test_no_weight_decay_and_no_client_moves_the_head():
    client = PFedFDA(seeded(mlp), optimizer=sgd(0.1, momentum=0.9, weight_decay=0.1))
    outcome = run_rounds(client, shared_out(classes([9, 12])), rounds=2)
    head = torch.cat([part.detach().flatten() for part in seeded(mlp).double()[2].parameters()])
    assert torch.equal(outcome.w[25:], head)


def test_body_means_and_covariance_cross_the_network():
    client = PFedFDA(seeded(mlp))
    assert (client.upload_numbers, client.download_numbers) == (25 + 15 + 25,) * 2
    assert client.unsent_positions.tolist() == list(range(25, 43))


@pytest.mark.slow
def test_data_without_classes_are_refused():
    client = PFedFDA(seeded(lambda: mlp(inputs=1, num_classes=1)), criterion=HalfSquares())
    with pytest.raises(ValueError, match="Expected one class id for each sample for PFedFDA"):
        run_tried_rounds(client, shared_out(points([1.0, 2.0], [3.0])), rounds=0)


@table_test(
    "arguments, match",
    [
        ({"shrinkage": 1.5}, "`shrinkage`"),
        ({"ridge": -1.0}, "`ridge`"),
        ({"candidates": 1}, "`candidates`"),
        ({"head": "9"}, "`head` to be a module with trainable parameters, such as 0, 2"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        PFedFDA(mlp(), **arguments)


def test_nets_without_a_linear_head_or_a_body_are_refused():
    for head in (nn.Linear(5, 3, bias=False), nn.Bilinear(5, 5, 3)):
        with pytest.raises(TypeError, match=r"trainable torch.nn.Linear with a bias but got"):
            PFedFDA(nn.Sequential(nn.Linear(4, 5), head))
    with pytest.raises(ValueError, match="to have a body to train below its head '0'"):
        PFedFDA(nn.Sequential(nn.Linear(4, 3)))
