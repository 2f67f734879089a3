"""MOCHA against numpy, scipy's matrix roots, and the minimum of its objective."""

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch
from exhaustive import exhaustive_but
from hypothesis import given, settings
from hypothesis import strategies as st
from small_federations import (
    Cohorts,
    HalfSquares,
    Only,
    Point,
    classes,
    mlp,
    points,
    reals,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn

from pl_fed import Federation
from pl_fed.attacks import Attack, ModelReplacement
from pl_fed.clients import Local, Mocha
from pl_fed.clients.mocha import relations
from pl_fed.samplers import Uniform

SIZES = [7, 3, 10, 2]
ENGINES = ["one_by_one", "stacked", "stacked_compiled"]


def line():
    net = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(net.weight)
    return net


def regressions(slopes, sizes=SIZES):
    draw = np.random.default_rng(1)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    x = draw.normal(size=(len(owner), 3))
    return reals(x, (x * np.array(slopes)[owner]).sum(1, keepdims=True), owner)


SLOPES = [[1.0, 2.0, 0.0], [1.1, 1.8, 0.1], [-1.0, 0.5, 2.0], [0.0, -1.0, 1.0]]


def compute_omega(models, epsilon):
    root = scipy.linalg.sqrtm(models @ models.T + epsilon * np.eye(len(models))).real
    return np.linalg.inv(root / np.trace(root))


def group_samples(data):
    result = []
    for k in range(len(data.clients.train.sizes)):
        index = data.clients.train.samples(k)
        result.append(
            (data.clients.inputs[index].numpy(), data.clients.targets[index].numpy()[:, 0])
        )
    return result


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 999),
    clients=st.integers(1, 6),
    numbers=st.integers(1, 8),
    epsilon=st.floats(0.01, 2),
)
def test_relations_equal_matrix_square_roots_by_scipy(seed, clients, numbers, epsilon):
    models = np.random.default_rng(seed).normal(size=(clients, numbers))
    result = relations(torch.from_numpy(models), epsilon).numpy()
    np.testing.assert_allclose(result, compute_omega(models, epsilon), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.trace(np.linalg.inv(result)), 1, rtol=1e-6)
    assert np.linalg.eigvalsh(result).min() > 0


def test_relations_minimise_the_objective():
    """No other Ω⁻¹ of trace 1 has a tr(Ω (WᵀW + εI)) below (tr(WᵀW + εI)^½)²."""
    draw = np.random.default_rng(0)
    models, epsilon = draw.normal(size=(4, 3)), 0.1
    gram = models @ models.T + epsilon * np.eye(4)
    least = np.trace(relations(torch.from_numpy(models), epsilon).numpy() @ gram)
    assert least == pytest.approx(np.sqrt(np.linalg.eigvalsh(gram)).sum() ** 2)
    for _ in range(50):
        candidate = draw.normal(size=(4, 4))
        candidate = candidate @ candidate.T + 0.01 * np.eye(4)
        assert np.trace(np.linalg.inv(candidate / np.trace(candidate)) @ gram) >= least


def test_similar_clients_attract_and_opposite_clients_repel():
    omega = relations(torch.tensor([[1.0, 0.0], [0.9, 0.1], [-1.0, 0.1]]), 0.01)
    assert omega[0, 1] < 0 < omega[0, 2]
    assert torch.equal(relations(torch.zeros(3, 2), 0.1), 3 * torch.eye(3))


@exhaustive_but(
    "0.0-1.0-one_by_one", "0.3-2.0-stacked", "0.3-2.0-stacked_compiled", "0.3-2.0-one_by_one"
)
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("decay", "sigma"), [(0.0, 1.0), (0.3, 2.0)])
def test_rounds_equal_a_dense_simulation(uncompiled, engine, decay, sigma):
    """W, Ω and the subproblems (4), for a cohort that changes."""
    data, cohorts = (
        shared_out(regressions(SLOPES), batch_size=10),
        [(0, 1, 2), (0, 2, 3), (1, 2, 3)],
    )
    lam, epsilon, rate, steps = 0.2, 0.1, 0.05, 3
    models, samples = np.zeros((4, 3)), group_samples(data)
    for cohort in cohorts:
        omega, before = compute_omega(models, epsilon), models.copy()
        for k in cohort:
            x, y = samples[k]
            v = before[k].copy()
            for _ in range(steps):
                pull = omega[k] @ before + sigma * omega[k, k] * (v - before[k])
                v -= rate * (x.T @ (x @ v - y) / len(x) + lam * pull + decay * v)
            models[k] = v
    client = Mocha(
        line(), lam, decay, epsilon, sigma,
        criterion=HalfSquares(), optimizer=sgd(rate), local_steps=steps,
    )  # fmt: skip
    options = {"engine": engine, "chunk_size": 2, "sampler": Cohorts(*cohorts)}
    result = run_rounds(client, data, rounds=3, **options)
    np.testing.assert_allclose(result.v.numpy(), models, rtol=0, atol=1e-10)
    np.testing.assert_allclose(result.w.numpy(), models.mean(0), rtol=0, atol=1e-10)
    server_models = result.server_states["models"].view(4, 3)
    assert torch.equal(server_models, result.v)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_rounds_converge_to_the_minimum_of_the_objective():
    """Σ F_k + λ₁/2 (tr (WᵀW + εI)^½)² + λ₂/2 ‖W‖²: (1) at the best Ω."""
    data, lam, decay, epsilon = shared_out(regressions(SLOPES), batch_size=10), 0.1, 0.05, 0.1
    samples = group_samples(data)

    def objective(flat):
        models = flat.reshape(4, 3)
        fit = sum(((x @ w - y) ** 2).mean() / 2 for (x, y), w in zip(samples, models))
        gram = models @ models.T + epsilon * np.eye(4)
        roots = np.sqrt(np.linalg.eigvalsh(gram)).sum()
        return fit + lam / 2 * roots**2 + decay / 2 * (models**2).sum()

    best = scipy.optimize.minimize(objective, np.zeros(12), tol=1e-12, method="BFGS")
    client = Mocha(
        line(), lam, decay, epsilon,
        criterion=HalfSquares(), optimizer=sgd(0.4), local_steps=2,
    )  # fmt: skip
    result = run_rounds(client, data, rounds=75, engine="stacked").v.numpy()
    assert objective(result.flatten()) == pytest.approx(best.fun, rel=1e-6)
    np.testing.assert_allclose(result.flatten(), best.x, rtol=0, atol=1e-3)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_similar_clients_help_a_client_with_few_samples():
    """Client 1 has four noisy samples and resembles client 0 with many; three draws."""
    slopes, sizes = [[1.0, 2.0, -1.0], [1.0, 2.0, -1.0], [-2.0, 1.0, 0.0]], [60, 4, 60]
    distances = {0.0: 0.0, 0.05: 0.0}
    for seed in range(3):
        arrays = regressions(slopes, sizes)
        draw = np.random.default_rng(seed)
        arrays.targets.add_(torch.from_numpy(2 * draw.normal(size=arrays.targets.shape)))
        for lam in distances:
            client = Mocha(line(), lam, criterion=HalfSquares(), optimizer=sgd(0.1), local_steps=5)
            result = run_rounds(client, shared_out(arrays, batch_size=60), 22, engine="stacked")
            distances[lam] += float((result.v[1] - torch.tensor(slopes[1])).norm())
    assert distances[0.05] < 0.7 * distances[0.0]


