"""The shortest combination, against scipy's solver, closed forms, and conditions of a minimum."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from pl_fed.functional.min_norm import min_norm_weights

quick = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@st.composite
def problems(draw, largest=8):
    """Vectors: random ones, few or many for the space, equal, opposite, zero; and bounds."""
    n, d = draw(st.integers(1, largest)), draw(st.integers(1, 10))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    vectors = random.standard_normal((n, d)) + draw(st.sampled_from([0.0, 1.0, 10.0]))
    if draw(st.booleans()):
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    kinds = st.sampled_from(["own"] * 6 + ["zero", "equal", "opposite", "long"])
    for i, kind in enumerate(draw(st.lists(kinds, min_size=n, max_size=n))):
        vectors[i] *= {"zero": 0.0, "long": 100.0}.get(kind, 1.0)
        if kind in ("equal", "opposite"):
            vectors[i] = vectors[0] if kind == "equal" else -vectors[0]
    epsilon = draw(st.sampled_from([0.01, 0.1, 0.3, 1.0]) | st.floats(1e-3, 1))
    return torch.from_numpy(vectors), max(0.0, 1 / n - epsilon), min(1.0, 1 / n + epsilon)


def length(vectors, weights):
    return float((weights @ vectors).square().sum())


@pytest.mark.slow
@quick
@given(problems())
def test_weights_are_feasible_and_as_short_as_those_of_scipy(problem):
    vectors, low, high = problem
    products = (vectors @ vectors.T).numpy()
    weights = min_norm_weights(vectors @ vectors.T, low, high)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    assert low - 1e-14 <= float(weights.min())
    assert float(weights.max()) <= high + 1e-14
    scale = max(float(products.diagonal().max()), 1e-300)
    solution = minimize(
        lambda x: x @ products @ x / scale,
        np.full(len(products), 1 / len(products)),
        jac=lambda x: 2 * products @ x / scale,
        bounds=[(low, high)] * len(products),
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert length(vectors, weights) <= solution.fun * scale + 1e-10 * scale
    if solution.success:
        assert length(vectors, weights) == pytest.approx(solution.fun * scale, abs=1e-6 * scale)


@pytest.mark.slow
@quick
@given(problems(largest=20))
def test_weights_satisfy_the_kkt_conditions(problem):
    """KKT: no weight that may fall has a larger gradient than one that may rise."""
    vectors, low, high = problem
    products = vectors @ vectors.T
    weights = min_norm_weights(products, low, high)
    gradient = products @ weights
    falls, rises = gradient[weights > low], gradient[weights < high]
    if low < high and len(falls) and len(rises):
        assert float(falls.max() - rises.min()) <= 1e-12 * max(float(products.abs().max()), 1e-300)


@pytest.mark.exhaustive
@pytest.mark.slow
@quick
@given(problems(), st.integers(0, 1000))
def test_order_of_vectors_does_not_matter(problem, seed):
    vectors, low, high = problem
    order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(seed))
    products = vectors @ vectors.T
    point = min_norm_weights(products, low, high) @ vectors
    other = min_norm_weights(products[order][:, order], low, high) @ vectors[order]
    torch.testing.assert_close(point, other, rtol=0, atol=1e-9 * (1 + float(vectors.abs().max())))


@pytest.mark.parametrize("n", [30, 100])
def test_more_vectors_than_dimensions(n):
    draw = torch.Generator().manual_seed(n)
    vectors = torch.randn(n, 7, generator=draw, dtype=torch.float64)
    assert length(vectors, min_norm_weights(vectors @ vectors.T, 0.0, 1.0)) < 1e-20
    vectors[:, 0] = vectors[:, 0].abs() + 1
    weights = min_norm_weights(vectors @ vectors.T, 0.0, 1.0)
    shortest = weights @ vectors
    assert (vectors @ shortest >= shortest.square().sum() - 1e-12).all(), "all lie beyond it"


def test_two_vectors_by_hand():
    """b² / (a² + b²) of vectors at right angles; the shorter one where the other lies beyond it."""
    right = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    assert min_norm_weights(right @ right.T, 0.0, 1.0).tolist() == pytest.approx([0.64, 0.36])
    assert min_norm_weights(right @ right.T, 0.4, 0.6).tolist() == pytest.approx([0.6, 0.4])
    beyond = torch.tensor([[1.0, 0.0], [2.0, 1.0]], dtype=torch.float64)
    assert min_norm_weights(beyond @ beyond.T, 0.0, 1.0).tolist() == pytest.approx([1.0, 0.0])


def test_tight_bounds_give_equal_weights():
    vectors = torch.eye(3, dtype=torch.float64) * torch.tensor([1.0, 5.0, 0.0])
    assert min_norm_weights(vectors, 1 / 3, 1 / 3).tolist() == [1 / 3] * 3
    assert min_norm_weights(vectors[:1, :1], 0.0, 1.0).tolist() == [1.0]
    assert min_norm_weights(torch.zeros(4, 4, dtype=torch.float64), 0.0, 1.0).tolist() == [0.25] * 4
