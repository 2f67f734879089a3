"""Ditto's personal models inherit the rate of the global one (Li et al., ICML 2021, section 3.2).

Theorem 1 (Theorem 10): if every F_k is strongly convex and smooth, and ‖w^t − w*‖² falls as g(t),
then ‖v_k^t − v_k*‖² ≤ C g(t), where v_k* minimises h_k(·; w*). Corollary 1: g(t) = O(1/t) under
FedAvg with decaying steps.
"""

import functools

import numpy as np
import pytest
import torch
from equal_trials import trials_skipped
from further_cases import mark_if
from small_federations import HalfSquares, Point, reals, sections, sgd, shared_out
from torch import nn

from pl_fed import Federation
from pl_fed.clients import Ditto
from pl_fed.samplers import All

DEVICES, SAMPLES, INPUTS = 5, 12, 3
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.5)  # at the server


def quadratic_world():
    """Linear regression: for each device A_k and b_k of F_k(w) = ½ wᵀ A_k w − b_kᵀ w + constant."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(DEVICES, SAMPLES, INPUTS)) * [1.0, 0.8, 0.7]
    truth = draw.normal(size=(DEVICES, INPUTS)) + 2
    y = np.einsum("kni,ki->kn", x, truth) + 0.3 * draw.normal(size=(DEVICES, SAMPLES))
    owner = np.repeat(np.arange(DEVICES), SAMPLES)
    arrays = reals(x.reshape(-1, INPUTS), y.reshape(-1, 1), owner)
    curvature = np.einsum("kni,knj->kij", x, x) / SAMPLES
    return arrays, curvature, np.einsum("kni,kn->ki", x, y) / SAMPLES


def errors(client, data, rounds, best_w, best_v, **settings):
    """‖w^t − w*‖², and the mean and the largest ‖v_k^t − v_k*‖², after each round."""
    federation = Federation(All(), seed=0, **sections(engine="stacked", **settings))
    with trials_skipped():
        federation.setup(client.double(), data, "fit")
    optimizer = client.train().configure_optimizers()
    schedule = None
    if isinstance(optimizer, dict):
        optimizer, schedule = optimizer["optimizer"], optimizer["lr_scheduler"]["scheduler"]
        optimizer._opt_called = True
    client_ids, history = torch.arange(data.clients.num_clients), []
    for round in range(rounds):
        federation.run_round(round, optimizer)
        if schedule is not None:
            schedule.step()
        w = client.row("global").data.numpy()
        v = federation.store.read("personal", client_ids).numpy()
        v_errors = np.square(v - best_v).sum(1)
        history.append((np.square(w - best_w).sum(), v_errors.mean(), v_errors.max()))
    return np.array(history).T


def fixed_point(curvature, pulls, steps, lr, mu):
    """Where w stands still under FedAvg or FedProx of full batches: w^{t+1} = M w^t + c."""
    identity = np.eye(INPUTS)
    matrix, constant = np.zeros((INPUTS, INPUTS)), np.zeros(INPUTS)
    for a, b in zip(curvature, pulls):
        slope_matrix, offset = identity, np.zeros(INPUTS)
        for _ in range(steps):
            slope_matrix = slope_matrix - lr * (a @ slope_matrix + mu * (slope_matrix - identity))
            offset = offset - lr * (a @ offset - b + mu * offset)
        matrix, constant = matrix + slope_matrix / DEVICES, constant + offset / DEVICES
    return np.linalg.solve(identity - matrix, constant)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lam", "steps", "mu", "server", "personal_steps"),  # v_k falls faster than w
    [
        mark_if(True, 0.1, 1, 0.0, {}, 6),
        mark_if(True, 0.1, 3, 0.0, {}, 12),
        (0.1, 3, 2.0, {}, 6),
        (0.1, 1, 0.0, {"server_optimizer": MOMENTUM}, 6),
        (5.0, 3, 0.0, {}, 3),
    ],
    ids=["gradient descent", "FedAvg", "FedProx", "momentum at the server", "FedAvg, large lam"],
)
def test_personal_models_inherit_a_linear_rate(lam, steps, mu, server, personal_steps):
    """With full batches w^t falls geometrically; so do all v_k, with the same factor.

    The pull of the v_k depends on w^t alone, not on how it is trained: one large λ is enough.
    """
    arrays, curvature, pulls = quadratic_world()
    net = nn.Linear(INPUTS, 1, bias=False)
    nn.init.zeros_(net.weight)
    client = Ditto(
        net, lam, global_mu=mu, optimizer=sgd(0.2), local_steps=steps, criterion=HalfSquares(),
        personal_lr=1 / (lam + 3), personal_steps=personal_steps,
    )  # fmt: skip
    best_w = fixed_point(curvature, pulls, steps, 0.2, mu)
    best_v = np.linalg.solve(
        curvature + lam * np.eye(INPUTS), (pulls + lam * best_w)[..., None]
    )[..., 0]  # fmt: skip
    data = shared_out(arrays, batch_size=SAMPLES)
    w_errors, _, v_errors = errors(client, data, 40, best_w, best_v, **server)
    assert w_errors[-1] < 1e-2 * w_errors[0]
    assert (v_errors / w_errors)[10:40].max() < 3.0  # C
    rate_w, rate_v = (np.log(curve[39] / curve[20]) / 19 for curve in (w_errors, v_errors))
    assert rate_v == pytest.approx(rate_w, rel=0.05)


@pytest.mark.slow
def test_personal_models_inherit_a_rate_of_one_over_t():
    """Point estimation of 100 numbers at once, a sample a step: noise that falls with the steps.

    η_t = 1 / (t + 1) for w makes the mean of the samples of it, and Lemma 13's is
    2 / ((t + 1)(μ + λ)) for v. The error of the global model after T rounds is that of K T draws,
    σ² / (K T), and that of v_k lies within a constant of 1/T.
    """
    lam, devices, numbers, rounds = 0.5, 40, 100, 200
    draw = np.random.default_rng(1)
    means = draw.normal(size=(devices, 1, numbers))
    y = means + draw.normal(size=(devices, SAMPLES, numbers))
    owner = np.repeat(np.arange(devices), SAMPLES)
    arrays = reals(np.zeros((len(owner), 1)), y.reshape(-1, numbers), owner)
    own = y.mean(1)
    best_w = own.mean(0)
    client = Ditto(
        Point(numbers), lam, optimizer=sgd(1.0), personal_lr=2 / (1 + lam), local_steps=1,
        criterion=HalfSquares(),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda t: 1 / (t + 1)
        ),
    )  # fmt: skip
    data = shared_out(arrays, batch_size=1)
    w_errors, v_errors, _ = errors(client, data, rounds, best_w, (own + lam * best_w) / (1 + lam))
    t = np.arange(1, rounds + 1)
    np.testing.assert_allclose(
        w_errors[50:] * t[50:], ((y - own[:, None]) ** 2).mean(1).mean(0).sum() / devices, rtol=0.35
    )
    constant = (v_errors / w_errors)[20:]
    assert constant.max() < 2 * constant.min()
    slope = np.polyfit(np.log(t[20:]), np.log(v_errors[20:]), 1)[0]
    assert slope == pytest.approx(-1, abs=0.15)
