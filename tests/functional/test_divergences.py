"""Fisher information and divergences, against loops and against distributions of torch's."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, kl_divergence
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from pl_fed.functional.divergences import (
    diagonal_fisher,
    symmetrized_divergence,
    weighted_squared_distance,
)
from pl_fed.models import MLP


def draw_normal(*shape, seed=0, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=draw, dtype=torch.float64)


def test_fisher_is_the_mean_of_squared_sample_gradients():
    net, x, y = MLP(4, [5], 3).double(), draw_normal(6, 4), torch.tensor([0, 1, 2, 2, 0, 1])
    mask = torch.tensor([True, False, True, True, True, False])

    def loss(at, x, y):
        return cross_entropy(functional_call(net, at, (x[None],)), y[None])

    at = {name: p.detach() for name, p in net.named_parameters()}
    expected = {name: torch.zeros_like(p) for name, p in at.items()}
    for index in mask.nonzero().flatten():
        net.zero_grad()
        cross_entropy(net(x[index][None]), y[index][None]).backward()
        for name, parameter in net.named_parameters():
            expected[name] += parameter.grad.square() / 4
    x[~mask] = 1e200  # the squares of these gradients are infinite
    actual = diagonal_fisher(loss, at, x, y, mask)
    for name, square in expected.items():
        torch.testing.assert_close(actual[name], square)
    none = diagonal_fisher(loss, at, x, y, torch.zeros(6, dtype=torch.bool))
    assert all((square == 0).all() for square in none.values())


@given(st.integers(0, 2**16), st.floats(0.1, 30))
@settings(max_examples=25, deadline=None)
def test_divergence_is_the_sum_of_both_directions(seed, scale):
    first, other = draw_normal(2, 5, 4, seed=seed, scale=scale)
    p, q = Categorical(logits=first), Categorical(logits=other)
    expected = kl_divergence(p, q) + kl_divergence(q, p)
    torch.testing.assert_close(symmetrized_divergence(first, other), expected.mean())
    mask = torch.tensor([True, True, False, True, False])
    actual = symmetrized_divergence(first, other, mask)
    torch.testing.assert_close(actual, expected[mask].mean())
    assert symmetrized_divergence(first, first + 3.0) < 1e-12  # logits shifted are the same


def test_divergence_of_certain_predictions_is_finite():
    sure = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    actual = symmetrized_divergence(sure, torch.tensor([[0.0, 200.0, 0.0]]))
    actual.backward()
    assert actual.item() == 400.0
    assert sure.grad.isfinite().all()


def test_weighted_distance():
    first, other = (
        {"a": draw_normal(2, 3, seed=i), "b": draw_normal(4, seed=i + 2)} for i in (0, 1)
    )
    weights = {"a": draw_normal(2, 3, seed=8).abs(), "b": draw_normal(4, seed=9).abs()}
    expected = sum((weights[n] * (first[n] - other[n]) ** 2).sum() for n in "ab")
    torch.testing.assert_close(weighted_squared_distance(first, other, weights), expected)


def test_fisher_does_not_depend_on_the_scale_of_weights():
    """Σ weight · (gradient without it)² / Σ weight; a sample of weight 0 does not count."""
    x, y, weights = draw_normal(4, 3), draw_normal(4), torch.tensor([1.0, 3.0, 0.0, 2.0]).double()
    at = {"w": draw_normal(3, seed=1)}

    def fisher(scale):
        def loss(at, x, y):
            return scale * y[1] * (x @ at["w"] - y[0]).square() / 2

        return diagonal_fisher(loss, at, x, torch.stack([y, weights], 1), None, scale * weights)

    gradients = (x @ at["w"] - y)[:, None] * x
    expected = (weights[:, None] * gradients.square()).sum(0) / 6
    for scale in (1.0, 10.0):
        torch.testing.assert_close(fisher(scale)["w"], expected)


def test_divergence_of_impossible_classes_and_of_half_precision():
    logits = torch.tensor([[0.5, -torch.inf, 1.0]], requires_grad=True)
    same = symmetrized_divergence(logits, logits.detach())
    assert same == 0
    same.backward()
    assert torch.equal(logits.grad, torch.zeros(1, 3))
    first, other = draw_normal(5, 3).bfloat16(), (1.01 * draw_normal(5, 3)).bfloat16()
    exact = symmetrized_divergence(first.double(), other.double())
    assert abs(symmetrized_divergence(first, other) / exact - 1) < 1e-3


def test_divergence_of_pixels():
    first, other = draw_normal(2, 3, 4, 5), draw_normal(2, 3, 4, 5, seed=1)
    flat = (logits.movedim(1, -1).reshape(-1, 3) for logits in (first, other))
    torch.testing.assert_close(symmetrized_divergence(first, other), symmetrized_divergence(*flat))
