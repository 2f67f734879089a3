"""Laws that every aggregator keeps; a walk through the package finds the aggregators.

The suite covers a new aggregator before its author writes a test. Three tables name the aggregators
that need arguments, that need more uploads, or that break a law on purpose.
"""

import copy
import io
import math
from dataclasses import replace
from itertools import product

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from contract_suite import find_configurations, one_test
from group_counts import make_group_counts
from hypothesis import given, settings
from hypothesis import strategies as st
from slices import in_slices
from torch.nn.functional import linear
from torch.testing import assert_close

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
from pl_fed.nets.rows import RowLayout
from pl_fed.types import RoundContext


class EqualWeights(torch.nn.Module):
    """A method of torchjd's kind: the mean."""

    def forward(self, products):
        return torch.full((len(products),), 1 / len(products))


class LengthWeights(torch.nn.Module):
    """A method of torchjd's kind: weights by length, and negative ones for conflicts."""

    def forward(self, products):
        return (products.diagonal() + products.sum(1)) / len(products) ** 2


READ_SENT_PARTS = [  # rows or models in which parts that clients keep to themselves do not count
    ("AlignIns", lambda: pl_fed.aggregators.AlignIns()),
    ("LASA", lambda: pl_fed.aggregators.LASA()),
    ("LASA, sparse", lambda: pl_fed.aggregators.LASA(sparsity=0.6, mean="sparse")),
    ("NguyenFlame", lambda: pl_fed.aggregators.NguyenFlame(noise=0.0)),
    ("FreqFed", lambda: pl_fed.aggregators.FreqFed()),
    ("FreqFed, row", lambda: pl_fed.aggregators.FreqFed("row")),
    ("CRFL", lambda: pl_fed.aggregators.CRFL(start=0.5, std=0.0)),
    ("SignGuard", lambda: pl_fed.aggregators.SignGuard(coordinates=1.0, similarity=True)),
    ("SignGuard, drawn", lambda: pl_fed.aggregators.SignGuard(coordinates=0.3)),
    ("DnC, drawn", lambda: pl_fed.aggregators.DnC(num_coordinates=8, num_byzantine=2)),
]


@pytest.mark.parametrize(("name", "make"), READ_SENT_PARTS, ids=[n for n, _ in READ_SENT_PARTS])
def test_parameters_that_clients_keep_do_not_count(name, make):
    """The merged body, and the rejected clients, are those of a net without the head."""
    shapes = {"body.weight": (3, 4), "head.weight": (4, 3), "head.bias": (4,), "tail.bias": (3,)}
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    layout = RowLayout.from_tensors(tensors.items())
    body = RowLayout.from_tensors([(n, t) for n, t in tensors.items() if "head" not in n])
    unsent, sent = (layout.positions(*names) for names in (["head"], body.names))
    draw, outcomes = torch.Generator().manual_seed(28), []  # the head matters to all of them
    rows = torch.randn(7, layout.numel, generator=draw, dtype=torch.float64)
    broadcast = torch.randn(layout.numel, generator=draw, dtype=torch.float64)
    rows[:, unsent] = 0
    whole = {"layout": layout, "broadcast": broadcast}
    for uploads, facts in (
        (rows, {**whole, "unsent": unsent}),
        (rows[:, sent], {"layout": body, "broadcast": broadcast[sent]}),
        (rows, whole),
    ):
        rejected = []
        context = RoundContext(clients=torch.arange(7), reject=rejected.append, **facts)
        merged = make()(uploads, torch.ones(7), context)
        merged = merged[sent] if len(merged) == layout.numel else merged
        outcomes.append((merged, [ids.tolist() for ids in rejected]))
    (merged, rejected), (expected, expected_rejected), (other, other_rejected) = outcomes
    assert_close(merged, expected, rtol=0, atol=1e-12)
    assert rejected == expected_rejected
    assert rejected != other_rejected or not torch.allclose(merged, other)


