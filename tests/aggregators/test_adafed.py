"""AdaFed against its sequential algorithm in NumPy, in any order, and its property of descent."""

import numpy as np
import pytest
import torch
from tables import table_test

from pl_fed.aggregators import AdaFed
from pl_fed.types import RoundContext


def merge(gamma, uploads, losses, clients=None):
    clients = torch.arange(len(uploads)) if clients is None else torch.as_tensor(clients)
    losses = torch.as_tensor(losses, dtype=torch.float64)
    context = RoundContext(clients=clients, start_losses=losses)
    uploads = torch.as_tensor(uploads, dtype=torch.float64)
    return AdaFed(gamma)(uploads, torch.ones(len(uploads)), context).numpy()


def orthogonalise(gradients, losses, gamma):
    """Return the direction by Gram and Schmidt, one client after the other."""
    basis = []
    for gradient, loss in zip(gradients, losses):
        direction = gradient / np.linalg.norm(gradient)
        parts = [direction @ o / (o @ o) for o in basis]
        numerator = direction - sum((c * o for c, o in zip(parts, basis)), np.zeros_like(direction))
        basis.append(numerator / (loss**gamma - sum(parts)))
    weights = np.array([1 / (o @ o) for o in basis])
    return weights @ np.array(basis) / weights.sum()


def test_direction_equals_the_sequential_algorithm_in_any_order():
    for seed in range(30):
        draw = np.random.default_rng(seed)
        n, gamma = int(draw.integers(1, 7)), float(draw.choice([0.0, 0.5, 1.0, 3.0]))
        uploads = draw.normal(size=(n, 20)) * draw.uniform(0.1, 10, (n, 1))
        losses = draw.uniform(0.3, 3, n)
        merged = merge(gamma, uploads, losses, draw.permutation(n))
        for _ in range(3):
            order = draw.permutation(n)
            expected = orthogonalise(uploads[order], losses[order], gamma)
            np.testing.assert_allclose(merged, expected, rtol=1e-9, atol=1e-9)


def test_each_loss_decreases_in_proportion_to_its_power():
    draw = np.random.default_rng(1)
    uploads, losses = draw.normal(size=(5, 30)), draw.uniform(0.5, 2, 5)
    merged = merge(2.0, uploads, losses)
    rates = uploads @ merged / np.linalg.norm(uploads, axis=1)
    np.testing.assert_allclose(rates, merged @ merged * losses**2, rtol=1e-9)


def test_direction_of_two_clients_by_hand():
    """o = (1, 0) and (0, ½), their weights 1 and 4."""
    assert merge(1.0, [[3.0, 0.0], [0.0, 0.5]], [1.0, 2.0]).tolist() == pytest.approx([0.2, 0.4])
    halved = merge(1.0, [[3.0, 0.0], [0.0, 0.5]], [0.5, 1.0])
    assert halved.tolist() == pytest.approx([0.4, 0.8])


def test_denominator_of_zero_is_no_exception():
    """Second denominator: 0.6 − 0.6 · 1. Neighbouring losses give neighbouring directions."""
    uploads = np.array([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0]])
    exact = merge(1.0, uploads, [1.0, 0.6])
    near = orthogonalise(uploads, [1.0, 0.6 + 1e-7], 1.0)
    np.testing.assert_allclose(exact, near, atol=1e-6)
    np.testing.assert_allclose(exact, orthogonalise(uploads[::-1], [0.6, 1.0], 1.0), atol=1e-9)
    assert exact.tolist() == pytest.approx([1.0, 0.0, 0.0])


def test_dependent_uploads_stop_the_step_unless_their_losses_agree():
    opposite = [[1.0, 0.0], [-1.0, 0.0]]
    assert np.linalg.norm(merge(1.0, opposite, [1.0, 1.0])) < 1e-6
    assert np.linalg.norm(merge(1.0, [[1.0, 0.0], [2.0, 0.0]], [1.0, 2.0])) < 1e-6
    agreeing = merge(1.0, [[1.0, 0.0], [2.0, 0.0]], [2.0, 2.0])
    assert agreeing.tolist() == pytest.approx([0.5, 0.0])


def test_uploads_of_zero_are_left_out_and_losses_of_zero_are_finite():
    expected = merge(2.0, [[1.0, 2.0], [3.0, 1.0]], [1.0, 2.0])
    merged = merge(2.0, [[1.0, 2.0], [0.0, 0.0], [3.0, 1.0]], [1.0, 5.0, 2.0])
    np.testing.assert_allclose(merged, expected, rtol=1e-12)
    assert merge(1.0, np.zeros((2, 3)), [1.0, 2.0]).tolist() == [0.0] * 3
    assert merge(1.0, np.eye(3), [0.0] * 3).tolist() == [0.0] * 3
    # client 0 has no loss to lower: Δ is orthogonal to its update
    assert merge(1.0, np.eye(3), [0.0, 1.0, 1.0]).tolist() == pytest.approx([0.0, 0.5, 0.5])


def test_lengths_of_uploads_do_not_matter():
    draw = np.random.default_rng(2)
    uploads, losses = draw.normal(size=(4, 9)), [1.0, 0.5, 2.0, 1.5]
    expected = merge(1.0, uploads, losses)
    for length in (1e-30, 1e30):
        np.testing.assert_allclose(merge(1.0, uploads * length, losses), expected, rtol=1e-9)


@table_test("gamma", [-1.0, float("inf"), float("nan")])
def test_invalid_arguments_are_refused(gamma):
    with pytest.raises(ValueError, match="Expected argument `gamma` to be"):
        AdaFed(gamma)


def test_negative_losses_are_refused():
    with pytest.raises(ValueError, match="at least 0 for AdaFed, which computes powers"):
        merge(1.0, np.eye(2), [1.0, -0.5])
