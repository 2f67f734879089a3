"""Tilted means against sums of exponentials in sixty digits, and what they tend to."""

import decimal
import math
from decimal import Decimal
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from pl_fed.functional.tilted import tilted_loss, tilted_mean, tilted_weights

decimal.getcontext().prec = 60
EPS = torch.finfo(torch.float64).eps
quick = settings(max_examples=150, deadline=None, derandomize=True, database=None)

numbers = st.just(0.0) | st.floats(1e-9, 5) | st.floats(5, 1e4)  # sixty digits see them all
losses = st.lists(numbers, min_size=1, max_size=9)
tilts = st.floats(-200, 200) | st.sampled_from(
    [0.0, 1e-8, -1e-8, 1e-3, 1.0, -1.0, 200.0, -200.0, math.inf, -math.inf, 5e-324, -1e-320]
)
weight = st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.5, 1e-3])


def exactly(values, tilt, weights):
    """The tilted mean of those that count, and its gradient: no shift, no logsumexp."""
    total = sum(weights)
    if math.isinf(tilt):
        counted = [v for v, w in zip(values, weights) if w > 0]
        most = max(counted) if tilt > 0 else min(counted)
        which = [Decimal(v == most and w > 0) for v, w in zip(values, weights)]
        return most, [each / sum(which) for each in which]
    if abs(tilt) < 1e-30:
        return sum(v * w for v, w in zip(values, weights)) / total, [w / total for w in weights]
    powers = [w * (Decimal(tilt) * v).exp() for v, w in zip(values, weights)]
    return (sum(powers) / total).ln() / Decimal(tilt), [p / sum(powers) for p in powers]


def in_digits(numbers):
    return [Decimal(each) for each in numbers]


def with_gradient(function, values):
    values = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    result = function(values)
    result.backward()
    return result.detach(), values.grad


def assert_near(found, expected, rtol=1e-10):
    expected = torch.tensor([float(each) for each in expected], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-290)


@pytest.mark.slow
@quick
@given(losses, tilts, st.data())
def test_one_level(values, tilt, data):
    size = len(values)
    weights = data.draw(st.lists(weight, min_size=size, max_size=size))
    kept = torch.tensor(weights, dtype=torch.float64)
    mean, gradient = with_gradient(lambda v: tilted_mean(v, tilt, kept), values)
    if not sum(weights):
        assert mean == 0
        assert not gradient.any()
        return
    expected, slopes = exactly(in_digits(values), tilt, in_digits(weights))
    assert_near(mean[None], [expected])
    assert_near(gradient, slopes)


@quick
@given(losses, tilts)
def test_the_weights_are_the_gradient(values, tilt):
    _, slopes = exactly(in_digits(values), tilt, [Decimal(1)] * len(values))
    found = tilted_weights(torch.tensor(values, dtype=torch.float64), tilt)
    if math.isinf(tilt) and len({round(v, 4) for v in values}) < len(values):
        return  # near ones share
    assert_near(found, slopes)
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)


@quick
@given(losses, tilts, tilts, st.data())
def test_two_levels(values, tau, lam, data):
    """Class values are rounded to float64, and an error of theirs counts τ times in the weights."""
    size = len(values)
    classes = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    given = (torch.tensor(classes), 5, tau, lam, torch.tensor(mask))
    loss, gradient = with_gradient(lambda v: tilted_loss(v, *given), values)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    members = {
        k: [i for i in range(size) if mask[i] and classes[i] == k]
        for k in {c for c, counts in zip(classes, mask) if counts}
    }
    if not members:
        assert loss == 0
        assert not gradient.any()
        return
    digits = in_digits(values)
    within = {k: exactly([digits[i] for i in own], lam, [Decimal(1)] * len(own))
              for k, own in members.items()}  # fmt: skip
    counts = [Decimal(len(own)) for own in members.values()]
    expected, slopes = exactly([within[k][0] for k in members], tau, counts)
    assert_near(loss[None], [expected])
    by_class = [float(within[k][0]) for k in members]
    if (
        math.isinf(tau)
        and min([abs(a - b) for a in by_class for b in by_class if a != b] + [1.0]) < 1e-9
    ):
        return  # which of two is larger is a matter of rounding
    whole = [Decimal(0)] * size
    for slope, (k, own) in zip(slopes, members.items()):
        for i, share in zip(own, within[k][1]):
            whole[i] = slope * share
    finite = 0 if math.isinf(tau) else abs(tau)
    assert_near(gradient, whole, rtol=1e-10 + 4 * EPS * finite * max(values))


