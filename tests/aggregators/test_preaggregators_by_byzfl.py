"""Pre-aggregations against an independent library."""

import numpy as np
import pytest
import torch
from byzfl_reference import byzfl
from test_preaggregators import context, prepare, random_uploads
from torch.testing import assert_close

from pl_fed.aggregators import AdaptiveClipping, Bucketing, Clipping, NearestNeighborMixing

attacked = pytest.mark.parametrize("attack", ["none", "far", "opposite", "a little"])
sized = pytest.mark.parametrize(("n", "byzantine"), [(5, 1), (11, 2), (16, 5), (23, 4)])


def check_equal(actual, expected):
    assert_close(actual, torch.from_numpy(np.asarray(expected)), rtol=1e-9, atol=1e-9)


@attacked
@sized
def test_mixing_equals_byzfl(attack, n, byzantine):
    rows = random_uploads(n, attack)
    expected = byzfl.NNM(byzantine)(rows.numpy().copy())
    check_equal(prepare(NearestNeighborMixing(byzantine), rows, context(n)), expected)


@attacked
@sized
def test_adaptive_clipping_equals_byzfl(attack, n, byzantine):
    """byzfl takes ⌊·⌋ of a product in floating point: of these numbers it gets the same."""
    rows = random_uploads(n, attack)
    expected = byzfl.ARC(byzantine)(rows.numpy().copy())
    check_equal(prepare(AdaptiveClipping(), rows, context(n, byzantine)), expected)


@attacked
@pytest.mark.parametrize("threshold", [0.5, 7.0, 1e3])
def test_clipping_equals_byzfl(attack, threshold):
    rows = random_uploads(11, attack)
    check_equal(
        prepare(Clipping(threshold), rows, context(11)),
        byzfl.Clipping(threshold)(rows.numpy().copy()),
    )


@pytest.mark.parametrize(("n", "size"), [(12, 3), (12, 1), (12, 12), (9, 2), (11, 4)])
def test_buckets_have_the_sizes_of_byzfl(n, size):
    """Permutations differ: chance alone decides the members of a bucket.

    Uploads are powers of two, so the mean of a bucket identifies its members.
    """
    powers = 2.0 ** torch.arange(n, dtype=torch.float64)[:, None]
    result = prepare(Bucketing(size), powers, context(n))
    reference = torch.from_numpy(byzfl.Bucketing(size)(powers.numpy().copy()))
    lengths = torch.tensor([size] * (n // size) + [n % size] * (n % size > 0))[:, None]
    assert result.shape == reference.shape
    for means in (result, reference):
        assert (means * lengths).sum().round() == 2**n - 1, "each client is in one bucket"
    for sums in ((result * lengths).flatten().tolist(), (reference * lengths).flatten().tolist()):
        assert [round(total).bit_count() for total in sums] == lengths.flatten().tolist()
