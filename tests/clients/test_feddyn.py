"""FedDyn against Algorithm 1 in NumPy, on linear regressions with unlike clients."""

import numpy as np
import pytest
import torch
from exhaustive import exhaustive_but, exhaustive_for
from small_federations import (
    Cohorts,
    HalfSquares,
    Point,
    VariedCohorts,
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

from pl_fed.clients import FedAvg, FedDyn

SIZES = [7, 3, 10, 2]
ENGINES = ["one_by_one", "stacked", "stacked_compiled"]


def draw_regressions(seed, sizes=SIZES):
    draw = np.random.default_rng(seed)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    x, slopes = draw.normal(size=(len(owner), 2)), 3 * draw.normal(size=(len(sizes), 2))
    return reals(x, (x * slopes[owner]).sum(1, keepdims=True), owner)


def line():
    return nn.Linear(2, 1, bias=False)


def samples_of(data, client):
    index = data.clients.train.samples(client)
    return data.clients.inputs[index].numpy(), data.clients.targets[index].numpy()[:, 0]


def algorithm_1(data, cohorts, alpha, lr, weights, batch=4, passes=2):
    """Return w, the λ_k and h, every letter as in the paper; α_k as in the authors' code."""
    sizes = np.array([len(samples_of(data, k)[0]) for k in range(len(SIZES))])
    alphas = alpha * (sizes.mean() / sizes if weights == "samples" else np.ones(len(sizes)))
    w = seeded(line).double().weight.detach().numpy()[0].copy()
    duals, h = np.zeros((len(sizes), 2)), np.zeros(2)
    for cohort in cohorts:
        models = []
        for k in cohort:
            x, y = samples_of(data, k)
            model = w.copy()
            for first in list(range(0, len(x), batch)) * passes:
                inputs, targets = x[first : first + batch], y[first : first + batch]
                gradient = inputs.T @ (inputs @ model - targets) / len(inputs)
                model -= lr * (gradient - duals[k] + alphas[k] * (model - w))
            duals[k] -= alphas[k] * (model - w)
            models.append(model)
        # the authors' h / α is the mean of all λ_k / α_k
        h = np.mean(duals / alphas[:, None], 0)
        w = np.mean(models, 0) - h
    return w, duals / alphas[:, None], h


@exhaustive_for("samples-one_by_one")
@exhaustive_but(
    "uniform-one_by_one", "samples-one_by_one", "samples-stacked", "uniform-stacked_compiled"
)
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_rounds_equal_algorithm_1(uncompiled, engine, weights):
    cohorts = [(0, 1, 3), (0, 2, 3), (1, 2, 3), (0, 1, 2)]
    for seed in range(3):
        data = shared_out(draw_regressions(seed), batch_size=4)
        settings = {"optimizer": sgd(0.1), "criterion": HalfSquares(), "local_epochs": 2}
        client = FedDyn(seeded(line), 0.4, weights, **settings)
        sampler = Cohorts(*cohorts)
        settings = {"sampler": sampler, "shuffle": False, "engine": engine, "chunk_size": 2}
        result = run_rounds(client, data, rounds=4, **settings)
        w, duals, h = algorithm_1(data, cohorts, 0.4, 0.1, weights)
        np.testing.assert_allclose(result.w.numpy(), w, rtol=0, atol=1e-9)
        np.testing.assert_allclose(result.states["drift"].numpy(), -duals, rtol=0, atol=1e-9)
        mean_drift = result.server_states["mean_drift"].numpy()
        np.testing.assert_allclose(mean_drift, -h, rtol=0, atol=1e-9)


@exhaustive_but("one_by_one")
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
@pytest.mark.slow
def test_three_rounds_of_exact_minimisers_go_to_the_minimiser_of_the_mean(engine):
    """f_k = ½ ‖w − c_k‖² has Hessian 1, the objective 1 + α: one step of 1 / 1.5 is exact."""
    data = shared_out(reals([[0.0], [0.0]], [[1.0, 0.0], [3.0, 2.0]], [0, 1]))
    settings = {"optimizer": sgd(1 / 1.5), "criterion": HalfSquares(), "local_steps": 1}
    client = FedDyn(Point(2), alpha=0.5, **settings)
    expected = [
        (2.6666666667, 1.3333333333),
        (2.2222222222, 1.1111111111),
        (2.0740740741, 1.0370370370),
    ]
    for rounds, w in enumerate(expected, 1):
        outcome = run_rounds(client, data, rounds=rounds, engine=engine)
        np.testing.assert_allclose(outcome.w.numpy(), w, rtol=0, atol=1e-9)
    outcome = run_rounds(client, data, rounds=40, engine=engine)
    np.testing.assert_allclose(outcome.w.numpy(), (2, 1), rtol=0, atol=1e-12)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_weights_by_samples_go_to_the_minimiser_of_the_weighted_mean():
    """Clients of one and three equal samples, α_k = α (2, 2/3): one half of all and a third."""
    data = shared_out(reals(torch.zeros(4, 1), [[1.0], [3.0], [3.0], [3.0]], [0, 1, 1, 1]))
    settings = {"optimizer": sgd(0.6), "criterion": HalfSquares(), "local_steps": 4}
    means = {"uniform": 2.0, "samples": 2.5}
    for weights, mean in means.items():
        client = FedDyn(Point(), alpha=0.5, weights=weights, **settings)
        outcome = run_rounds(client, data, rounds=40, engine="stacked")
        assert outcome.w.item() == pytest.approx(mean, abs=1e-9)


@pytest.mark.slow
def test_drifts_of_absent_clients_count_in_the_mean_if_cohorts_vary():
    data, cohorts = shared_out(draw_regressions(1)), [(0, 1, 2), (3,), (0, 1, 2, 3), (1, 2)]
    client = FedDyn(seeded(line), criterion=HalfSquares(), optimizer=sgd(0.1), local_steps=3)
    outcome = run_rounds(client, data, rounds=4, sampler=VariedCohorts(*cohorts))
    mean = outcome.states["drift"].mean(0)
    torch.testing.assert_close(outcome.server_states["mean_drift"], mean, rtol=0, atol=1e-12)
    assert mean.abs().max() > 1e-3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_converges_where_fedavg_stalls():
    """Many local steps on unlike quadratics: FedAvg's fixed point is not the minimum."""
    data = shared_out(draw_regressions(2), batch_size=10)
    hessian, linear = np.zeros((2, 2)), np.zeros(2)
    for k in range(len(SIZES)):
        x, y = samples_of(data, k)
        hessian, linear = hessian + x.T @ x / len(x), linear + x.T @ y / len(x)
    best = np.linalg.solve(hessian, linear)
    settings = {"criterion": HalfSquares(), "optimizer": sgd(0.2), "local_steps": 10}

    def error(client, rounds):
        w = run_rounds(client, data, rounds=rounds, engine="stacked").w
        return np.abs(w.numpy() - best).max()

    assert error(FedDyn(seeded(line), 1.0, **settings), 38) < 1e-6
    assert error(FedAvg(seeded(line), **settings), 5) > 1e-2


def test_only_the_models_cross_the_network():
    client = FedDyn(seeded(mlp))
    assert client.upload_numbers == client.download_numbers == len(client.initial_row())


@pytest.mark.slow
def test_a_client_without_a_step_pulls_the_model_to_the_last_mean():
    """Its w_k is w^t and its drift stays; the others' drifts move w nevertheless."""

    class Waiting(FedDyn):
        def begin(self, client):
            super().begin(client)
            for steps in client.steps.values():
                steps[client.ids == 1] = 0

    client = Waiting(seeded(mlp), optimizer=sgd(0.1), local_steps=2)
    outcome = run_rounds(client, shared_out(classes([5, 8])), rounds=2)
    assert not outcome.states["drift"][1].any()
    mean = outcome.states["drift"].mean(0)
    torch.testing.assert_close(outcome.server_states["mean_drift"], mean, rtol=0, atol=1e-12)


@table_test(
    "arguments, match",
    [
        ({"alpha": 0.0}, "`alpha`"),
        ({"alpha": float("inf")}, "`alpha`"),
        ({"weights": "sizes"}, "`weights`"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        FedDyn(mlp(), **arguments)


def test_another_server_step_is_refused():
    data, client = shared_out(classes([8] * 3)), FedDyn(seeded(mlp), optimizer=sgd(0.1))
    with pytest.raises(ValueError, match="plain SGD with learning rate 1 for FedDyn"):
        run_rounds(client, data, server_optimizer=sgd(1.0, momentum=0.9))