@pytest.mark.slow
def test_lambda_zero_equals_local_training():
    data, options = shared_out(classes(SIZES)), {"optimizer": sgd(0.1, momentum=0.5)}
    result = run_rounds(Mocha(seeded(mlp), 0.0, **options), data, 3, sampler=Uniform(2))
    expected = run_rounds(Local(seeded(mlp), **options), data, 3, sampler=Uniform(2))
    torch.testing.assert_close(result.v, expected.v, rtol=0, atol=1e-13)
    torch.testing.assert_close(result.w, result.v.mean(0), rtol=0, atol=1e-13)


@pytest.mark.slow
def test_absent_clients_keep_their_models_bit_for_bit():
    client = Mocha(seeded(mlp), optimizer=sgd(0.1))
    data = shared_out(classes(SIZES))
    first = run_rounds(client, data, 1, sampler=Cohorts((0, 1, 2)))
    second = run_rounds(client, data, 2, sampler=Cohorts((0, 1, 2), (1, 2, 3)))
    same = (first.v == second.v).all(1)
    assert same.tolist() == [True, False, False, False]


class NaNs(Attack):
    """Sends no numbers."""

    def forge(self, honest, own, context):
        return own * torch.nan


def test_server_keeps_the_forged_model():
    """ModelReplacement sends three times the change; a broken upload changes nothing."""
    client = Mocha(seeded(mlp), optimizer=sgd(0.1))
    data = shared_out(classes(SIZES))
    start = run_rounds(client, data, 0).v
    honest = run_rounds(client, data, 1, sampler=Cohorts((0, 1, 2)))
    options = {"attack": ModelReplacement(3.0), "ids": [1]}
    forged = run_rounds(client, data, 1, sampler=Cohorts((0, 1, 2)), **options)
    expected = honest.v.clone()
    expected[1] += 2 * (honest.v - start)[1]
    torch.testing.assert_close(forged.v, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(forged.w, expected.mean(0), rtol=0, atol=1e-12)
    options = {"attack": NaNs(), "ids": [1]}
    broken = run_rounds(client, data, 1, sampler=Cohorts((0, 1, 2)), **options)
    expected[1] = start[1]
    torch.testing.assert_close(broken.v, expected, rtol=0, atol=1e-12)


def test_too_many_clients_and_parameters_are_refused():
    client = Mocha(seeded(mlp), max_numbers=171)  # of 43 parameters
    match = r"`max_numbers` \(171\) to be at least .* but got 4 times 43"
    with pytest.raises(ValueError, match=match):
        Federation(Only(0), seed=0).setup(client, shared_out(classes(SIZES)), "fit")
    client.max_numbers = 172
    Federation(Only(0), seed=0).setup(client, shared_out(classes(SIZES)), "fit")


@table_test(
    ("arguments", "match"),
    [
        ({"lam": -1.0}, "`lam` to be at least 0, and finite, but got -1.0"),
        ({"decay": float("nan")}, "`decay` to be at least 0, and finite, but got nan"),
        ({"sigma": 0.5}, "`sigma` to be at least 1, and finite, but got 0.5"),
        ({"epsilon": 0.0}, "`epsilon` to be above 0, and finite, but got 0.0"),
    ],
)
def test_invalid_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        Mocha(seeded(mlp), **arguments)


@pytest.mark.slow
def test_a_single_client_is_pulled_to_zero():
    """m = 1: Ω = 1, so that F(v) + λ₁/2 v² has its minimum at y / (1 + λ₁)."""
    client = Mocha(Point(), 0.5, criterion=HalfSquares(), optimizer=sgd(0.2), local_steps=5)
    result = run_rounds(client, shared_out(points([3.0])), rounds=30)
    assert result.v.item() == pytest.approx(2.0, abs=1e-9)
