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


def drawn(*shape, seed=0, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=draw, dtype=torch.float64)


def test_fisher_is_the_mean_of_squared_gradients_sample_by_sample():
    net, x, y = MLP(4, [5], 3).double(), drawn(6, 4), torch.tensor([0, 1, 2, 2, 0, 1])
    mask = torch.tensor([True, False, True, True, True, False])

    def loss(at, x, y):
        return cross_entropy(functional_call(net, at, (x[None],)), y[None])

    at = {name: p.detach() for name, p in net.named_parameters()}
    expected = {name: torch.zeros_like(p) for name, p in at.items()}
    for one in mask.nonzero().flatten():
        net.zero_grad()
        cross_entropy(net(x[one][None]), y[one][None]).backward()
        for name, parameter in net.named_parameters():
            expected[name] += parameter.grad.square() / 4
    x[~mask] = 1e200  # whose gradients' squares are infinite
    found = diagonal_fisher(loss, at, x, y, mask)
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each)
    none = diagonal_fisher(loss, at, x, y, torch.zeros(6, dtype=torch.bool))
    assert all((each == 0).all() for each in none.values())


@given(st.integers(0, 2**16), st.floats(0.1, 30))
@settings(max_examples=25, deadline=None)
def test_divergence_is_the_sum_of_both_ways(seed, scale):
    one, other = drawn(2, 5, 4, seed=seed, scale=scale)
    p, q = Categorical(logits=one), Categorical(logits=other)
    expected = kl_divergence(p, q) + kl_divergence(q, p)
    torch.testing.assert_close(symmetrized_divergence(one, other), expected.mean())
    mask = torch.tensor([True, True, False, True, False])
    found = symmetrized_divergence(one, other, mask)
    torch.testing.assert_close(found, expected[mask].mean())
    assert symmetrized_divergence(one, one + 3.0) < 1e-12  # logits shifted are the same


def test_divergence_of_certain_predictions_is_finite():
    sure = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    found = symmetrized_divergence(sure, torch.tensor([[0.0, 200.0, 0.0]]))
    found.backward()
    assert found.item() == 400.0
    assert sure.grad.isfinite().all()


def test_weighted_distance():
    one, other = ({"a": drawn(2, 3, seed=i), "b": drawn(4, seed=i + 2)} for i in (0, 1))
    weights = {"a": drawn(2, 3, seed=8).abs(), "b": drawn(4, seed=9).abs()}
    expected = sum((weights[n] * (one[n] - other[n]) ** 2).sum() for n in "ab")
    torch.testing.assert_close(weighted_squared_distance(one, other, weights), expected)


def test_fisher_does_not_depend_on_the_scale_of_weights():
    """Σ weight · (gradient without it)² / Σ weight; a sample of weight 0 does not count."""
    x, y, weights = drawn(4, 3), drawn(4), torch.tensor([1.0, 3.0, 0.0, 2.0]).double()
    at = {"w": drawn(3, seed=1)}

    def fisher(scale):
        def loss(at, x, y):
            return scale * y[1] * (x @ at["w"] - y[0]).square() / 2

        return diagonal_fisher(loss, at, x, torch.stack([y, weights], 1), None, scale * weights)

    gradients = (x @ at["w"] - y)[:, None] * x
    expected = (weights[:, None] * gradients.square()).sum(0) / 6
    for scale in (1.0, 10.0):
        torch.testing.assert_close(fisher(scale)["w"], expected)


def test_a_divergence_of_classes_that_cannot_be_and_of_half_precision():
    logits = torch.tensor([[0.5, -torch.inf, 1.0]], requires_grad=True)
    same = symmetrized_divergence(logits, logits.detach())
    assert same == 0
    same.backward()
    assert torch.equal(logits.grad, torch.zeros(1, 3))
    one, other = drawn(5, 3).bfloat16(), (1.01 * drawn(5, 3)).bfloat16()
    exact = symmetrized_divergence(one.double(), other.double())
    assert abs(symmetrized_divergence(one, other) / exact - 1) < 1e-3


def test_a_divergence_for_each_pixel():
    one, other = drawn(2, 3, 4, 5), drawn(2, 3, 4, 5, seed=1)
    flat = (each.movedim(1, -1).reshape(-1, 3) for each in (one, other))
    torch.testing.assert_close(symmetrized_divergence(one, other), symmetrized_divergence(*flat))
