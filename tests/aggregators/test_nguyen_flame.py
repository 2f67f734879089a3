"""Nguyen's FLAME against HDBSCAN of scikit-learn, scipy's linkage, and the steps in numpy."""

import numpy as np
import pytest
import torch
from hostile_uploads import KINDS, hostile_uploads
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import pdist, squareform
from sklearn.cluster import HDBSCAN
from torch.testing import assert_close

from pl_fed.aggregators import NguyenFlame
from pl_fed.functional.aggregation import cosine_distances
from pl_fed.functional.selection import majority_component
from pl_fed.random import key, normal_row
from pl_fed.types import RoundContext

ROWS = torch.tensor(
    [[1, 0, 0.1, 0], [0.9, 0.1, 0, 0], [1.1, -0.1, 0, 0.1], [-1, 2, 0, 1], [-1.2, 2.2, 0.1, 1]],
    dtype=torch.float64,
)


class Log:
    """The notes and the rejected clients of a round."""

    def __init__(self):
        self.notes, self.rejected = {}, []

    def note(self, word, number):
        self.notes[word] = int(number)

    def reject(self, clients):
        self.rejected += clients.tolist()


def context(rows, log=None, **fields):
    log = log or Log()
    fields = {"broadcast": torch.ones(rows.shape[1], dtype=rows.dtype)} | fields
    return RoundContext(clients=torch.arange(len(rows)), note=log.note, reject=log.reject, **fields)


def random_rows(seed):
    draw = torch.Generator().manual_seed(seed)
    n = int(torch.randint(2, 16, (), generator=draw))
    rows = torch.randn(n, 6, generator=draw, dtype=torch.float64)
    hostile = torch.rand(n, generator=draw) < 0.3
    rows[hostile] += 3
    return rows


def cluster_by_linkage(distances):
    """The first merge of scipy's dendrogram with more than half of the rows."""
    n = len(distances)
    members = {row: {row} for row in range(n)}
    for step, (left, right, *_) in enumerate(linkage(squareform(distances), "single")):
        members[n + step] = members[int(left)] | members[int(right)]
        if len(members[n + step]) > n / 2:
            return [row in members[n + step] for row in range(n)]
    return [True] * n


@pytest.mark.slow
def test_majority_component_equals_hdbscan_and_the_dendrogram():
    for seed in range(300):
        rows = random_rows(seed).numpy()
        n, distances = len(rows), squareform(pdist(rows, "cosine"))
        hdbscan = HDBSCAN(
            min_cluster_size=n // 2 + 1,
            min_samples=2,  # scikit-learn counts the point itself
            allow_single_cluster=True,
            metric="precomputed",
            copy=True,
        )
        component = majority_component(torch.from_numpy(distances)).tolist()
        assert component == (hdbscan.fit(distances).labels_ == 0).tolist()
        assert component == cluster_by_linkage(distances)


def test_component_has_all_pairs_at_most_the_threshold_apart():
    """Two pairs at distance 1, and a tie of three edges that joins all."""
    points = torch.tensor([0.0, 1.0, 3.0, 4.0, 6.0])
    assert majority_component((points[:, None] - points).abs()).all()
    infinite = torch.full((4, 4), torch.inf).fill_diagonal_(0)
    assert majority_component(infinite).all()
    assert majority_component(torch.zeros(1, 1)).tolist() == [True]


def test_cosine_distances_equal_scipy_and_have_no_nan():
    rows = random_rows(3)
    expected = torch.from_numpy(squareform(pdist(rows.numpy(), "cosine")))
    assert_close(cosine_distances(rows @ rows.T), expected, rtol=1e-12, atol=1e-12)
    rows = torch.tensor([[0.0, 0], [0, 0], [1, 0], [torch.nan, 1], [torch.inf, 1]])
    distances = cosine_distances(rows.double() @ rows.double().T)
    assert distances[0].tolist() == [0, 0, 1, torch.inf, torch.inf]
    assert distances[3].tolist() == [torch.inf, torch.inf, torch.inf, 0, torch.inf]


