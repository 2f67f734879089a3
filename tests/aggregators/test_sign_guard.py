"""SignGuard against its paper, with a mean shift of the test's own, and by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tables import table_test
from torch.testing import assert_close

from pl_fed.aggregators import SignGuard
from pl_fed.aggregators.sign_guard import largest_cluster
from pl_fed.random import generator
from pl_fed.types import RoundContext


def context(n, **fields):
    return RoundContext(clients=torch.arange(n), **fields)


def make_uploads(attack, n=20, d=200, seed=0):
    """The first fifth is hostile; the others lean to a common direction."""
    draw = torch.Generator().manual_seed(seed)
    common = 0.8 * torch.randn(d, generator=draw, dtype=torch.float64) + 0.3
    rows = torch.randn(n, d, generator=draw, dtype=torch.float64) + common
    rows[:, ::7] = 0
    hostile, honest = rows[: n // 5], rows[n // 5 :]
    if attack == "opposite":
        hostile[:] = -honest.mean(0)
    elif attack == "a little is enough":
        hostile[:] = honest.mean(0) - 1.5 * honest.std(0)
    elif attack == "far":
        hostile[:] = 1e30 * hostile.sign()
    elif attack == "short":
        hostile *= 0.01
    elif attack == "noise":
        hostile[:] = 3 * torch.randn(hostile.shape, generator=draw, dtype=torch.float64)
    return rows


def find_modes(points, bandwidth):
    """Move points to the mean of their neighbours until they stop; return modes with counts."""
    modes = []
    for point in points:
        for _ in range(300):
            around = np.linalg.norm(points - point, axis=1) <= bandwidth
            before, point = point, points[around].mean(0)
            if np.linalg.norm(before - point) <= 1e-3 * bandwidth:
                break
        modes.append((int(around.sum()), tuple(point)))
    return sorted(set(modes), reverse=True)


def cluster_by_mean_shift(points):
    """The largest cluster of mean shift (Comaniciu and Meer) with a flat kernel."""
    n = len(points)
    between = np.sort(np.linalg.norm(points[:, None] - points, axis=2), axis=1)
    bandwidth = between[:, max(1, int(n * 0.5)) - 1].mean()
    centres = []
    for _, mode in find_modes(points, bandwidth):
        if all(np.linalg.norm(np.array(mode) - other) > bandwidth for other in centres):
            centres.append(np.array(mode))
    away = np.linalg.norm(points[:, None] - np.stack(centres), axis=2)
    label = np.where(away.min(1) <= bandwidth, away.argmin(1), -1)
    sizes = [(label == k).sum() for k in range(len(centres))]
    return label == int(np.argmax(sizes))


def paper_sign_guard(rows, coordinates, lower=0.1, upper=3.0, similarity=False):
    norms = np.linalg.norm(rows, axis=1)
    median = np.median(norms)
    columns = rows[:, coordinates]
    points = np.stack([(columns > 0).mean(1), (columns == 0).mean(1), (columns < 0).mean(1)], 1)
    if similarity:
        cosines = rows @ rows.T / np.outer(norms, norms)
        points = np.column_stack([points, np.median(cosines, axis=1)])
    inside = (lower * median <= norms) & (norms <= upper * median)
    passes = inside & cluster_by_mean_shift(points)
    clipped = rows * np.minimum(1, median / norms)[:, None]
    return clipped[passes].mean(0), passes


ATTACKS = ["none", "opposite", "a little is enough", "far", "short", "noise"]


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("similarity", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("n", [9, 20])
def test_results_equal_the_paper(attack, similarity, share, n):
    rows, notes = make_uploads(attack, n), {}
    now = context(n, seed=5, round=2, note=lambda word, number: notes.update({word: int(number)}))
    coordinates_drawn = torch.randperm(200, generator=generator(5, "signguard", 2))[
        : int(share * 200)
    ]
    expected, passes = paper_sign_guard(
        rows.numpy(), coordinates_drawn.numpy(), similarity=similarity
    )
    result = SignGuard(coordinates=share, similarity=similarity)(rows, torch.ones(n), now)
    assert_close(result, torch.from_numpy(expected), rtol=1e-10, atol=1e-12)
    norms = rows.norm(dim=1)
    assert notes["dropped"] == n - passes.sum()
    assert notes["clipped"] == int((torch.from_numpy(passes) & (norms > norms.quantile(0.5))).sum())


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["opposite", "a little is enough", "far", "short"])
@pytest.mark.parametrize("similarity", [False, True])
def test_forged_uploads_are_left_out(attack, similarity):
    rows = make_uploads(attack, d=4000)
    record = {}

    class Watched(SignGuard):
        def _find_largest_cluster(self, uploads, context):
            record["cluster"] = super()._find_largest_cluster(uploads, context)
            return record["cluster"]

    now, dropped = context(20), []
    now = replace(now, note=lambda word, n: dropped.append(int(n)) if word == "dropped" else None)
    Watched(similarity=similarity)(rows, torch.ones(20), now)
    if attack in ("opposite", "a little is enough"):
        assert not record["cluster"][:4].any()
    assert 4 <= dropped[0] <= 10


def test_result_equals_a_hand_computed_example():
    """Norms 1, 2, 2, 3, 30 and 0.1, median 2: the last two are out, and one other has odd signs."""
    rows = torch.tensor([[1.0, 0], [2, 0], [0, -2], [3, 0], [30, 0], [0.1, 0]])
    step = SignGuard(coordinates=1.0)
    notes = {}
    now = replace(context(6), note=lambda word, number: notes.update({word: int(number)}))
    merged = step(rows, torch.ones(6), now)
    assert merged.tolist() == pytest.approx([(1 + 2 + 2) / 3, 0.0])
    assert notes == {"dropped": 3, "clipped": 1}
    merged = SignGuard(lower=0.0, upper=20.0, coordinates=1.0)(rows, torch.ones(6), now)
    assert merged.tolist() == pytest.approx([(1 + 2 + 2 + 2 + 0.1) / 5, 0.0])


def test_no_accepted_upload_gives_a_zero_update():
    """Only the third has a norm that will do, and it alone has odd signs."""
    rows = torch.diag(torch.tensor([1.0, 2.0, -3.0, 4.0, 5.0]))
    step, notes = SignGuard(lower=1.0, upper=1.0, coordinates=1.0), {}
    now = replace(context(5), note=lambda word, number: notes.update({word: int(number)}))
    assert torch.equal(step(rows, torch.ones(5), now), torch.zeros(5))
    assert notes == {"dropped": 5, "clipped": 0}
    assert torch.equal(step(rows.abs(), torch.ones(5), now), rows.abs()[2])


@pytest.mark.slow
def test_no_result_is_longer_than_the_median():
    for seed in range(10):
        rows = make_uploads("noise", seed=seed)
        merged = SignGuard()(rows, torch.ones(20), context(20))
        assert merged.norm() <= rows.norm(dim=1).quantile(0.5)


@pytest.mark.slow
def test_the_coordinates_are_drawn_by_seed_and_round():
    rows = make_uploads("noise")
    results = {
        tuple(SignGuard()(rows, torch.ones(20), context(20, seed=s, round=r)).tolist())
        for s in range(4)
        for r in range(4)
    }
    again = SignGuard()(rows, torch.ones(20), context(20, seed=3, round=1))
    assert tuple(again.tolist()) in results
    assert len(results) > 8


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 5, 40])
@pytest.mark.parametrize("seed", range(5))
def test_clusters_equal_an_independent_mean_shift(n, seed):
    draw = np.random.default_rng(seed)
    points = draw.normal(size=(n, 3)) * 0.1 + draw.integers(0, 2, (n, 1))
    if n > 3:
        assert np.array_equal(largest_cluster(points), cluster_by_mean_shift(points))
    assert largest_cluster(points).sum() >= 1
    assert largest_cluster(np.zeros((n, 3))).all()


@pytest.mark.slow
@pytest.mark.parametrize("n", range(2, 30))
def test_uploads_with_equal_signs_form_one_cluster(n):
    """Shares of signs that are no round numbers: their distances are rounding, and not quite 0."""
    for positive, zeros in ((2, 0), (5, 1), (3, 2), (6, 3)):
        points = np.tile(np.array([positive, zeros, 7 - positive]) / 7, (n, 1))
        assert largest_cluster(points).all()
    uploads = torch.ones(n, 7)
    uploads[:, :2] = -1
    merged = SignGuard(coordinates=1.0)(uploads, torch.ones(n), context(n))
    assert_close(merged, uploads[0])


@table_test(
    ("arguments", "words"),
    [
        ({"lower": -0.1}, "`lower` and `upper` to be finite .* but got -0.1 and 3.0"),
        ({"lower": 2.0, "upper": 1.0}, "`lower` and `upper` .* but got 2.0 and 1.0"),
        ({"upper": float("inf")}, "`lower` and `upper` .* but got 0.1 and inf"),
        ({"coordinates": 0.0}, "`coordinates` to be above 0, and finite, but got 0.0"),
        ({"coordinates": 1.1}, "`coordinates` to be at most 1 but got 1.1"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=f"Expected arguments? {words}"):
        SignGuard(**arguments)