ARGUMENTS = {
    "AAggFF": [{}, {"setting": "cross_device"}, {"response": "normal"}],
    "AFL": [{}, {"lr": 0.0}, {"lr": 1.0, "merge": "after"}],
    "AdaFed": [{}, {"gamma": 0.0}, {"gamma": 3.0}],
    "AlignIns": [{}, {"top": 1.0, "weighting": "samples"}, {"cosine_radius": 3.0}],
    "Bulyan": [{}, {"num_byzantine": 1}],
    "CRFL": [{}, {"std": 0.0, "aggregator": Median()}, {"start": 0.1, "growth": 0.0}],
    "CenteredClipping": [{}, {"tau": 0.5, "num_steps": 3}],
    "Chain": [
        {"first": [Clipping()], "then": Mean()},
        {"first": [NormFilter(), NearestNeighborMixing()], "then": TrimmedMean()},
        {"first": [Bucketing()], "then": Median()},
        {"first": [AdaptiveClipping(), NearestNeighborMixing()], "then": FLTrust()},
        {"first": [], "then": Median()},
    ],
    "DeepSight": [{"num_inputs": 20}, {"num_inputs": 5, "num_sets": 1, "min_cluster_size": 2}],
    "DnC": [{}, {"num_byzantine": 2}, {"num_byzantine": 1, "num_iterations": 3},
            {"num_byzantine": 2, "num_coordinates": None}],
    "FairFed": [{}, {"beta": 0.0}, {"metric": "demographic_parity", "positive": 0}],
    "FedFV": [{}, {"alpha": 0.0, "tau": 0}, {"alpha": 0.5, "tau": 3}],
    "FedMGDA": [{}, {"epsilon": 0.0}, {"epsilon": 1.0}],
    "FLDetector": [{}, {"window": 1, "then": Mean()}, {"window": 1, "restart": True}],
    "FoolsGold": [{}, {"output_share": 0.5}, {"divisor": "none"}, {"divisor": "clients"}],
    "FreqFed": [{}, {"transform": "row"}],
    "GeometricMedian": [{}, {"num_steps": 3, "start": "zero"}, {"weighting": "samples"}],
    "KLoss": [{}, {"num_byzantine": 2}],
    "KNorm": [{}, {"num_byzantine": 2}],
    "Krum": [
        {},
        {"num_selected": 3},
        {"num_byzantine": 1},
        {"num_selected": None, "squared": False},
    ],
    "LASA": [{}, {"sparsity": 0.0, "norm_radius": 2.0}, {"sparsity": 0.9, "mean": "sparse"}],
    "MDA": [{}, {"num_byzantine": 2}],
    "MeaMed": [{}, {"num_byzantine": 2}],
    "Mean": [{}, {"weighting": "samples"}],
    "NguyenFlame": [{}, {"noise": 0.0}],
    "RobustLearningRate": [{}, {"statistic": "median"}, {"statistic": "sign"},
                           {"threshold": 1, "weighting": "samples"}],
    "SMEA": [{}, {"num_byzantine": 2}],
    "QFFL": [{}, {"q": 0.0}, {"q": 5.0, "lipschitz": 20.0}],
    "RFLBAT": [{}, {"first_factor": 2.0, "max_clusters": 3}, {"layers": ["weight"]}],
    "SignGuard": [{}, {"coordinates": 1.0}, {"coordinates": 1.0, "similarity": True}],
    "Term": [{}, {"t": 0.0}, {"t": -2.0}, {"t": math.inf}],
    "TiltedMean": [{}, {"q": 3.0}, {"q": -2.0, "steps": 3}, {"q": math.inf}],
    "TorchJD": [{"method": EqualWeights()}, {"method": LengthWeights()}],
    "TrimmedMean": [{}, {"num_trimmed": 2}],
    "WeakDP": [{}, {"max_norm": None, "std": 0.0, "aggregator": Median()},
               {"max_norm": 1.0, "std": 0.1, "aggregator": Mean("samples")}],
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
    # they depend on the lengths or signs of uploads; or rounding decides which outlier is farther;
    # GeometricMedian and TiltedMean may start at 0
    "translation": {
        "AdaFed",
        "AlignIns",
        "CenteredClipping",
        "Chain",
        "CRFL",
        "DeepSight",
        "DnC",
        "FedFV",
        "FedMGDA",
        "FLTrust",
        "FoolsGold",
        "FreqFed",
        "GeometricMedian",
        "KNorm",
        "LASA",
        "NguyenFlame",
        "QFFL",
        "RFLBAT",
        "RobustLearningRate",
        "SignGuard",
        "TiltedMean",
        "TorchJD",
        "WeakDP",
    },
    "scaling": {
        "AdaFed",
        "CenteredClipping",
        "Chain",
        "CRFL",
        "DeepSight",
        "DnC",
        "FedFV",  # products of uploads of 1e-161 underflow, and with them a conflict
        "FedMGDA",
        "FLTrust",
        "FoolsGold",
        "FreqFed",
        "GeometricMedian",
        "NguyenFlame",
        "QFFL",
        "RobustLearningRate",
        "SignGuard",
        "TorchJD",
        "WeakDP",
    },
    # they choose the length of the result
    "equality": {
        "AdaFed",
        "CenteredClipping",
        "Chain",
        "CRFL",
        "FedMGDA",
        "FLTrust",
        "FoolsGold",
        "LASA",
        "NguyenFlame",
        "QFFL",
        "RobustLearningRate",
        "TorchJD",
        "WeakDP",
    },
    # their result may be shorter than any upload, or point backwards
    "range": {
        "AdaFed",
        "AlignIns",
        "CenteredClipping",
        "Chain",
        "CRFL",
        "DeepSight",
        "FedFV",
        "FedMGDA",
        "FLTrust",
        "FoolsGold",
        "LASA",
        "NguyenFlame",
        "QFFL",
        "RobustLearningRate",
        "SignGuard",
        "TorchJD",
        "WeakDP",
    },
}

