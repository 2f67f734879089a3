"""Tilted means against sums of exponentials in sixty digits, and what they tend to."""

import decimal
import math
from decimal import Decimal
from itertools import pairwise

import pytest
import torch
from exhaustive import exhaustive_but
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


def tilted_mean_in_decimals(values, tilt, weights):
    """Return the tilted mean and its gradient, computed without a shift or logsumexp."""
    total = sum(weights)
    if math.isinf(tilt):
        counted = [v for v, w in zip(values, weights) if w > 0]
        extreme_value = max(counted) if tilt > 0 else min(counted)
        is_extreme = [Decimal(v == extreme_value and w > 0) for v, w in zip(values, weights)]
        return extreme_value, [count / sum(is_extreme) for count in is_extreme]
    if abs(tilt) < 1e-30:
        return sum(v * w for v, w in zip(values, weights)) / total, [w / total for w in weights]
    powers = [w * (Decimal(tilt) * v).exp() for v, w in zip(values, weights)]
    return (sum(powers) / total).ln() / Decimal(tilt), [p / sum(powers) for p in powers]


def to_decimals(numbers):
    return [Decimal(number) for number in numbers]


def value_and_gradient(function, values):
    values = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    result = function(values)
    result.backward()
    return result.detach(), values.grad


def assert_near(actual, expected, rtol=1e-10):
    expected = torch.tensor([float(number) for number in expected], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-290)


@pytest.mark.slow
@quick
@given(losses, tilts, st.data())
def test_one_level_equals_decimal_arithmetic(values, tilt, data):
    size = len(values)
    weights = data.draw(st.lists(weight, min_size=size, max_size=size))
    weight_tensor = torch.tensor(weights, dtype=torch.float64)
    mean, gradient = value_and_gradient(lambda v: tilted_mean(v, tilt, weight_tensor), values)
    if not sum(weights):
        assert mean == 0
        assert not gradient.any()
        return
    expected, slopes = tilted_mean_in_decimals(to_decimals(values), tilt, to_decimals(weights))
    assert_near(mean[None], [expected])
    assert_near(gradient, slopes)