@quick
@given(losses, tilts, st.data())
def test_equal_tilts_are_one_level(values, tilt, data):
    size = len(values)
    classes = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    two, slopes = with_gradient(lambda v: tilted_loss(v, classes, 3, tilt, tilt, mask), values)
    one, expected = with_gradient(lambda v: tilted_mean(v, tilt, mask), values)
    torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-290)
    if math.isfinite(tilt):
        rtol = 1e-10 + 4 * EPS * abs(tilt) * max(values)
        torch.testing.assert_close(slopes, expected, rtol=rtol, atol=1e-290)


VALUES = torch.tensor([3.0, 0.5, 2.0, 0.0, 7.0], dtype=torch.float64)
CLASSES = torch.tensor([0, 1, 0, 2, 1])


def test_by_hand():
    """Class values 2, 6 and 8, of two, one and one samples: log of 1, 3 and 4 to the base 2."""
    base = math.log(2)
    values = torch.tensor([0.0, 1.0, 3.0, 4.0], dtype=torch.float64)
    assert float(tilted_mean(values, base)) == pytest.approx(math.log2((1 + 2 + 8 + 16) / 4))
    classes = torch.tensor([0, 0, 1, 2])
    assert float(tilted_loss(values, classes, 3, 0.0, base)) == pytest.approx(
        (2 * math.log2(1.5) + 3 + 4) / 4
    )
    assert float(tilted_loss(values, classes, 3, base, 0.0)) == pytest.approx(
        math.log2((2 * 2**0.5 + 8 + 16) / 4)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1e-3, 1e-8, 1e-15, 1e-29, 1e-31, 1e-300])
@pytest.mark.parametrize("sign", [1, -1])
def test_small_tilts_go_over_into_the_mean(dtype, size, sign):
    """To first order by t/2 times the variance."""
    values, tilt = VALUES.to(dtype), sign * size
    expected = values.mean() + tilt / 2 * values.var(correction=0)
    tolerance = max(size**2, 4 * torch.finfo(dtype).eps)
    assert abs(tilted_mean(values, tilt) - expected) < 10 * tolerance
    both = tilted_loss(values, CLASSES, 3, tilt, tilt)
    assert abs(both - expected) < 10 * tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tilt", [1e3, 1e20, 1e29, 1e31, 1e300])
def test_large_tilts_go_over_into_the_extremes(dtype, tilt):
    values = VALUES.to(dtype)
    assert abs(tilted_mean(values, tilt) - 7) < 0.002
    assert abs(tilted_mean(values, -tilt)) < 0.002
    for edge in (math.inf, -math.inf):
        tilt = math.copysign(tilt, edge)
        for pair in ((tilt, edge), (edge, tilt), (0.0, tilt), (tilt, 0.0)):
            at = [edge if each == tilt else each for each in pair]
            found, limit = (tilted_loss(values, CLASSES, 3, *each) for each in (pair, at))
            assert abs(found - limit) < 0.005


