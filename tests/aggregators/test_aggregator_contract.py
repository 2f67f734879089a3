"""What every aggregator keeps to, over all that a walk through the package finds.

A new aggregator is covered before its author writes a test. One that cannot be made without
arguments, needs more uploads, or breaks a law on purpose is named in the three tables.
"""

import copy
import importlib
import inspect
import math
import pkgutil
from dataclasses import replace
from itertools import product

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slices import in_slices

import pl_fed.aggregators
from pl_fed.aggregators import (
    AdaptiveClipping,
    Aggregator,
    Bucketing,
    Clipping,
    FLTrust,
    Mean,
    Median,
    NearestNeighborMixing,
    NormFilter,
    TrimmedMean,
)
from pl_fed.types import RoundContext

ARGUMENTS = {
    "Bulyan": [{}, {"num_byzantine": 1}],
    "CenteredClipping": [{}, {"tau": 0.5, "num_steps": 3}],
    "Chain": [
        {"first": [Clipping()], "then": Mean()},
        {"first": [NormFilter(), NearestNeighborMixing()], "then": TrimmedMean()},
        {"first": [Bucketing()], "then": Median()},
        {"first": [AdaptiveClipping(), NearestNeighborMixing()], "then": FLTrust()},
        {"first": [], "then": Median()},
    ],
    "DnC": [{}, {"num_byzantine": 2}, {"num_byzantine": 1, "num_iterations": 3},
            {"num_byzantine": 2, "num_coordinates": None}],
    "FedMGDA": [{}, {"epsilon": 0.0}, {"epsilon": 1.0}],
    "GeometricMedian": [{}, {"num_steps": 3, "start": "zero"}, {"weighting": "samples"}],
    "KLoss": [{}, {"num_byzantine": 2}],
    "KNorm": [{}, {"num_byzantine": 2}],
    "Krum": [
        {},
        {"num_selected": 3},
        {"num_byzantine": 1},
        {"num_selected": None, "squared": False},
    ],
    "MDA": [{}, {"num_byzantine": 2}],
    "MeaMed": [{}, {"num_byzantine": 2}],
    "Mean": [{}, {"weighting": "samples"}],
    "SMEA": [{}, {"num_byzantine": 2}],
    "QFFL": [{}, {"q": 0.0}, {"q": 5.0, "lipschitz": 20.0}],
    "SignGuard": [{}, {"coordinates": 1.0}, {"coordinates": 1.0, "similarity": True}],
    "Term": [{}, {"t": 0.0}, {"t": -2.0}, {"t": math.inf}],
    "TiltedMean": [{}, {"q": 3.0}, {"q": -2.0, "steps": 3}, {"q": math.inf}],
    "TrimmedMean": [{}, {"num_trimmed": 2}],
}  # fmt: skip
SMALLEST = {  # name -> fewest uploads, where that is more than 1
    "Bulyan": 7,
    "DnC": 3,
    "KLoss": 3,
    "KNorm": 3,
    "Krum": 4,
    "MDA": 5,
    "MeaMed": 5,
    "SMEA": 5,
    "TrimmedMean": 5,
}
EXEMPT = {  # law -> names
    "permutation": set(),
    # the lengths or signs of uploads matter to them; or rounding decides which outlier is farther
    "translation": {
        *{"CenteredClipping", "Chain", "DnC", "FedMGDA", "FLTrust", "KNorm", "QFFL", "SignGuard"},
        *{"TiltedMean", "GeometricMedian"},  # which may start at 0
    },
    "scaling": {
        *{"CenteredClipping", "Chain", "DnC", "FedMGDA", "FLTrust", "GeometricMedian", "QFFL"},
        "SignGuard",
    },
    # the length of the result is their own
    "equality": {"CenteredClipping", "Chain", "FedMGDA", "FLTrust", "QFFL"},
    # it may be shorter than any upload
    "range": {"CenteredClipping", "Chain", "FedMGDA", "FLTrust", "QFFL", "SignGuard"},
}

TIES = {"Bulyan", "CAF", "KNorm", "Krum", "MDA", "MeaMed", "SMEA"}  # rounding decides among equals