def test_result_equals_a_hand_computed_example():
    log = Log()
    merged = NguyenFlame(noise=0.0)(ROWS, torch.ones(5), context(ROWS, log))
    assert_close(merged, torch.tensor([3, 0, 0.1, 0.1], dtype=torch.float64) / 3)
    assert log.rejected == [3, 4]
    assert log.notes == {"dropped": 2, "clipped": 0}


def test_noise_is_a_keyed_share_of_the_median_norm():
    quiet = NguyenFlame(noise=0.0)(ROWS, torch.ones(5), context(ROWS))
    bound = np.median(np.linalg.norm(ROWS.numpy(), axis=1))
    assert bound == pytest.approx(1.109054, abs=1e-6)
    for seed, round_number in ((0, 0), (4, 7)):
        now = context(ROWS, seed=seed, round=round_number)
        noise = 0.001 * bound * normal_row(key(seed, "nguyen flame", round_number), 4)
        assert_close(NguyenFlame()(ROWS, torch.ones(5), now), quiet + noise, rtol=0, atol=1e-15)


def merge_by_numpy(rows, broadcast):
    models = rows + broadcast
    distances = squareform(pdist(models, "cosine"))
    accepted = np.array(cluster_by_linkage(distances))
    norms = np.linalg.norm(rows, axis=1)
    clipped = rows * np.minimum(1, np.median(norms) / norms)[:, None]
    return clipped[accepted].mean(0), accepted


def test_result_equals_the_steps_in_numpy():
    for seed in range(50):
        rows, log = random_rows(seed), Log()
        broadcast = torch.randn(6, generator=torch.Generator().manual_seed(seed)).double()
        expected, accepted = merge_by_numpy(rows.numpy(), broadcast.numpy())
        now = context(rows, log, broadcast=broadcast)
        merged = NguyenFlame(noise=0.0)(rows, torch.ones(len(rows)), now)
        assert_close(merged, torch.from_numpy(expected), rtol=1e-9, atol=1e-12)
        assert log.rejected == np.flatnonzero(~accepted).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_results_on_hostile_uploads_equal_the_steps_in_numpy(kind):
    for seed in range(6):
        broadcast = torch.randn(40, generator=torch.Generator().manual_seed(seed)).double()
        noise = normal_row(key(4, "nguyen flame", seed), 40).numpy()
        for n in (8, 11):
            rows, log = hostile_uploads(kind, n, 3, seed=seed), Log()
            expected, accepted = merge_by_numpy(rows.numpy(), broadcast.numpy())
            norms = np.linalg.norm(rows.numpy(), axis=1)
            expected += 0.01 * np.median(norms) * noise
            now = context(rows, log, broadcast=broadcast, seed=4, round=seed)
            merged = NguyenFlame(noise=0.01)(rows, torch.ones(n), now)
            assert_close(merged, torch.from_numpy(expected), rtol=1e-12, atol=1e-12)
            assert log.rejected == np.flatnonzero(~accepted).tolist()
            assert log.notes["clipped"] == (norms[accepted] > np.median(norms)).sum()


def test_distances_are_those_of_models():
    """The updates of a minority are opposite; beside a broadcast, it may be near."""
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, -0.1], [-1.0, 0.0]])
    for broadcast, dropped in (([0.0, 0.0], [3]), ([0.0, 10.0], [3]), ([2.0, 0.02], [2])):
        log = Log()
        now = context(rows, log, broadcast=torch.tensor(broadcast))
        NguyenFlame()(rows, torch.ones(4), now)
        assert log.rejected == dropped, broadcast


def test_wrong_broadcast_and_noise_are_refused():
    with pytest.raises(ValueError, match=r"`context.broadcast` .* NguyenFlame but got shape \[0\]"):
        NguyenFlame()(ROWS, torch.ones(5), RoundContext(clients=torch.arange(5)))
    with pytest.raises(ValueError, match="argument `noise` to be at least 0"):
        NguyenFlame(noise=-1.0)
