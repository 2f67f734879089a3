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