def found():
    for entry in pkgutil.walk_packages(pl_fed.aggregators.__path__, "pl_fed.aggregators."):
        for name, member in vars(importlib.import_module(entry.name)).items():
            own = inspect.isclass(member) and member.__module__ == entry.name
            if own and issubclass(member, Aggregator) and not inspect.isabstract(member):
                for arguments in ARGUMENTS.get(name, [{}]):
                    yield pytest.param(member, arguments, id=f"{name}{list(arguments.values())}")


ALL = list(found())
every = pytest.mark.parametrize(("kind", "arguments"), ALL)


def lawful(law):
    params = [param for param in ALL if param.values[0].__name__ not in EXEMPT[law]]
    return pytest.mark.parametrize(("kind", "arguments"), params)


def context(uploads):
    n = len(uploads)
    return RoundContext(
        seed=1,
        clients=torch.arange(n),
        losses=torch.linspace(1.0, 2.0, n),
        start_losses=torch.linspace(3.0, 1.0, n, dtype=torch.float64),
        root=torch.linspace(-1.0, 2.0, uploads.shape[-1], dtype=torch.float64),
    )


def merge(aggregator, uploads, weights=None):
    n = len(uploads)
    weights = torch.arange(1, n + 1) if weights is None else weights
    return aggregator(uploads, weights, context(uploads))


def make(kind, arguments):
    return kind(**copy.deepcopy(arguments))


@st.composite
def rows(draw, dtype=np.float64, largest=100.0):
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 6)))
    width = 64 if dtype == np.float64 else 32
    numbers = st.floats(-largest, largest, width=width, allow_subnormal=False)
    return torch.from_numpy(draw(arrays.arrays(dtype, shape, elements=numbers)))


quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def enough(kind, uploads):
    """Repeat the rows until the aggregator has its fewest."""
    smallest = SMALLEST.get(kind.__name__, 1)
    return uploads.repeat(-(-smallest // len(uploads)), 1)


def without_ties(kind, uploads):
    """Take random rows of that shape instead, if equals would be told apart by rounding."""
    if kind.__name__ not in TIES:
        return uploads
    draw = torch.Generator().manual_seed(len(uploads))
    return torch.randn(uploads.shape, generator=draw, dtype=uploads.dtype)


def test_the_walk_finds_the_aggregators():
    assert {param.values[0].__name__ for param in ALL} >= {"Mean", "Median"}


@pytest.mark.slow
@lawful("permutation")
@quick
@given(uploads=rows(), seed=st.integers(0, 1000))
def test_the_order_of_the_uploads_does_not_matter(kind, arguments, uploads, seed):
    uploads = enough(kind, uploads)
    n = len(uploads)
    weights, now = torch.arange(1, n + 1), context(uploads)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    moved = now.select(order)
    torch.testing.assert_close(
        make(kind, arguments)(uploads[order], weights[order], moved),
        make(kind, arguments)(uploads, weights, now),
        rtol=1e-12,
        atol=1e-10,
    )


@pytest.mark.slow
@lawful("translation")
@quick
@given(uploads=rows(), shift=st.floats(-100, 100))
def test_a_shift_of_all_uploads_shifts_the_result(kind, arguments, uploads, shift):
    uploads = without_ties(kind, enough(kind, uploads))
    shifts = shift * torch.linspace(-1, 1, uploads.shape[1], dtype=uploads.dtype)
    torch.testing.assert_close(
        merge(make(kind, arguments), uploads + shifts),
        merge(make(kind, arguments), uploads) + shifts,
        rtol=1e-12,
        atol=1e-10,
    )


@pytest.mark.slow
@lawful("scaling")
@quick
@given(uploads=rows(), factor=st.floats(-100, 100))
def test_a_factor_on_all_uploads_is_a_factor_on_the_result(kind, arguments, uploads, factor):
    uploads = without_ties(kind, enough(kind, uploads))
    torch.testing.assert_close(
        merge(make(kind, arguments), uploads * factor),
        merge(make(kind, arguments), uploads) * factor,
        rtol=1e-12,
        atol=1e-9,
    )


@lawful("equality")
def test_equal_uploads_give_that_upload(kind, arguments):
    row = torch.tensor([0.1, -3.0, 0.0, 1e-20, 1e20])
    for num_uploads in (1, 2, 5, 8):
        uploads = enough(kind, row.repeat(num_uploads, 1))
        torch.testing.assert_close(merge(make(kind, arguments), uploads), row, rtol=1e-6, atol=0)


@pytest.mark.slow
@lawful("range")
@quick
@given(uploads=rows(np.float32), data=st.data())
def test_adversarial_uploads_cannot_leave_the_honest_range(kind, arguments, uploads, data):
    aggregator, uploads = make(kind, arguments), enough(kind, uploads)
    n, d = uploads.shape
    bad = data.draw(st.integers(0, aggregator.max_byzantine(n)), label="adversarial uploads")
    signs = data.draw(st.lists(st.sampled_from([-1e30, 1e30]), min_size=bad * d, max_size=bad * d))
    honest = uploads[bad:]
    attacked = torch.cat([torch.tensor(signs).reshape(bad, d), honest])
    place = torch.randperm(n, generator=torch.Generator().manual_seed(n * d))
    merged = merge(aggregator, attacked[place])
    assert merged.isfinite().all()
    slack = 1e-5 * honest.abs().max()
    assert (merged >= honest.amin(0) - slack).all()
    assert (merged <= honest.amax(0) + slack).all()


@every
def test_no_result_holds_nan_or_infinity(kind, arguments):
    a_row, a_number = slice(None), slice(2, 3)
    for bad, place in product([math.nan, math.inf, -math.inf], [a_row, a_number]):
        check_finite_result(make(kind, arguments), bad, place)


def check_finite_result(aggregator, bad, place):
    """Check that one upload of NaN or infinity is refused, or held within the honest range."""
    uploads = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    honest = uploads[1:].clone()
    uploads[0, place] = bad
    try:
        merged = merge(aggregator, uploads)
    except ValueError as error:
        said = str(error)
        assert said.startswith("Expected argument `uploads` to be finite")
        assert "rows [0]" in said
        assert aggregator.max_byzantine(9) == 0
    else:
        assert merged.isfinite().all()
        if aggregator.max_byzantine(9):
            assert (merged >= honest.amin(0)).all()
            assert (merged <= honest.amax(0)).all()


ATTACKS = {  # what adversarial rows may hold, given honest ones and random numbers
    "far and wide": lambda honest, noise: 1e30 * noise.sign(),
    "far together": lambda honest, noise: torch.full_like(noise, 1e30),
    "far along the mean": lambda honest, noise: -1e30 * honest.mean(0).expand_as(noise),
    "not so far": lambda honest, noise: 1e4 * noise,
    "of several lengths": lambda honest, noise: noise * 10.0 ** torch.arange(len(noise))[:, None],
}


@pytest.mark.slow
@every
def test_adversarial_uploads_within_the_breakdown_are_held_within_bounds(kind, arguments):
    smallest = SMALLEST.get(kind.__name__, 1)
    for attack, num_uploads, seed in product(ATTACKS, (5, 9, 12), range(3)):
        check_bound(make(kind, arguments), attack, max(num_uploads, smallest), seed)


def check_bound(aggregator, attack, n, seed):
    """Check that the merged row is not longer than n times the longest honest upload."""
    draw = torch.Generator().manual_seed(seed)
    bad = aggregator.breakdown(n)
    assert aggregator.max_byzantine(n) <= bad <= max(0, (n - 1) // 2)
    honest = torch.randn(n - bad, 20, generator=draw) + 1
    attacked = torch.cat([ATTACKS[attack](honest, torch.randn(bad, 20, generator=draw)), honest])
    place = torch.randperm(n, generator=draw)
    now = replace(context(attacked), num_byzantine=bad)
    merged = aggregator(attacked[place], torch.ones(n), now)
    assert merged.norm() <= n * honest.norm(dim=1).max(), (attack, n, seed)


@every
def test_the_breakdown_point_is_below_one_half(kind, arguments):
    for n in range(12):
        assert 0 <= make(kind, arguments).max_byzantine(n) <= max(0, (n - 1) // 2), n


@pytest.mark.slow
@every
@quick
@given(uploads=rows())
def test_the_input_is_not_changed_nor_kept(kind, arguments, uploads):
    uploads = enough(kind, uploads)
    weights = torch.arange(1, len(uploads) + 1)
    uploads_before, weights_before = uploads.clone(), weights.clone()
    merged = merge(make(kind, arguments), uploads, weights)
    merged.fill_(7e7)  # and the result is no view of the input
    assert torch.equal(uploads, uploads_before)
    assert torch.equal(weights, weights_before)


MERGED_IN = {  # dtype of the uploads -> dtype of the result
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


@every
def test_narrow_uploads_are_merged_in_float32(kind, arguments):
    for upload_type, result_type in MERGED_IN.items():
        uploads = torch.randn(9, 300, generator=torch.Generator().manual_seed(0)).to(upload_type)
        merged = merge(make(kind, arguments), uploads)
        assert merged.dtype == result_type, upload_type
        exact = merge(make(kind, arguments), uploads.double())
        torch.testing.assert_close(merged.double(), exact, rtol=1e-6, atol=1e-6)


@every
def test_nothing_to_merge_is_an_error_that_says_what_came(kind, arguments):
    shapes = {(0, 4): "0", (3,): r"shape \[3\]", (2, 2, 2): r"shape \[2, 2, 2\]"}
    for shape, got in shapes.items():
        aggregator, uploads = make(kind, arguments), torch.zeros(shape)
        with pytest.raises(ValueError, match=rf"Expected argument `uploads` .* but got {got}[:.]"):
            aggregator(uploads, torch.ones(shape[0]), context(uploads))


@lawful("equality")
def test_one_upload_gives_itself_where_one_is_enough(kind, arguments):
    if SMALLEST.get(kind.__name__, 1) > 1:
        pytest.skip("needs more than one upload")
    upload = torch.tensor([[1.5, -2.0, 0.0]])
    assert torch.equal(merge(make(kind, arguments), upload), upload[0])


@every
def test_short_rows(kind, arguments):
    for d in (0, 1):
        assert merge(make(kind, arguments), enough(kind, torch.ones(3, d))).shape == (d,)


@every
def test_a_restored_memory_goes_on_alike(kind, arguments, tmp_path):
    def uploads(round_number):
        draws = torch.Generator().manual_seed(round_number)
        return torch.randn(max(7, SMALLEST.get(kind.__name__, 1)), 5, generator=draws)

    running = make(kind, arguments)
    for round_number in range(3):
        merge(running, uploads(round_number))
    torch.save(running.state_dict(), tmp_path / "memory.pt")
    restored = make(kind, arguments)
    restored.load_state_dict(torch.load(tmp_path / "memory.pt", weights_only=True))
    assert torch.equal(merge(restored, uploads(3)), merge(running, uploads(3)))


def merge_slices(kind, arguments, uploads, cuts, order):
    """Merge slices of the coordinates in threads, each with its own aggregator."""
    weights = torch.arange(1, len(uploads) + 1)[order]

    def merge_slice(piece, now):
        return make(kind, arguments)(piece, weights, now)

    return torch.cat(in_slices(merge_slice, uploads[order], context(uploads).select(order), cuts))


SHARDS = [param for param in ALL if make(*param.values).shards]


@pytest.mark.parametrize(("kind", "arguments"), SHARDS)
def test_slices_of_the_coordinates_are_merged_alike(kind, arguments):
    draw = torch.Generator().manual_seed(0)
    uploads = torch.randn(9, 300, generator=draw, dtype=torch.float64)
    order = torch.randperm(9, generator=draw)
    expected = merge(make(kind, arguments), uploads)
    for cuts in ((100,), (1, 7, 250), (299, 300)):
        merged = merge_slices(kind, arguments, uploads, cuts, order)
        torch.testing.assert_close(merged, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@every
@quick
@given(uploads=rows(), cut=st.integers(1, 8))
def test_parts_are_merged_by_their_mass(kind, arguments, uploads, cut):
    aggregator, weights = make(kind, arguments), torch.arange(1, len(uploads) + 1)
    if aggregator.mass(weights) is None or cut >= len(uploads):
        return
    parts = [(uploads[:cut], weights[:cut]), (uploads[cut:], weights[cut:])]
    merged = sum(aggregator.mass(own) * merge(aggregator, part, own) for part, own in parts)
    expected = merge(aggregator, uploads, weights)
    torch.testing.assert_close(merged / aggregator.mass(weights), expected, rtol=1e-12, atol=1e-10)


def test_there_is_something_to_merge_in_slices_and_in_parts():
    assert {param.values[0].__name__ for param in SHARDS} >= {"Krum", "Median", "TrimmedMean"}
    assert make(pl_fed.aggregators.Mean, {}).mass(torch.tensor([2, 5])) == 2
    assert make(pl_fed.aggregators.Mean, {"weighting": "samples"}).mass(torch.tensor([2, 5])) == 7
