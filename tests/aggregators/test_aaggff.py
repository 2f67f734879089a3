"""AAggFF against its decisions in NumPy over rounds, with an exact search over all supports."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from tables import table_test

from pl_fed.aggregators import AAggFF
from pl_fed.functional.simplex import minimize_on_simplex
from pl_fed.types import RoundContext

DISTRIBUTIONS = {
    "weibull": stats.weibull_min(2),
    "exponential": stats.expon(),
    "frechet": stats.invweibull(1),
    "normal": stats.norm(1),
    "gumbel": stats.gumbel_r(1),
    "logistic": stats.logistic(1),
}


def merge(aggregator, uploads, losses, clients, num_clients):
    context = RoundContext(
        clients=torch.as_tensor(clients),
        start_losses=torch.as_tensor(losses, dtype=torch.float64),
        num_clients=num_clients,
    )
    return aggregator(torch.as_tensor(uploads), torch.ones(len(uploads)), context).numpy()


def search_supports(quadratic, linear):
    """Return the minimum on the simplex: the best of the stationary points of all supports."""
    best, lowest = None, math.inf
    for size in range(1, len(linear) + 1):
        for support in itertools.combinations(range(len(linear)), size):
            system = np.ones((size + 1, size + 1))
            system[:size, :size], system[size, size] = quadratic[np.ix_(support, support)], 0
            solved = np.linalg.solve(system, [*-linear[list(support)], 1])[:size]
            point = np.zeros(len(linear))
            point[list(support)] = solved
            value = linear @ point + point @ quadratic @ point / 2
            if (solved >= 0).all() and value < lowest:
                best, lowest = point, value
    return best


def draw_round(draw, num_clients, size):
    clients = draw.permutation(num_clients)[:size]
    return draw.normal(size=(size, 4)), draw.uniform(0.05, 3, size), clients


@pytest.mark.parametrize("response", DISTRIBUTIONS)
def test_cross_silo_rounds_equal_the_online_newton_step(response):
    draw = np.random.default_rng(3)
    for num_clients in (1, 2, 4, 5):
        aggregator, p = AAggFF(response=response), np.full(num_clients, 1 / num_clients)
        strength = num_clients / 4
        linear, quadratic = np.zeros(num_clients), 4 * np.eye(num_clients)
        for _ in range(8):
            uploads, losses, clients = draw_round(draw, num_clients, num_clients)
            responses = np.zeros(num_clients)
            responses[clients] = DISTRIBUTIONS[response].cdf(losses / losses.mean()) / num_clients
            g = -responses / (1 + p @ responses)
            linear += g - strength * (g @ p) * g  # of ⟨g, p⟩ + β/2 ⟨g, p − p^s⟩²
            quadratic += strength * np.outer(g, g)
            p = search_supports(quadratic, linear)
            merged = merge(aggregator, uploads, losses, clients, num_clients)
            np.testing.assert_allclose(aggregator.mixture.shares, p, rtol=0, atol=1e-10)
            np.testing.assert_allclose(merged, p[clients] @ uploads, rtol=0, atol=1e-9)


@pytest.mark.parametrize("response", DISTRIBUTIONS)
def test_cross_device_rounds_equal_dual_averaging(response):
    """With the whole linearised gradient, and its term that is equal for all clients."""
    draw = np.random.default_rng(4)
    num_clients, size = 6, 3
    share = size / num_clients
    aggregator, p = AAggFF("cross_device", response), np.full(num_clients, 1 / num_clients)
    total = np.zeros(num_clients)
    for t in range(1, 9):
        uploads, losses, clients = draw_round(draw, num_clients, size)
        responses = share * DISTRIBUTIONS[response].cdf(losses / losses.mean())
        mean = responses.mean()
        robust = np.full(num_clients, mean)
        robust[clients] = (1 - 1 / share) * mean + responses / share
        linearised = -robust / (1 + p.sum() * mean)
        linearised += mean * (p @ (robust - mean)) / (1 + p.sum() * mean) ** 2
        total += linearised
        powers = np.exp(-math.sqrt(math.log(num_clients)) / math.sqrt(t + 1) / (2 + share) * total)
        p = powers / powers.sum()
        merged = merge(aggregator, uploads, losses, clients, num_clients)
        np.testing.assert_allclose(aggregator.mixture.shares, p, rtol=0, atol=1e-12)
        own = p[clients] / p[clients].sum()
        np.testing.assert_allclose(merged, own @ uploads, rtol=0, atol=1e-9)


def test_decision_minimises_the_objective_after_many_rounds():
    """Long sums do not cost digits: the gradient is equal on the support."""
    draw = np.random.default_rng(5)
    quadratic = draw.normal(size=(6, 6))
    quadratic = 1e3 * quadratic @ quadratic.T + 4 * np.eye(6)
    linear = 1e3 * draw.normal(size=6) + 1e6
    point = minimize_on_simplex(torch.from_numpy(quadratic), torch.from_numpy(linear))
    np.testing.assert_allclose(point, search_supports(quadratic, linear - 1e6), atol=1e-9)


@pytest.mark.parametrize("setting", ["cross_silo", "cross_device"])
def test_weights_move_to_the_client_with_the_largest_loss(setting):
    aggregator, shares = AAggFF(setting), []
    for _ in range(30):
        merge(aggregator, np.eye(3), [0.5, 1.0, 2.0], [0, 1, 2], 3)
        shares.append(aggregator.mixture.shares.tolist())
    assert all(low < high for low, _, high in shares)
    assert shares[-1][2] > shares[0][2] > 1 / 3


def test_losses_of_zero_and_clients_that_join():
    for setting in ("cross_silo", "cross_device"):
        aggregator = AAggFF(setting)
        merge(aggregator, np.eye(2), [0.0, 0.0], [0, 1], 2)
        assert aggregator.mixture.shares.tolist() == pytest.approx([0.5, 0.5])
        merge(aggregator, np.eye(2), [1.0, 2.0], [0, 3], 4)
        assert aggregator.mixture.shares.sum().item() == pytest.approx(1)
        assert len(aggregator.gradients) == 4


@pytest.mark.parametrize("setting", ["cross_silo", "cross_device"])
def test_client_that_leaves_is_one_outside_of_the_cohort(setting):
    left, absent = AAggFF(setting), AAggFF(setting)
    for number in (4, 3, 3):
        losses = [0.5, 1.0, 1.5, 2.0][:number]
        merge(left, np.eye(number), losses, range(number), number)
        merge(absent, np.eye(number), losses, range(number), 4)
        assert torch.equal(left.mixture.shares, absent.mixture.shares)
    assert len(left.mixture.shares) == 4
    assert left.mixture.shares[3] > 0


@pytest.mark.parametrize("setting", ["cross_silo", "cross_device"])
def test_clients_that_join_after_rounds_of_equal_losses_have_equal_weights(setting):
    aggregator = AAggFF(setting)
    for _ in range(50):
        merge(aggregator, np.eye(4), [1.0] * 4, range(4), 4)
    merge(aggregator, np.eye(6), [1.0] * 6, range(6), 6)
    assert aggregator.mixture.shares.tolist() == pytest.approx([1 / 6] * 6)


@table_test(
    ("arguments", "name"), [({"setting": "silo"}, "setting"), ({"response": "beta"}, "response")]
)
def test_invalid_arguments_are_refused(arguments, name):
    with pytest.raises(ValueError, match=f"Expected argument `{name}` to be"):
        AAggFF(**arguments)
