"""Pre-aggregations: small numbers that can be checked by hand, and numpy from the papers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tables import table_test
from torch.testing import assert_close

from pl_fed.aggregators import (
    AdaptiveClipping,
    Bucketing,
    Clipping,
    NearestNeighborMixing,
    NormFilter,
)
from pl_fed.types import RoundContext


def context(n, byzantine=0, **fields):
    return RoundContext(
        num_byzantine=byzantine, clients=torch.arange(n), losses=torch.arange(float(n)), **fields
    )


def random_uploads(n, attack, d=57):
    """Return uploads; under an attack the first fifth is forged."""
    draw = torch.Generator().manual_seed(n)
    rows = torch.randn(n, d, generator=draw, dtype=torch.float64) + 0.5
    hostile = rows[: n // 5]
    if attack == "far":
        hostile[:] = 1e30 * hostile.sign()
    elif attack == "opposite":
        hostile[:] = -3 * rows[n // 5 :].mean(0)
    elif attack == "a little":
        hostile[:] = rows[n // 5 :].mean(0) - 0.8 * rows[n // 5 :].std(0)
    return rows


every_attack = pytest.mark.parametrize("attack", ["none", "far", "opposite", "a little"])


def prepare(step, uploads, now):
    return step(uploads, torch.ones(len(uploads)), now).uploads


# Nearest-neighbour mixing


def test_mixing_equals_a_hand_computed_example():
    """Of the three that are nearest to each: 0, 1, 3; 0, 1, 3; 1, 3, 0; 90, 3, 1."""
    uploads, now = torch.tensor([[0.0], [1.0], [3.0], [90.0]]), context(4, 1)
    expected = [4 / 3, 4 / 3, 4 / 3, 94 / 3]
    assert prepare(NearestNeighborMixing(), uploads, now).flatten().tolist() == pytest.approx(
        expected
    )


def test_mixing_with_one_neighbour_keeps_uploads_and_with_all_gives_the_mean():
    uploads = random_uploads(5, "none")
    assert torch.equal(prepare(NearestNeighborMixing(4), uploads, context(5)), uploads)
    mixed = prepare(NearestNeighborMixing(0), uploads, context(5, 3))
    assert_close(mixed, uploads.mean(0).expand(5, -1))


def test_mixing_breaks_ties_by_the_smallest_client_ids():
    uploads = torch.tensor([[0.0], [1.0], [-1.0]])
    for clients, expected in (([5, 2, 3], 0.5), ([5, 3, 2], -0.5)):
        now = replace(context(3, 1), clients=torch.tensor(clients))
        assert prepare(NearestNeighborMixing(), uploads, now)[0].tolist() == [expected]


def test_order_of_uploads_decides_no_tie_of_mixing():
    """Distances to the zero row are equal but for the last bits of clipped lengths."""
    uploads = torch.nn.functional.normalize(random_uploads(12, "none"))
    uploads[3] = 0
    mixed = prepare(NearestNeighborMixing(), uploads, context(12, 2))
    for seed in range(5):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        now = replace(context(12, 2), clients=order)
        assert_close(prepare(NearestNeighborMixing(), uploads[order], now), mixed[order])


@every_attack
@pytest.mark.parametrize(("n", "byzantine"), [(5, 1), (10, 2), (10, 7), (23, 4)])
def test_mixing_equals_numpy(attack, n, byzantine):
    rows = random_uploads(n, attack)
    expected = []
    for row in rows.numpy():
        near = ((rows.numpy() - row) ** 2).sum(1).argsort(kind="stable")[: n - byzantine]
        expected.append(rows.numpy()[near].mean(0))
    result = prepare(NearestNeighborMixing(byzantine), rows, context(n))
    assert_close(result, torch.from_numpy(np.stack(expected)), rtol=1e-10, atol=1e-10)


def test_mixing_reduces_the_scatter_of_benign_uploads():
    """Mixing removes more scatter than forged uploads add."""
    uploads = random_uploads(20, "opposite")
    honest, mixed = uploads[4:], prepare(NearestNeighborMixing(4), uploads, context(20))[4:]
    assert mixed.var(0).sum() < 0.2 * honest.var(0).sum()


@table_test("kind", [NearestNeighborMixing, AdaptiveClipping])
def test_more_byzantine_clients_than_uploads_are_an_error(kind):
    match = rf"at least 4 rows for {kind.__name__} but got 3: use a larger cohort"
    with pytest.raises(ValueError, match=match):
        prepare(kind(), torch.zeros(3, 2), context(3, 3))


# Bucketing


def test_buckets_equal_a_hand_computed_example():
    """Rows are powers of two, so the mean of a bucket identifies its members."""
    n, size = 7, 3
    uploads = 2.0 ** torch.arange(n)[:, None]
    weights = torch.arange(10, 10 + n)
    fields = {"start_losses": torch.arange(float(n)) ** 2, "seed": 4, "round": 2}
    now = replace(context(n, 2, **fields), clients=torch.tensor([31, 4, 9, 0, 77, 5, 3]))
    result = Bucketing(size)(uploads, weights, now)
    all_members = []
    for position, length in enumerate([3, 3, 1]):
        members = round(result.uploads[position].item() * length)
        bucket = [k for k in range(n) if members >> k & 1]
        all_members += bucket
        assert len(bucket) == length
        assert result.weights[position] == weights[bucket].sum()
        assert result.context.clients[position] == now.clients[bucket].min()
        assert result.context.losses[position] == pytest.approx(sum(bucket) / length)
        squares = sum(k**2 for k in bucket)
        assert result.context.start_losses[position] == pytest.approx(squares / length)
    assert sorted(all_members) == list(range(n))
    assert result.context.num_byzantine == 2


def test_buckets_are_drawn_by_seed_and_round():
    uploads = 2.0 ** torch.arange(12)[:, None]
    buckets = {
        (seed, round): tuple(
            prepare(Bucketing(2), uploads, replace(context(12), seed=seed, round=round))
            .flatten()
            .tolist()
        )
        for seed in range(4)
        for round in range(4)
    }
    assert len(set(buckets.values())) == 16
    again = prepare(Bucketing(2), uploads, replace(context(12), seed=3, round=1))
    assert tuple(again.flatten().tolist()) == buckets[3, 1]


@pytest.mark.slow
def test_any_two_clients_meet_equally_often():
    uploads, met = 2.0 ** torch.arange(6)[:, None].double(), torch.zeros(6, 6)
    for round in range(2000):
        for mean in (
            prepare(Bucketing(2), uploads, replace(context(6), round=round)).flatten().tolist()
        ):
            first, second = (k for k in range(6) if int(2 * mean) >> k & 1)
            met[first, second] += 1
    pairs = met[torch.ones(6, 6).triu(1).bool()]
    assert pairs.sum() == 6000
    assert (pairs - 400).abs().max() < 5 * (400 * 0.8) ** 0.5, "each of 15 pairs, one in five times"


def test_buckets_of_size_one_equal_the_uploads():
    uploads = random_uploads(6, "none")
    result = Bucketing(1)(uploads, torch.arange(6), context(6))
    assert torch.equal(result.uploads, uploads[result.context.clients])
    assert torch.equal(result.weights, result.context.clients)


# Clipping


def test_clipping_by_the_median_of_the_norms():
    uploads = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, -3.0], [20.0, 0.0]])
    result = prepare(Clipping(), uploads, context(4))  # the median of 1, 3, 5, 20 is 4
    expected = [[2.4, 3.2], [0.0, 1.0], [0.0, -3.0], [4.0, 0.0]]
    assert_close(result, torch.tensor(expected))


@pytest.mark.parametrize(
    ("n", "byzantine", "clipped"),
    [(10, 0, 0), (10, 1, 1), (10, 2, 3), (10, 3, 4), (10, 5, 5), (4, 1, 1), (7, 3, 3), (5, 4, 1)],
)
def test_adaptive_clipping_clips_the_number_of_uploads_in_the_paper(n, byzantine, clipped):
    """k = ⌊2 f (n − f) / n⌋ of norms 1, ..., n, to n − k."""
    uploads = torch.diag(torch.arange(1.0, n + 1))
    result = prepare(AdaptiveClipping(byzantine), uploads, context(n)).diagonal()
    assert_close(result, torch.arange(1.0, n + 1).clamp(max=n - clipped))


@every_attack
@pytest.mark.parametrize(("n", "byzantine"), [(5, 1), (10, 2), (10, 4), (23, 7)])
def test_adaptive_clipping_equals_numpy(attack, n, byzantine):
    rows = random_uploads(n, attack)
    norms = np.linalg.norm(rows.numpy(), axis=1)
    threshold = np.sort(norms)[::-1][int(np.floor(2 * byzantine * (n - byzantine) / n))]
    expected = rows.numpy() * np.minimum(1, threshold / norms)[:, None]
    result = prepare(AdaptiveClipping(), rows, context(n, byzantine))
    assert_close(result, torch.from_numpy(expected), rtol=1e-12, atol=0)


def test_no_upload_is_longer_than_the_longest_benign_upload():
    for n in range(3, 20):
        for byzantine in range(n // 2 + 1):
            uploads = torch.eye(n) * torch.arange(1.0, n + 1)
            uploads[:byzantine] *= 1e30
            result = prepare(AdaptiveClipping(), uploads, context(n, byzantine))
            assert result.norm(dim=1).max() <= n * (1 + 1e-6)


# The norm filter


def filter_by_norm(step, norms, byzantine=0):
    n = len(norms)
    result = step(torch.diag(torch.tensor(norms)), torch.arange(n), context(n, byzantine))
    return result.context.clients.tolist(), result


def test_norm_filter_leaves_out_long_uploads():
    norms = [1.0, 30.0, 2.0, 6.0, 6.5]  # their median is 6
    for step, remaining in (
        (NormFilter(multiple=1.0), [0, 2, 3]),
        (NormFilter(multiple=1.1), [0, 2, 3, 4]),
        (NormFilter(), [0, 2, 3, 4]),
        (NormFilter(multiple=5.0), [0, 1, 2, 3, 4]),
        (NormFilter(threshold=2.0), [0, 2]),
        (NormFilter(threshold=1.5, multiple=9.0), [0]),
    ):
        clients, result = filter_by_norm(step, norms)
        assert clients == remaining
        assert torch.equal(result.uploads, torch.diag(torch.tensor(norms))[remaining])
        assert result.weights.tolist() == remaining
        assert result.context.losses.tolist() == remaining


def test_uploads_left_out_count_as_byzantine():
    norms = [1.0, 30.0, 2.0, 60.0, 6.5]
    for expected, expected_byzantine in ((0, 0), (1, 0), (2, 0), (3, 1)):
        clients, result = filter_by_norm(NormFilter(), norms, expected)
        assert clients == [0, 2, 4]
        assert result.context.num_byzantine == expected_byzantine
    assert filter_by_norm(NormFilter(threshold=100.0), norms, 3)[1].context.num_byzantine == 3


def test_norm_filter_leaves_out_uploads_with_nan_or_infinity():
    uploads = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [1.0, 1.0], [0.0, -torch.inf], [2, 2]])
    result = NormFilter()(uploads, torch.ones(5), context(5))
    assert result.context.clients.tolist() == [0, 2, 4]


def test_error_without_remaining_uploads_names_the_shortest_norm():
    match = "norm of at most 0.5, because NormFilter .* but got 1 for the shortest of 2"
    with pytest.raises(ValueError, match=match):
        filter_by_norm(NormFilter(threshold=0.5), [1.0, 2.0])
    with pytest.raises(ValueError, match="for the shortest of 3"):
        filter_by_norm(NormFilter(), [torch.nan, torch.nan, 1.0])


@table_test(
    ("kind", "arguments", "error"),
    [
        (NearestNeighborMixing, {"num_byzantine": -1}, ValueError),
        (NearestNeighborMixing, {"num_byzantine": 1.0}, TypeError),
        (AdaptiveClipping, {"num_byzantine": -1}, ValueError),
        (Bucketing, {"bucket_size": 0}, ValueError),
        (Bucketing, {"bucket_size": 2.0}, TypeError),
        (Clipping, {"threshold": 0.0}, ValueError),
        (NormFilter, {"threshold": -1.0}, ValueError),
        (NormFilter, {"multiple": 0.99}, ValueError),
        (NormFilter, {"multiple": float("nan")}, ValueError),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(kind, arguments, error):
    ((name, value),) = arguments.items()
    with pytest.raises(error, match=rf"Expected argument `{name}` to be .* but got {value}\."):
        kind(**arguments)
