"""RFLBAT against its steps in numpy with scikit-learn's k-means, and by hand."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from torch import nn
from torch.testing import assert_close

from pl_fed.aggregators import RFLBAT, Bucketing, Chain
from pl_fed.aggregators.rflbat import principal_components
from pl_fed.functional.aggregation import centred_gram_matrix
from pl_fed.nets.rows import RowLayout
from pl_fed.random import key
from pl_fed.types import RoundContext

ROWS = torch.tensor(
    [[1, 0, 0.1], [1.1, 0.1, 0], [0.9, -0.1, 0.1], [-2, 2, 0], [-2.1, 2.1, 0.1], [40, 40, 0]],
    dtype=torch.float64,
)


class Log:
    """The rejected clients of a round."""

    def __init__(self):
        self.rejected = []

    def reject(self, clients):
        self.rejected += clients.tolist()


def merge(rows, log=None, clients=None, **arguments):
    clients = torch.arange(len(rows)) if clients is None else clients
    now = RoundContext(clients=clients, reject=(log or Log()).reject, seed=3, round=5)
    return RFLBAT(**arguments)(rows, torch.ones(len(rows)), now)


def spread(points):
    return np.array([sum(np.linalg.norm(p - q) for q in points) for p in points])


def count_by_sklearn(points, largest=10, references=5):
    """The gap statistic, with the reference points that the aggregator draws."""
    draw = np.random.Generator(np.random.SFC64(key(3, "rflbat", 5) & (2**64 - 1)))
    low, high = points.min(0), points.max(0)
    sets = low + (high - low) * draw.random((references, *points.shape))
    gaps, errors = [], []
    for k in range(1, min(largest, len(points) - 1) + 1):
        own, *others = (
            KMeans(k, n_init=10, random_state=0).fit(s).inertia_ for s in (points, *sets)
        )
        gaps.append(np.log(np.mean(others)) - np.log(own))
        errors.append(np.std(np.log(others)) * np.sqrt(1 + 1 / references))
    for k in range(1, len(gaps)):
        if gaps[k - 1] - gaps[k] + errors[k] >= 0:
            return k
    return len(gaps)


def merge_by_sklearn(rows, first=10.0, second=4.0):
    points = PCA(2).fit_transform(rows)
    points *= np.where(points.max(0) < -points.min(0), -1, 1)
    total = spread(points)
    near = np.flatnonzero(total <= first * np.median(total))
    count = count_by_sklearn(points[near])
    labels = KMeans(count, n_init=10, random_state=0).fit(points[near]).labels_
    scores = {}
    for label in range(count):
        cluster = near[labels == label]
        unit = rows[cluster] / np.linalg.norm(rows[cluster], axis=1, keepdims=True)
        score = np.median((unit @ unit.T).mean(1)) if len(cluster) > 1 else 1.0
        scores[score] = cluster
    best = scores[min(scores)]
    total = spread(points[best])
    best = best[total <= second * np.median(total)]
    return rows[best].mean(0), best


def clustered_rows(seed):
    """Benign rows around one direction, and two groups of forged rows around others."""
    draw = torch.Generator().manual_seed(seed)
    centres = 6 * torch.randn(3, 8, generator=draw, dtype=torch.float64)
    group = torch.cat([torch.zeros(8), torch.ones(4), torch.full((3,), 2.0)]).long()
    noise = torch.randn(15, 8, generator=draw, dtype=torch.float64)
    noise *= torch.tensor([1.0, 0.2, 0.2])[group, None] * torch.rand(15, 1, generator=draw)
    return centres[group] + noise


def test_result_equals_the_hand_computed_example():
    log = Log()
    assert_close(merge(ROWS, log), ROWS[:3].mean(0), rtol=1e-12, atol=1e-12)
    assert log.rejected == [3, 4, 5]
    total = torch.cdist(*2 * [principal_components(centred_gram_matrix(ROWS))]).sum(1)
    expected = [63.499174, 63.558013, 63.732848, 67.602887, 68.025133, 280.883552]
    assert total.tolist() == pytest.approx(expected, abs=1e-6)


def test_components_equal_those_of_scikit_learn_up_to_signs():
    rows = clustered_rows(0)
    components = principal_components(centred_gram_matrix(rows))
    expected = torch.from_numpy(PCA(2).fit_transform(rows.numpy()))
    assert_close(components.abs(), expected.abs(), rtol=1e-9, atol=1e-9)


@pytest.mark.exhaustive
def test_result_equals_the_steps_by_scikit_learn():
    check_by_sklearn(range(5, 10))


@pytest.mark.slow
def test_results_of_two_inputs_equal_the_steps_by_scikit_learn():
    check_by_sklearn((5, 8))


def check_by_sklearn(seeds):
    """Compare results and rejected clients with those of scikit-learn."""
    sizes = set()
    for seed in seeds:
        rows, log = clustered_rows(seed), Log()
        expected, chosen = merge_by_sklearn(rows.numpy())
        assert_close(merge(rows, log), torch.from_numpy(expected), rtol=1e-9, atol=1e-9)
        assert log.rejected == sorted(set(range(15)) - set(chosen.tolist()))
        sizes.add(len(chosen))
    assert len(sizes) > 1, "the inputs should not have one answer"


def test_result_does_not_depend_on_the_order_of_rows():
    rows, draw = clustered_rows(1), torch.Generator().manual_seed(0)
    for _ in range(5):
        order = torch.randperm(15, generator=draw)
        assert_close(merge(rows[order], clients=order), merge(rows), rtol=1e-14, atol=1e-14)


def test_thresholds_leave_out_far_rows():
    rows = torch.cat([torch.eye(12).double(), torch.full((1, 12), 90.0).double()])
    log = Log()
    merge(rows, log, max_clusters=1, second_factor=1e9)
    assert log.rejected == [12]
    log = Log()
    merge(rows, log, first_factor=1e9, max_clusters=1, second_factor=1e9)
    assert log.rejected == []


@pytest.mark.parametrize("factor", ["first_factor", "second_factor"])
def test_result_is_0_if_a_factor_below_1_leaves_out_all_rows(factor):
    log, triangle = Log(), torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    assert merge(triangle, log, **{factor: 0.5}).tolist() == [0, 0]
    assert log.rejected == [0, 1, 2]


def test_few_and_equal_rows_stay():
    for n in (1, 2, 3, 9):
        for row in (torch.tensor([3.0, -1.0]), torch.zeros(2), torch.tensor([1e30, 1e30])):
            assert_close(merge(row.repeat(n, 1)), row)
    assert merge(torch.tensor([[1e30, 0], [1.0, 2.0], [0.0, 1.0], [2.0, 2.0]])).isfinite().all()


def test_larger_one_of_two_clusters_of_equal_uploads_wins():
    """Their cosines are 1 but for rounding."""
    second = torch.tensor([-0.5, 0.2, 0.7], dtype=torch.float64)
    for numbers in ([0.2, 0.4, 0.3], [0.3, 0.5, 0.3], [0.5, 0.2, 0.3], [0.7, 0.7, 0.3]):
        first = torch.tensor(numbers, dtype=torch.float64)
        assert_close(merge(torch.stack([first, first, second, second, second])), second)


def test_layers_choose_the_compared_coordinates():
    layout = RowLayout.from_parameters(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    rows = torch.zeros(6, 9, dtype=torch.float64)
    rows[:, 6:], rows[:, :3] = ROWS, ROWS.flip(0)
    now = RoundContext(clients=torch.arange(6), layout=layout)
    for layer, chosen in (("1", rows[:3]), ("0", rows[3:])):
        merged = RFLBAT(layers=[layer])(rows, torch.ones(6), now)
        assert_close(merged, chosen.mean(0), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"Expected argument `parts` to name some of 0\.weight"):
        RFLBAT(layers=["head"])(rows, torch.ones(6), now)
    with pytest.raises(ValueError, match=r"`context.layout` .* for RFLBAT, .* but got none"):
        RFLBAT(layers=["0"])(rows, torch.ones(6), RoundContext(clients=torch.arange(6)))


def test_broken_rows_are_refused_and_buckets_are_not():
    broken = ROWS.clone()
    broken[2, 1] = torch.nan
    with pytest.raises(ValueError, match=r"NaN or infinity in rows \[2\]"):
        merge(broken)
    now = RoundContext(clients=torch.arange(6))
    assert Chain([Bucketing()], RFLBAT())(ROWS, torch.ones(6), now).isfinite().all()
