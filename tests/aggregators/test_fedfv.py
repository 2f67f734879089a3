"""FedFV against Algorithms 1 to 3 in NumPy, over rounds with other cohorts."""

import math

import numpy as np
import pytest
import torch
from tables import table_test

from pl_fed.aggregators import FedFV
from pl_fed.types import RoundContext


def merge(aggregator, uploads, losses, clients=None):
    clients = torch.arange(len(uploads)) if clients is None else torch.as_tensor(clients)
    losses = torch.as_tensor(losses, dtype=torch.float64)
    context = RoundContext(clients=clients, start_losses=losses)
    uploads = torch.as_tensor(uploads, dtype=torch.float64)
    return aggregator(uploads, torch.ones(len(uploads)), context).numpy()


class Reference:
    """Algorithms 1 to 3 on gradients, with a history of each client."""

    def __init__(self, alpha, tau):
        self.alpha, self.tau, self.round, self.history = alpha, tau, 0, {}

    def merge(self, gradients, losses, clients):
        n = len(gradients)
        order = sorted(range(n), key=lambda k: losses[k])
        unchanged = order[math.ceil((n - 1) * (1 - self.alpha)) :] if self.alpha > 0 else []
        projected = [gradient.copy() for gradient in gradients]
        for i in range(n):
            for j in order:
                dot = projected[i] @ gradients[j]
                if i not in unchanged and j != i and dot < 0:
                    projected[i] -= dot / (gradients[j] @ gradients[j]) * gradients[j]
        merged = np.mean(projected, 0)
        for k, gradient in zip(clients, gradients):
            self.history[k] = (self.round, gradient)
        for age in range(self.tau, 0, -1):
            past = [g for t, g in self.history.values() if t == self.round - age and merged @ g < 0]
            if past and merged @ sum(past) < 0:
                total = sum(past)
                merged = merged - merged @ total / (total @ total) * total
        self.round += 1
        return merged / np.linalg.norm(merged) * np.linalg.norm(np.mean(gradients, 0))


@pytest.mark.slow
def test_rounds_equal_the_algorithms():
    projections = 0
    for seed in range(30):
        draw = np.random.default_rng(seed)
        alpha = float(draw.choice([0.0, 0.1, 1 / 3, 0.5, 1.0]))
        tau, num_clients = int(draw.integers(0, 5)), int(draw.integers(2, 9))
        aggregator, reference = FedFV(alpha, tau), Reference(alpha, tau)
        for _ in range(7):
            cohort = draw.permutation(num_clients)[: draw.integers(1, min(4, num_clients) + 1)]
            uploads = draw.normal(size=(len(cohort), 6)) * draw.uniform(0.1, 4, (len(cohort), 1))
            losses = draw.uniform(0, 3, len(cohort))
            merged = merge(aggregator, uploads, losses, cohort)
            expected = -reference.merge(-uploads, losses, cohort)
            np.testing.assert_allclose(merged, expected, rtol=1e-9, atol=1e-9)
            projections += not np.allclose(expected, uploads.mean(0))
            if tau:
                recent = {k for k, (t, _) in reference.history.items()
                          if t >= reference.round - tau}  # fmt: skip
                assert set(aggregator.past_clients.tolist()) == recent
    assert projections > 100


def test_three_clients_by_hand():
    """Projected updates (−0.2, −0.1), (0.5, −1) and (0.4, 0.2)."""
    uploads = [[-1.0, 0.0], [0.5, -1.0], [1.0, 1.0]]
    merged = merge(FedFV(), uploads, [0.2, 0.9, 0.5])
    assert merged.tolist() == pytest.approx([0.1023234356, -0.1315587029], abs=1e-10)


def test_past_updates_of_absent_clients_turn_the_result():
    aggregator = FedFV(tau=1)
    assert merge(aggregator, [[1.0, 0.0]], [1.0], [0]).tolist() == [1.0, 0.0]
    assert merge(aggregator, [[-1.0, 1.0]], [1.0], [1]).tolist() == pytest.approx([0, math.sqrt(2)])
    assert aggregator.past_clients.tolist() == [1]  # client 0 is two rounds ago
    assert merge(aggregator, [[1.0, -2.0]], [1.0], [1]).tolist() == [1.0, -2.0]  # its own past
    without = FedFV(tau=0)
    merge(without, [[1.0, 0.0]], [1.0], [0])
    assert merge(without, [[-1.0, 1.0]], [1.0], [1]).tolist() == pytest.approx([-1.0, 1.0])
    assert not without.past.numel()


def test_updates_without_conflicts_are_merged_to_their_mean():
    uploads = np.abs(np.random.default_rng(0).normal(size=(5, 4)))
    merged = merge(FedFV(), uploads, np.arange(5.0))
    np.testing.assert_allclose(merged, uploads.mean(0), rtol=1e-12)


def test_uploads_that_cancel_or_are_zero():
    assert merge(FedFV(), [[1.0, 0.0], [-1.0, 0.0]], [1.0, 2.0]).tolist() == [0.0, 0.0]
    assert merge(FedFV(), np.zeros((3, 2)), [1.0, 2.0, 3.0]).tolist() == [0.0, 0.0]
    merged = merge(FedFV(), [[0.0, 0.0], [2.0, 0.0]], [1.0, 2.0])
    assert merged.tolist() == pytest.approx([1.0, 0.0])


@table_test(
    ("arguments", "message"),
    [
        ({"alpha": -0.1}, r"`alpha` to be in \[0, 1\] but got -0\.1"),
        ({"alpha": 1.5}, r"`alpha` to be in \[0, 1\] but got 1\.5"),
        ({"tau": -1}, r"`tau` .* but got -1"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=rf"Expected argument {message}"):
        FedFV(**arguments)