def test_equal_largest_values_share_the_gradient():
    values = [2.0, 7.0, 7.0, 1.0]
    assert with_gradient(lambda v: tilted_mean(v, math.inf), values)[1].tolist() == [0, 0.5, 0.5, 0]
    assert tilted_weights(torch.tensor(values), math.inf).tolist() == [0, 0.5, 0.5, 0]
    assert tilted_weights(torch.tensor(values), -math.inf).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("hidden", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tilt", [0.0, 3.0, -3.0, math.inf, -math.inf])
def test_what_does_not_count_may_be_anything(hidden, tilt):
    values, mask = [1.0, hidden, 3.0, hidden], torch.tensor([True, False, True, False])
    classes = torch.tensor([0, 1, 1, 0])
    for found, plain in (
        (lambda v: tilted_mean(v, tilt, mask), lambda v: tilted_mean(v, tilt)),
        (
            lambda v: tilted_loss(v, classes, 2, tilt, tilt, mask),
            lambda v: tilted_loss(v, torch.tensor([0, 1]), 2, tilt, tilt),
        ),
    ):
        value, gradient = with_gradient(found, values)
        expected, slopes = with_gradient(plain, [1.0, 3.0])
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(gradient[mask], slopes)
        assert not gradient[~mask].any()


@pytest.mark.parametrize("tilt", [0.0, 3.0, -200.0, math.inf, -math.inf])
def test_nothing_counts_for_nothing(tilt):
    none = torch.zeros(5, dtype=torch.bool)
    for function in (
        lambda v: tilted_mean(v, tilt, none),
        lambda v: tilted_loss(v, CLASSES, 3, tilt, tilt, none),
        lambda v: tilted_loss(v, CLASSES, 3, tilt, -tilt, none),
        lambda v: tilted_loss(v, CLASSES + 3, 3, tilt, tilt),
    ):
        value, gradient = with_gradient(function, VALUES.tolist())
        assert value == 0
        assert not gradient.any()


@quick
@given(losses, st.lists(tilts, min_size=2, max_size=6))
def test_a_larger_tilt_gives_no_smaller_mean(values, tilts):
    values = torch.tensor(values, dtype=torch.float64)
    means = [float(tilted_mean(values, tilt)) for tilt in sorted(tilts)]
    slack = 1e-12 * (1 + float(values.max()))
    assert all(a <= b + slack for a, b in pairwise(means))


@pytest.mark.parametrize("tilt", [1e-6, 0.5, -0.5, 200.0, -200.0])
def test_float32_keeps_its_digits(tilt):
    for scale in (1.0, 1e4):
        wide = VALUES * scale / 7
        narrow = wide.float()
        found, slopes = with_gradient(lambda v: tilted_mean(v.float(), tilt), narrow.tolist())
        expected, wanted = with_gradient(lambda v: tilted_mean(v, tilt), narrow.tolist())
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(slopes, wanted, rtol=1e-4, atol=1e-30)


def test_bfloat16_is_summed_in_float32():
    values = VALUES.bfloat16()
    assert tilted_mean(values, 3.0).dtype == torch.float32
    loss = tilted_loss(values, CLASSES, 3, 50.0, -2.0)
    torch.testing.assert_close(loss, tilted_loss(VALUES.float(), CLASSES, 3, 50.0, -2.0))


@pytest.mark.parametrize(("tau", "lam"), [(0.7, -1.3), (0.0, 2.0), (-1.0, 1e-4), (3.0, 3.0)])
def test_gradients_of_gradients(tau, lam):
    values = VALUES.clone().requires_grad_()
    torch.autograd.gradgradcheck(lambda v: tilted_loss(v, CLASSES, 4, tau, lam), values)


PAIRS = [(0.0, 0.0), (2.0, -3.0), (math.inf, 1e-5), (-200.0, -math.inf)]


@pytest.mark.parametrize(("tau", "lam"), PAIRS)
def test_many_clients_at_once_and_traced(tau, lam):
    draw = torch.Generator().manual_seed(0)
    values = 5 * torch.rand(4, 6, generator=draw, dtype=torch.float64)
    classes = torch.randint(3, (4, 6), generator=draw)
    mask = torch.rand(4, 6, generator=draw) < torch.tensor([[1.0], [0.7], [0.4], [0.0]])

    def one(values, classes, mask):
        return tilted_loss(values, classes, 3, tau, lam, mask)

    both = torch.func.grad_and_value(one)
    traced = make_fx(torch.vmap(both))(values.flip(0), classes, mask.flip(0))
    for found in (torch.vmap(both)(values, classes, mask), traced(values, classes, mask)):
        for k in range(4):
            gradient, value = both(values[k], classes[k], mask[k])
            torch.testing.assert_close(found[0][k], gradient)
            torch.testing.assert_close(found[1][k], value)