TIES = {  # rounding decides among equals
    *{"Bulyan", "CAF", "KNorm", "Krum", "MDA", "MeaMed", "RFLBAT", "SMEA"},
}


CONFIGURATIONS = find_configurations(pl_fed.aggregators, Aggregator, ARGUMENTS)
all_aggregators = one_test(CONFIGURATIONS)


def without_exempt(law):
    """Return a decorator for a test of the aggregators that keep a law."""
    return one_test([pair for pair in CONFIGURATIONS if pair[0].__name__ not in EXEMPT[law]])


MOST_BYZANTINE, MOST_NUMBERS = 9, 6  # of any example


def output_layout(d):
    """Return the layout of a linear layer of d parameters with up to √d outputs."""
    outputs = max((k for k in range(1, d + 1) if d % k == 0 and k * k <= d), default=0)
    shapes = (
        torch.Size([outputs, d // max(1, outputs) - 1 if outputs else 0]),
        torch.Size([outputs]),
    )
    return RowLayout(("weight", "bias"), shapes, (0, d - outputs, d))


def context(uploads):
    n, layout = len(uploads), output_layout(uploads.shape[-1])
    broadcast = torch.linspace(2.0, -1.0, uploads.shape[-1], dtype=torch.float64)

    def net(update=None):
        views = layout.views(broadcast if update is None else broadcast + update)
        return lambda inputs: linear(inputs.double(), views["weight"], views["bias"])

    return RoundContext(
        net=net,
        inputs=torch.empty(0, layout.shapes[0][1]),
        layout=layout,
        seed=1,
        clients=torch.arange(n),
        losses=torch.linspace(1.0, 2.0, n),
        start_losses=torch.linspace(3.0, 1.0, n, dtype=torch.float64),
        group_counts=make_group_counts(n),
        broadcast=broadcast,
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


quick = settings(max_examples=20, deadline=None, derandomize=True, database=None)
few = settings(quick, max_examples=8)


def repeat_rows(kind, uploads):
    """Repeat the rows until there are as many as the aggregator needs."""
    smallest = SMALLEST.get(kind.__name__, 1)
    return uploads.repeat(-(-smallest // len(uploads)), 1)


def without_ties(kind, uploads):
    """Return random rows of that shape instead, if rounding would decide among equal rows."""
    if kind.__name__ not in TIES:
        return uploads
    draw = torch.Generator().manual_seed(len(uploads))
    return torch.randn(uploads.shape, generator=draw, dtype=uploads.dtype)


def test_walk_finds_the_aggregators():
    assert {kind.__name__ for kind, _ in CONFIGURATIONS} >= {"Mean", "Median"}


@pytest.mark.exhaustive
@pytest.mark.slow
@quick
@given(uploads=rows(), seed=st.integers(0, 1000))
@all_aggregators
def test_result_does_not_depend_on_the_order_of_uploads_and_input_is_neither_changed_nor_returned(
    kind, arguments, uploads, seed
):
    check_order_and_input(kind, arguments, uploads, seed)


@pytest.mark.slow
@few
@given(uploads=rows(), seed=st.integers(0, 1000))
@all_aggregators
def test_order_of_few_draws_does_not_matter_and_input_stays(kind, arguments, uploads, seed):
    check_order_and_input(kind, arguments, uploads, seed)


def check_order_and_input(kind, arguments, uploads, seed):
    """Check that the result follows the clients, and that uploads and weights stay unchanged."""
    uploads = repeat_rows(kind, uploads)
    n = len(uploads)
    weights, round_context = torch.arange(1, n + 1), context(uploads)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    permuted = make(kind, arguments)(uploads[order], weights[order], round_context.select(order))
    before = uploads.clone(), weights.clone()
    merged = make(kind, arguments)(uploads, weights, round_context)
    assert_close(permuted, merged, rtol=1e-12, atol=1e-10)
    merged.fill_(7e7)  # and the result is no view of the input
    assert torch.equal(uploads, before[0])
    assert torch.equal(weights, before[1])


@pytest.mark.exhaustive
@pytest.mark.slow
@quick
@given(uploads=rows(), shift=st.floats(-100, 100))
@without_exempt("translation")
def test_shift_of_all_uploads_shifts_the_result(kind, arguments, uploads, shift):
    check_shift(kind, arguments, uploads, shift)


@pytest.mark.slow
@few
@given(uploads=rows(), shift=st.floats(-100, 100))
@without_exempt("translation")
def test_shift_of_few_draws_shifts_the_result(kind, arguments, uploads, shift):
    check_shift(kind, arguments, uploads, shift)


def check_shift(kind, arguments, uploads, shift):
    """Check that the result moves with all uploads."""
    uploads = without_ties(kind, repeat_rows(kind, uploads))
    shifts = shift * torch.linspace(-1, 1, uploads.shape[1], dtype=uploads.dtype)
    assert_close(
        merge(make(kind, arguments), uploads + shifts),
        merge(make(kind, arguments), uploads) + shifts,
        rtol=1e-12,
        atol=1e-10,
    )


@pytest.mark.exhaustive
@pytest.mark.slow
@quick
@given(uploads=rows(), factor=st.floats(-100, 100))
@without_exempt("scaling")
def test_factor_on_all_uploads_is_a_factor_on_the_result(kind, arguments, uploads, factor):
    check_factor(kind, arguments, uploads, factor)


@pytest.mark.slow
@few
@given(uploads=rows(), factor=st.floats(-100, 100))
@without_exempt("scaling")
def test_factor_on_few_draws_is_a_factor_on_the_result(kind, arguments, uploads, factor):
    check_factor(kind, arguments, uploads, factor)


def check_factor(kind, arguments, uploads, factor):
    """Check that the result grows with all uploads."""
    uploads = without_ties(kind, repeat_rows(kind, uploads))
    assert_close(
        merge(make(kind, arguments), uploads * factor),
        merge(make(kind, arguments), uploads) * factor,
        rtol=1e-12,
        atol=1e-9,
    )


@without_exempt("equality")
@pytest.mark.slow
def test_result_of_equal_uploads_is_that_upload(kind, arguments):
    row = torch.tensor([0.1, -3.0, 0.0, 1e-20, 1e20])
    for num_uploads in (1, 2, 5, 8):
        uploads = repeat_rows(kind, row.repeat(num_uploads, 1))
        assert_close(merge(make(kind, arguments), uploads), row, rtol=1e-6, atol=0)


forged_rows = given(
    uploads=rows(np.float32),
    num_byzantine=st.integers(0, MOST_BYZANTINE),
    signs=arrays.arrays(np.bool_, (MOST_BYZANTINE, MOST_NUMBERS)),
)


@pytest.mark.exhaustive
@pytest.mark.slow
@quick
@forged_rows
@without_exempt("range")
def test_result_stays_in_the_range_of_benign_uploads(
    kind, arguments, uploads, num_byzantine, signs
):
    check_range(kind, arguments, uploads, num_byzantine, signs)


@pytest.mark.slow
@few
@forged_rows
@without_exempt("range")
def test_result_stays_in_the_range_of_few_draws(kind, arguments, uploads, num_byzantine, signs):
    check_range(kind, arguments, uploads, num_byzantine, signs)


def check_range(kind, arguments, uploads, num_byzantine, signs):
    """Check that no forged upload takes the result out of the range of the benign ones."""
    aggregator, uploads = make(kind, arguments), repeat_rows(kind, uploads)
    n, d = uploads.shape
    assert aggregator.max_byzantine(n) <= MOST_BYZANTINE
    for bad in {num_byzantine % (aggregator.max_byzantine(n) + 1), aggregator.max_byzantine(n)}:
        benign = uploads[bad:]
        forged = torch.from_numpy(np.where(signs, 1e30, -1e30).astype("f"))[:bad, :d]
        place = torch.randperm(n, generator=torch.Generator().manual_seed(n * d))
        merged = merge(aggregator, torch.cat([forged, benign])[place])
        assert merged.isfinite().all()
        slack = 1e-5 * benign.abs().max()
        assert (merged >= benign.amin(0) - slack).all()
        assert (merged <= benign.amax(0) + slack).all()


@all_aggregators
@pytest.mark.slow
def test_no_result_holds_nan_or_infinity(kind, arguments):
    row, number = slice(None), slice(2, 3)
    for value, place in product([math.nan, math.inf, -math.inf], [row, number]):
        check_finite_result(make(kind, arguments), value, place)


def check_finite_result(aggregator, value, place):
    """Check that an upload of NaN or infinity is refused, or held within the benign range."""
    uploads = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    benign = uploads[1:].clone()
    uploads[0, place] = value
    try:
        merged = merge(aggregator, uploads)
    except ValueError as error:
        message = str(error)
        assert message.startswith("Expected argument `uploads` to be finite")
        assert "rows [0]" in message
        assert aggregator.max_byzantine(9) == 0
    else:
        assert merged.isfinite().all()
        if aggregator.max_byzantine(9):
            assert (merged >= benign.amin(0)).all()
            assert (merged <= benign.amax(0)).all()


FORGED = {  # forged uploads as functions of benign uploads and random numbers
    "far and wide": lambda benign, noise: 1e30 * noise.sign(),
    "far together": lambda benign, noise: torch.full_like(noise, 1e30),
    "far along the mean": lambda benign, noise: -1e30 * benign.mean(0).expand_as(noise),
    "not so far": lambda benign, noise: 1e4 * noise,
    "of several lengths": lambda benign, noise: noise * 10.0 ** torch.arange(len(noise))[:, None],
}


@pytest.mark.slow
@all_aggregators
def test_result_is_bounded_within_the_breakdown_point(kind, arguments):
    smallest = SMALLEST.get(kind.__name__, 1)
    for seed, num_uploads in enumerate((5, 9, 12)):
        n = max(num_uploads, smallest)
        attacks = [*FORGED] if make(kind, arguments).breakdown(n) else [*FORGED][:1]  # none forged
        for attack in attacks:
            check_bound(make(kind, arguments), attack, n, seed)


def check_bound(aggregator, attack, n, seed):
    """Check that the result is at most n times as long as the longest benign upload."""
    draw = torch.Generator().manual_seed(seed)
    bad = aggregator.breakdown(n)
    assert aggregator.max_byzantine(n) <= bad <= max(0, (n - 1) // 2)
    benign = torch.randn(n - bad, 20, generator=draw) + 1
    uploads = torch.cat([FORGED[attack](benign, torch.randn(bad, 20, generator=draw)), benign])
    place = torch.randperm(n, generator=draw)
    round_context = replace(context(uploads), num_byzantine=bad)
    merged = aggregator(uploads[place], torch.ones(n), round_context)
    assert merged.norm() <= n * benign.norm(dim=1).max(), (attack, n, seed)


@all_aggregators
def test_breakdown_point_is_below_one_half(kind, arguments):
    for n in range(12):
        assert 0 <= make(kind, arguments).max_byzantine(n) <= max(0, (n - 1) // 2), n


RESULT_TYPES = {  # dtype of the uploads -> dtype of the result
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


@pytest.mark.slow
@all_aggregators
def test_narrow_uploads_are_merged_in_float32(kind, arguments):
    for upload_type, result_type in RESULT_TYPES.items():
        uploads = torch.randn(9, 300, generator=torch.Generator().manual_seed(0)).to(upload_type)
        merged = merge(make(kind, arguments), uploads)
        assert merged.dtype == result_type, upload_type
        exact = merge(make(kind, arguments), uploads.double())
        assert_close(merged.double(), exact, rtol=1e-6, atol=1e-6)


@all_aggregators
def test_error_names_a_wrong_number_or_shape_of_uploads(kind, arguments):
    shapes = {(0, 4): "0", (3,): r"shape \[3\]", (2, 2, 2): r"shape \[2, 2, 2\]"}
    for shape, description in shapes.items():
        aggregator, uploads = make(kind, arguments), torch.zeros(shape)
        with pytest.raises(
            ValueError, match=rf"Expected argument `uploads` .* but got {description}[:.]"
        ):
            aggregator(uploads, torch.ones(shape[0]), context(uploads))


@without_exempt("equality")
def test_result_of_one_upload_is_that_upload(kind, arguments):
    if SMALLEST.get(kind.__name__, 1) > 1:
        return
    upload = torch.tensor([[1.5, -2.0, 0.0]])
    assert torch.equal(merge(make(kind, arguments), upload), upload[0])


@all_aggregators
@pytest.mark.slow
def test_result_has_the_length_of_short_rows(kind, arguments):
    for d in (0, 1):
        assert merge(make(kind, arguments), repeat_rows(kind, torch.ones(3, d))).shape == (d,)


@all_aggregators
@pytest.mark.slow
def test_restored_memory_gives_the_same_result(kind, arguments):
    def uploads(round_number):
        draws = torch.Generator().manual_seed(round_number)
        return torch.randn(max(7, SMALLEST.get(kind.__name__, 1)), 5, generator=draws)

    running = make(kind, arguments)
    for round_number in range(3):
        merge(running, uploads(round_number))
    checkpoint = io.BytesIO()
    torch.save(running.state_dict(), checkpoint)
    checkpoint.seek(0)
    restored = make(kind, arguments)
    restored.load_state_dict(torch.load(checkpoint, weights_only=True))
    assert torch.equal(merge(restored, uploads(3)), merge(running, uploads(3)))


def merge_slices(kind, arguments, uploads, cuts, order):
    """Merge slices of the coordinates in threads, each with its own aggregator."""
    weights = torch.arange(1, len(uploads) + 1)[order]

    def merge_slice(piece, round_context):
        return make(kind, arguments)(piece, weights, round_context)

    return torch.cat(in_slices(merge_slice, uploads[order], context(uploads).select(order), cuts))


SHARDED = [pair for pair in CONFIGURATIONS if make(*pair).shards]


@pytest.mark.slow
@one_test(SHARDED)
def test_merged_slices_equal_the_merged_rows(kind, arguments):
    draw = torch.Generator().manual_seed(0)
    uploads = torch.randn(9, 300, generator=draw, dtype=torch.float64)
    order = torch.randperm(9, generator=draw)
    expected = merge(make(kind, arguments), uploads)
    for cuts in ((100,), (1, 7, 250), (299, 300)):
        merged = merge_slices(kind, arguments, uploads, cuts, order)
        assert_close(merged, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@quick
@given(uploads=rows(), cut=st.integers(1, 8))
@one_test([pair for pair in CONFIGURATIONS if make(*pair).mass(torch.ones(2)) is not None])
def test_parts_merged_by_mass_equal_the_merged_rows(kind, arguments, uploads, cut):
    aggregator, weights = make(kind, arguments), torch.arange(1, len(uploads) + 1)
    if cut >= len(uploads):
        return
    parts = [(uploads[:cut], weights[:cut]), (uploads[cut:], weights[cut:])]
    merged = sum(aggregator.mass(own) * merge(aggregator, part, own) for part, own in parts)
    expected = merge(aggregator, uploads, weights)
    assert_close(merged / aggregator.mass(weights), expected, rtol=1e-12, atol=1e-10)


def test_sharded_aggregators_and_masses_exist():
    assert {kind.__name__ for kind, _ in SHARDED} >= {"Krum", "Median", "TrimmedMean"}
    assert make(pl_fed.aggregators.Mean, {}).mass(torch.tensor([2, 5])) == 2
    assert make(pl_fed.aggregators.Mean, {"weighting": "samples"}).mass(torch.tensor([2, 5])) == 7
