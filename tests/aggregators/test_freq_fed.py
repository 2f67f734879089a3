"""FreqFed against cosine transforms written out, and HDBSCAN of scikit-learn."""

import numpy as np
import pytest
import torch
from hostile_uploads import KINDS, hostile_uploads
from scipy.spatial.distance import pdist, squareform
from sklearn.cluster import HDBSCAN
from test_nguyen_flame import cluster_by_linkage
from torch.testing import assert_close

from pl_fed.aggregators import FreqFed
from pl_fed.aggregators.freq_fed import low_matrix_frequencies, low_row_frequencies
from pl_fed.types import RoundContext


def cosine_matrix(n):
    """The orthonormal DCT-II as a matrix, from its definition."""
    p, x = np.arange(n)[:, None], np.arange(n)
    matrix = np.sqrt(2 / n) * np.cos(np.pi * (2 * x + 1) * p / (2 * n))
    matrix[0] /= np.sqrt(2)
    return matrix


def matrix_frequencies(row):
    side = int(np.ceil(np.sqrt(len(row))))
    square = np.concatenate([row, np.zeros(side**2 - len(row))]).reshape(side, side)
    transform = cosine_matrix(side)
    result = transform @ square @ transform.T
    low = [result[p, q] for p in range(side) for q in range(side) if p + q <= side // 2]
    return np.array(low)


def row_frequencies(row):
    return (cosine_matrix(len(row)) @ row)[: len(row) // 2 + 1]


FREQUENCIES = {"matrix": matrix_frequencies, "row": row_frequencies}


def hostile_rows(seed, d=37):
    draw = torch.Generator().manual_seed(seed)
    n = int(torch.randint(3, 13, (), generator=draw))
    rows = torch.randn(n, d, generator=draw, dtype=torch.float64)
    forged = torch.rand(n, generator=draw) < 0.3
    rows[forged] += 2 * torch.linspace(0, 6, d).cos().double()
    return rows, torch.randn(d, generator=draw, dtype=torch.float64)


def test_frequencies_equal_the_hand_computed_examples():
    low = low_matrix_frequencies(np.arange(1.0, 10.0))
    assert low.tolist() == pytest.approx([15, -2.449490, -7.348469], abs=1e-6)
    low = low_row_frequencies(np.arange(1.0, 5.0))
    assert low.tolist() == pytest.approx([5, -2.230442, 0], abs=1e-6)


def test_frequencies_equal_the_definition():
    for d in (1, 2, 4, 5, 9, 17, 100):
        row = np.random.default_rng(d).normal(size=d)
        assert low_matrix_frequencies(row) == pytest.approx(matrix_frequencies(row), abs=1e-12)
        assert low_row_frequencies(row) == pytest.approx(row_frequencies(row), abs=1e-12)


@pytest.mark.parametrize("transform", ["matrix", "row"])
@pytest.mark.slow
def test_result_equals_hdbscan_on_the_frequencies(transform):
    dropped = 0
    for seed in range(40):
        (rows, broadcast), rejected = hostile_rows(seed), []
        n = len(rows)
        models = (rows + broadcast).numpy()
        low = np.array([FREQUENCIES[transform](model) for model in models])
        hdbscan = HDBSCAN(
            min_cluster_size=n // 2 + 1,
            min_samples=2,  # scikit-learn counts the point itself
            allow_single_cluster=True,
            metric="precomputed",
            copy=True,
        )
        accepted = hdbscan.fit(squareform(pdist(low, "cosine"))).labels_ == 0
        now = RoundContext(
            clients=torch.arange(n),
            broadcast=broadcast,
            reject=lambda clients, into=rejected: into.extend(clients.tolist()),
        )
        merged = FreqFed(transform)(rows, torch.ones(n), now)
        assert_close(merged, rows[torch.from_numpy(accepted)].mean(0), rtol=1e-9, atol=1e-12)
        assert rejected == np.flatnonzero(~accepted).tolist()
        dropped += len(rejected)
    assert dropped > 40


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", ["matrix", "row"])
def test_results_on_hostile_uploads_equal_numpy(transform, kind):
    for seed in range(6):
        broadcast = torch.randn(40, generator=torch.Generator().manual_seed(seed)).double()
        for n in (8, 11):
            rows, rejected = hostile_uploads(kind, n, 3, seed=seed), []
            low = np.array([FREQUENCIES[transform](model) for model in (rows + broadcast).numpy()])
            accepted = np.array(cluster_by_linkage(squareform(pdist(low, "cosine"))))
            now = RoundContext(
                clients=torch.arange(n),
                broadcast=broadcast,
                reject=lambda clients, into=rejected: into.extend(clients.tolist()),
            )
            merged = FreqFed(transform)(rows, torch.ones(n), now)
            expected = torch.from_numpy(rows.numpy()[accepted].mean(0))
            assert_close(merged, expected, rtol=1e-12, atol=1e-12)
            assert rejected == np.flatnonzero(~accepted).tolist()


def test_high_frequencies_do_not_count():
    """The highest frequency of a row, which alternates in sign."""
    rows = torch.ones(5, 16).double()
    rows[:2] += 30 * torch.from_numpy(cosine_matrix(16)[15])
    rows[2] += torch.linspace(-3, 3, 16)
    rejected = []
    now = RoundContext(
        clients=torch.arange(5),
        broadcast=torch.zeros(16).double(),
        reject=lambda clients: rejected.extend(clients.tolist()),
    )
    FreqFed("row")(rows, torch.ones(5), now)
    assert rejected == [2]


def test_few_equal_and_huge_rows():
    for n in (1, 2, 7):
        now = RoundContext(clients=torch.arange(n), broadcast=torch.linspace(-1, 1, 5))
        for row in (torch.zeros(5), torch.full((5,), 1e30), torch.arange(5.0)):
            assert_close(FreqFed()(row.repeat(n, 1), torch.ones(n), now), row)
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)) + 3
    rows[0] = -1e38
    merged = FreqFed()(rows, torch.ones(7), now)
    assert merged.abs().max() < 10
    with pytest.raises(ValueError, match="overflow"):
        FreqFed()(rows.double() * 1e200, torch.ones(7), now)


def test_unknown_transform_is_refused():
    with pytest.raises(ValueError, match=r"argument `transform` to be 'matrix' or 'row'"):
        FreqFed("fourier")