@pytest.mark.slow
@quick
@given(losses, tilts)
def test_weights_equal_the_gradient(values, tilt):
    _, slopes = tilted_mean_in_decimals(to_decimals(values), tilt, [Decimal(1)] * len(values))
    actual = tilted_weights(torch.tensor(values, dtype=torch.float64), tilt)
    if math.isinf(tilt) and len({round(v, 4) for v in values}) < len(values):
        return  # near ones share
    assert_near(actual, slopes)
    assert float(actual.sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.slow
@quick
@given(losses, tilts, tilts, st.data())
def test_two_levels_equal_decimal_arithmetic(values, tau, lam, data):
    """Class values are rounded to float64, and an error of theirs counts τ times in the weights."""
    size = len(values)
    classes = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    arguments = (torch.tensor(classes), 5, tau, lam, torch.tensor(mask))
    loss, gradient = value_and_gradient(lambda v: tilted_loss(v, *arguments), values)
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
    digits = to_decimals(values)
    within = {k: tilted_mean_in_decimals([digits[i] for i in own], lam, [Decimal(1)] * len(own))
              for k, own in members.items()}  # fmt: skip
    counts = [Decimal(len(own)) for own in members.values()]
    expected, slopes = tilted_mean_in_decimals([within[k][0] for k in members], tau, counts)
    assert_near(loss[None], [expected])
    by_class = [float(within[k][0]) for k in members]
    if (
        math.isinf(tau)
        and min([abs(a - b) for a in by_class for b in by_class if a != b] + [1.0]) < 1e-9
    ):
        return  # rounding decides between two nearly equal classes
    expected_gradient = [Decimal(0)] * size
    for slope, (k, own) in zip(slopes, members.items()):
        for i, share in zip(own, within[k][1]):
            expected_gradient[i] = slope * share
    finite = 0 if math.isinf(tau) else abs(tau)
    assert_near(gradient, expected_gradient, rtol=1e-10 + 4 * EPS * finite * max(values))


@pytest.mark.exhaustive
@pytest.mark.slow
@quick
@given(losses, tilts, st.data())
def test_two_levels_with_equal_tilts_equal_one_level(values, tilt, data):
    size = len(values)
    classes = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    two_levels, slopes = value_and_gradient(
        lambda v: tilted_loss(v, classes, 3, tilt, tilt, mask), values
    )
    one_level, expected = value_and_gradient(lambda v: tilted_mean(v, tilt, mask), values)
    torch.testing.assert_close(two_levels, one_level, rtol=1e-10, atol=1e-290)
    if math.isfinite(tilt):
        rtol = 1e-10 + 4 * EPS * abs(tilt) * max(values)
        torch.testing.assert_close(slopes, expected, rtol=rtol, atol=1e-290)


VALUES = torch.tensor([3.0, 0.5, 2.0, 0.0, 7.0], dtype=torch.float64)
CLASSES = torch.tensor([0, 1, 0, 2, 1])


def test_tilted_means_by_hand():
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
def test_small_tilts_converge_to_the_mean(dtype, size, sign):
    """To first order by t/2 times the variance."""
    values, tilt = VALUES.to(dtype), sign * size
    expected = values.mean() + tilt / 2 * values.var(correction=0)
    tolerance = max(size**2, 4 * torch.finfo(dtype).eps)
    assert abs(tilted_mean(values, tilt) - expected) < 10 * tolerance
    both = tilted_loss(values, CLASSES, 3, tilt, tilt)
    assert abs(both - expected) < 10 * tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tilt", [1e3, 1e20, 1e29, 1e31, 1e300])
def test_large_tilts_converge_to_the_extremes(dtype, tilt):
    values = VALUES.to(dtype)
    assert abs(tilted_mean(values, tilt) - 7) < 0.002
    assert abs(tilted_mean(values, -tilt)) < 0.002
    for edge in (math.inf, -math.inf):
        tilt = math.copysign(tilt, edge)
        for pair in ((tilt, edge), (edge, tilt), (0.0, tilt), (tilt, 0.0)):
            edges = [edge if t == tilt else t for t in pair]
            actual, limit = (tilted_loss(values, CLASSES, 3, *tilts) for tilts in (pair, edges))
            assert abs(actual - limit) < 0.005


def test_equal_largest_values_share_the_gradient():
    values = [2.0, 7.0, 7.0, 1.0]
    assert value_and_gradient(lambda v: tilted_mean(v, math.inf), values)[1].tolist() == [
        0,
        0.5,
        0.5,
        0,
    ]
    assert tilted_weights(torch.tensor(values), math.inf).tolist() == [0, 0.5, 0.5, 0]
    assert tilted_weights(torch.tensor(values), -math.inf).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("hidden", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tilt", [0.0, 3.0, -3.0, math.inf, -math.inf])
def test_masked_values_do_not_matter(hidden, tilt):
    values, mask = [1.0, hidden, 3.0, hidden], torch.tensor([True, False, True, False])
    classes = torch.tensor([0, 1, 1, 0])
    for masked, plain in (
        (lambda v: tilted_mean(v, tilt, mask), lambda v: tilted_mean(v, tilt)),
        (
            lambda v: tilted_loss(v, classes, 2, tilt, tilt, mask),
            lambda v: tilted_loss(v, torch.tensor([0, 1]), 2, tilt, tilt),
        ),
    ):
        value, gradient = value_and_gradient(masked, values)
        expected, slopes = value_and_gradient(plain, [1.0, 3.0])
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(gradient[mask], slopes)
        assert not gradient[~mask].any()


@pytest.mark.parametrize("tilt", [0.0, 3.0, -200.0, math.inf, -math.inf])
def test_empty_mask_gives_zero_loss_and_gradient(tilt):
    none = torch.zeros(5, dtype=torch.bool)
    for function in (
        lambda v: tilted_mean(v, tilt, none),
        lambda v: tilted_loss(v, CLASSES, 3, tilt, tilt, none),
        lambda v: tilted_loss(v, CLASSES, 3, tilt, -tilt, none),
        lambda v: tilted_loss(v, CLASSES + 3, 3, tilt, tilt),
    ):
        value, gradient = value_and_gradient(function, VALUES.tolist())
        assert value == 0
        assert not gradient.any()


@pytest.mark.slow
@quick
@given(losses, st.lists(tilts, min_size=2, max_size=6))
def test_a_larger_tilt_gives_no_smaller_mean(values, tilts):
    values = torch.tensor(values, dtype=torch.float64)
    means = [float(tilted_mean(values, tilt)) for tilt in sorted(tilts)]
    slack = 1e-12 * (1 + float(values.max()))
    assert all(a <= b + slack for a, b in pairwise(means))


@pytest.mark.parametrize("tilt", [1e-6, 0.5, -0.5, 200.0, -200.0])
def test_float32_equals_float64_up_to_rounding(tilt):
    for scale in (1.0, 1e4):
        wide = VALUES * scale / 7
        narrow = wide.float()
        actual, slopes = value_and_gradient(lambda v: tilted_mean(v.float(), tilt), narrow.tolist())
        expected, wanted = value_and_gradient(lambda v: tilted_mean(v, tilt), narrow.tolist())
        torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(slopes, wanted, rtol=1e-4, atol=1e-30)


def test_bfloat16_is_summed_in_float32():
    values = VALUES.bfloat16()
    assert tilted_mean(values, 3.0).dtype == torch.float32
    loss = tilted_loss(values, CLASSES, 3, 50.0, -2.0)
    torch.testing.assert_close(loss, tilted_loss(VALUES.float(), CLASSES, 3, 50.0, -2.0))


@pytest.mark.parametrize(("tau", "lam"), [(0.7, -1.3), (0.0, 2.0), (-1.0, 1e-4), (3.0, 3.0)])
def test_second_derivatives(tau, lam):
    values = VALUES.clone().requires_grad_()
    torch.autograd.gradgradcheck(lambda v: tilted_loss(v, CLASSES, 4, tau, lam), values)


PAIRS = [(0.0, 0.0), (2.0, -3.0), (math.inf, 1e-5), (-200.0, -math.inf)]


@exhaustive_but("2.0--3.0", "inf-1e-05")
@pytest.mark.slow
@pytest.mark.parametrize(("tau", "lam"), PAIRS)
def test_vmap_and_tracing_equal_a_loop_over_clients(tau, lam):
    draw = torch.Generator().manual_seed(0)
    values = 5 * torch.rand(4, 6, generator=draw, dtype=torch.float64)
    classes = torch.randint(3, (4, 6), generator=draw)
    mask = torch.rand(4, 6, generator=draw) < torch.tensor([[1.0], [0.7], [0.4], [0.0]])

    def client_loss(values, classes, mask):
        return tilted_loss(values, classes, 3, tau, lam, mask)

    both = torch.func.grad_and_value(client_loss)
    traced = make_fx(torch.vmap(both))(values.flip(0), classes, mask.flip(0))
    for actual in (torch.vmap(both)(values, classes, mask), traced(values, classes, mask)):
        for k in range(4):
            gradient, value = both(values[k], classes[k], mask[k])
            torch.testing.assert_close(actual[0][k], gradient)
            torch.testing.assert_close(actual[1][k], value)
