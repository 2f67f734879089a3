"""Laws that every pre-aggregator keeps; a walk through the package finds the pre-aggregators.

The suite covers a new pre-aggregator before its author writes a test. Tables name those that need
arguments or more uploads, or that break a law on purpose.
"""

import copy
import io
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from contract_suite import find_configurations, one_test
from group_counts import make_group_counts
from slices import in_slices
from test_aggregator_contract import CONFIGURATIONS as AGGREGATORS
from test_aggregator_contract import context as aggregator_context
from test_aggregator_contract import make
from torch.testing import assert_close

import pl_fed.aggregators
from pl_fed.aggregators import Chain, Krum, Mean, Median, PreAggregator, TrimmedMean
from pl_fed.types import RoundContext

ARGUMENTS = {
    "AdaptiveClipping": [{}, {"num_byzantine": 2}],
    "Bucketing": [{}, {"bucket_size": 1}, {"bucket_size": 3}],
    "Clipping": [{}, {"threshold": 4.0}],
    "NearestNeighborMixing": [{}, {"num_byzantine": 2}],
    "NormFilter": [{}, {"multiple": 1.0}, {"threshold": 20.0}],
}
POOLS = {"Bucketing"}  # a row that they return stands for several clients


CONFIGURATIONS = find_configurations(pl_fed.aggregators, PreAggregator, ARGUMENTS)
all_steps = one_test(CONFIGURATIONS)


def random_uploads(n=11, d=30, seed=0, dtype=torch.float64):
    """Return rows of several lengths: most of about 5, and two of 50."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, d, generator=draw, dtype=torch.float64)
    rows *= torch.linspace(0.2, 1.5, n)[torch.randperm(n, generator=draw), None]
    rows[torch.randperm(n, generator=draw)[: n // 5]] *= 10
    return rows.to(dtype)


def context(n, byzantine=None):
    return RoundContext(
        seed=1,
        round=3,
        num_byzantine=n // 4 if byzantine is None else byzantine,
        clients=torch.randperm(5 * n, generator=torch.Generator().manual_seed(n))[:n],
        losses=torch.linspace(1.0, 2.0, n),
        start_losses=torch.linspace(3.0, 1.0, n, dtype=torch.float64),
        group_counts=make_group_counts(n),
    )


def prepare(kind, arguments, uploads, now=None, weights=None):
    n = len(uploads)
    weights = torch.arange(1, n + 1) if weights is None else weights
    return kind(**arguments)(uploads, weights, context(n) if now is None else now)


def sort_by_client(prepared):
    """Return uploads, weights, ids and losses in the order of the ids."""
    now = prepared.context
    order = now.clients.argsort()
    rows = (prepared.uploads, prepared.weights, now.clients, now.losses, now.start_losses)
    return [row[order].double() for row in rows]


class Notes(dict):
    """Sums of the numbers that were noted, by word."""

    def __call__(self, word, number):
        self[word] = self.get(word, 0) + int(number)


def test_walk_finds_the_pre_aggregators():
    assert {kind.__name__ for kind, _ in CONFIGURATIONS} >= {"Bucketing", "Clipping", "NormFilter"}


@all_steps
def test_rows_follow_their_clients(kind, arguments):
    for seed in range(5):
        check_order(kind, arguments, seed)


def check_order(kind, arguments, seed):
    """Check that uploads in another order give each client the row that it had."""
    uploads, weights, now = random_uploads(seed=seed), torch.arange(1, 12), context(11)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(seed))
    moved = prepare(kind, arguments, uploads[order], now.select(order), weights[order])
    expected = prepare(kind, arguments, uploads, now, weights)
    for row, expected_row in zip(sort_by_client(moved), sort_by_client(expected), strict=True):
        assert_close(row, expected_row, rtol=1e-12, atol=1e-12)
    assert moved.context.num_byzantine == expected.context.num_byzantine


@all_steps
def test_prepared_uploads_have_matching_weights_ids_and_losses(kind, arguments):
    """As many weights, ids and losses as rows; if no row is dropped, the weights keep their sum."""
    for num_uploads in (1, 5, 11):
        if num_uploads > arguments.get("num_byzantine", 0):
            check_prepared(kind, arguments, num_uploads)


def check_prepared(kind, arguments, n):
    """Check the shapes, ids, losses and weights that a step hands on."""
    notes, weights = Notes(), torch.arange(1, n + 1)
    now = replace(context(n), note=notes)
    uploads, weights_after, after = prepare(kind, arguments, random_uploads(n), now, weights)
    m = len(uploads)
    assert uploads.shape == (m, 30)
    for values in (weights_after, after.clients, after.losses, after.start_losses):
        assert values.shape == (m,)
    assert 1 <= m <= n
    assert set(after.clients.tolist()) <= set(now.clients.tolist())
    assert 0 <= after.num_byzantine <= now.num_byzantine
    assert (after.seed, after.round) == (now.seed, now.round)
    if kind.__name__ not in POOLS:
        assert n - m == notes.get("dropped", 0)
    if not notes.get("dropped"):
        assert weights_after.sum() == weights.sum()
    for position, client in enumerate(after.clients.tolist()):
        position_before = now.clients.tolist().index(client)
        if kind.__name__ not in POOLS:
            assert after.losses[position] == now.losses[position_before]
            assert after.start_losses[position] == now.start_losses[position_before]
            assert weights_after[position] == weights[position_before]


@one_test([pair for pair in CONFIGURATIONS if "threshold" not in pair[1]])
def test_factor_on_all_uploads_is_a_factor_on_the_prepared_uploads(kind, arguments):
    uploads = random_uploads()
    expected = prepare(kind, arguments, uploads)
    for factor in (-3.0, 1e-6, 1e12):
        result = prepare(kind, arguments, factor * uploads)
        assert torch.equal(result.context.clients, expected.context.clients)
        assert_close(result.uploads, factor * expected.uploads, rtol=1e-9, atol=0)
    assert not prepare(kind, arguments, 0.0 * uploads).uploads.any()


@all_steps
def test_input_stays_unchanged_and_changed_rows_are_copies(kind, arguments):
    """The result shares memory with the input only if all rows are unchanged."""
    uploads, weights, now = random_uploads(), torch.arange(1, 12), context(11)
    tensors = [uploads, weights, now.clients, now.losses, now.start_losses]
    before = copy.deepcopy(tensors)
    result = prepare(kind, arguments, uploads, now, weights)
    assert result.uploads.untyped_storage().data_ptr() != uploads.untyped_storage().data_ptr()
    result.uploads.fill_(7e7)
    for tensor, expected_tensor in zip(tensors, before, strict=True):
        assert torch.equal(tensor, expected_tensor)
    harmless = torch.full((11, 3), 1e-3, dtype=torch.float64)
    result = prepare(kind, arguments, harmless, now, weights)
    shares = result.uploads.untyped_storage().data_ptr() == harmless.untyped_storage().data_ptr()
    assert torch.equal(result.uploads, harmless) or not shares


RESULT_TYPES = {  # dtype of the uploads -> dtype of the result
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


@all_steps
def test_narrow_uploads_are_changed_in_float32(kind, arguments):
    for upload_type, result_type in RESULT_TYPES.items():
        uploads = random_uploads(d=300, dtype=upload_type)
        result = prepare(kind, arguments, uploads)
        assert result.uploads.dtype == result_type, upload_type
        exact = prepare(kind, arguments, uploads.double())
        assert_close(result.uploads.double(), exact.uploads, rtol=1e-6, atol=1e-6)


@all_steps
def test_error_names_a_wrong_number_or_shape_of_uploads(kind, arguments):
    shapes = {(0, 4): "0", (3,): r"shape \[3\]", (2, 2, 2): r"shape \[2, 2, 2\]"}
    for shape, description in shapes.items():
        with pytest.raises(
            ValueError, match=rf"Expected argument `uploads` .* but got {description}[:.]"
        ):
            prepare(kind, arguments, torch.zeros(shape))


@all_steps
def test_one_upload_stays_unchanged(kind, arguments):
    if arguments.get("num_byzantine"):
        return  # it needs more than one upload
    upload = torch.tensor([[1.5, -2.0, 0.0]])
    result = prepare(kind, arguments, upload, context(1))
    assert torch.equal(result.uploads, upload)
    assert torch.equal(result.weights, torch.tensor([1]))


@all_steps
def test_prepared_rows_have_the_length_of_short_rows(kind, arguments):
    for d in (0, 1):
        assert prepare(kind, arguments, torch.ones(4, d)).uploads.shape[1] == d


@all_steps
def test_equal_uploads_stay_unchanged(kind, arguments):
    row = torch.tensor([0.1, -3.0, 0.0, 1e-20])
    result = prepare(kind, arguments, row.repeat(7, 1))
    assert_close(result.uploads, row.expand(len(result.uploads), -1), rtol=1e-6, atol=0)


@all_steps
def test_numbers_of_clipped_and_dropped_uploads_are_noted(kind, arguments):
    """As many uploads are noted as clipped as are shorter than before; all others are unchanged."""
    notes, uploads = Notes(), random_uploads()
    now = replace(context(11), note=notes)
    result = prepare(kind, arguments, uploads, now)
    assert set(notes) <= {"clipped", "dropped"}
    if "clipped" in notes:
        ratio = result.uploads.norm(dim=1) / uploads.norm(dim=1)
        assert notes["clipped"] == int((ratio < 1 - 1e-9).sum()) > 0
        assert_close(result.uploads, uploads * ratio[:, None])
    if "dropped" in notes:
        remaining = torch.isin(now.clients, result.context.clients)
        assert notes["dropped"] == int((~remaining).sum()) > 0
        assert torch.equal(result.uploads, uploads[remaining])


SHARDED = [(kind, arguments) for kind, arguments in CONFIGURATIONS if kind(**arguments).shards]


@one_test(SHARDED)
def test_prepared_slices_equal_the_prepared_rows(kind, arguments):
    for cuts in ((100,), (1, 7, 250), (299, 300)):
        check_slices(kind, arguments, cuts)


def check_slices(kind, arguments, cuts):
    """Check that slices of the coordinates are changed as whole rows are."""
    uploads, now = random_uploads(d=300), context(11)
    expected = prepare(kind, arguments, uploads, now)
    parts = in_slices(
        lambda piece, slice_context: prepare(kind, arguments, piece, slice_context),
        uploads,
        now,
        cuts,
    )
    assert_close(torch.cat([part.uploads for part in parts], 1), expected.uploads)
    for part in parts:
        assert torch.equal(part.weights, expected.weights)
        assert torch.equal(part.context.clients, expected.context.clients)
        assert torch.equal(part.context.losses, expected.context.losses)
        assert part.context.num_byzantine == expected.context.num_byzantine


def test_sharded_pre_aggregators_exist():
    names = {kind.__name__ for kind, _ in SHARDED}
    assert names >= {"Bucketing", "Clipping", "NearestNeighborMixing", "NormFilter"}


@all_steps
def test_restored_memory_gives_the_same_rows(kind, arguments):
    running = kind(**arguments)
    for round_number in range(3):
        running(random_uploads(seed=round_number), torch.ones(11), context(11))
    checkpoint = io.BytesIO()
    torch.save(running.state_dict(), checkpoint)
    checkpoint.seek(0)
    restored = kind(**arguments)
    restored.load_state_dict(torch.load(checkpoint, weights_only=True))
    last = random_uploads(seed=3), torch.ones(11), context(11)
    assert torch.equal(restored(*last).uploads, running(*last).uploads)


# In a chain


@all_steps
def test_no_chain_returns_nan_or_infinity(kind, arguments):
    row, number = slice(None), slice(2, 3)
    cases = product((Mean, Median, Krum), (math.nan, math.inf, -math.inf), (row, number))
    for then, value, place in cases:
        uploads = random_uploads()
        uploads[4, place] = value
        try:
            merged = Chain([kind(**arguments)], then())(uploads, torch.ones(11), context(11, 1))
        except ValueError as error:
            assert str(error).startswith("Expected argument `uploads` to be finite")  # noqa: PT017
        else:
            assert merged.isfinite().all(), (then, value, place)


@pytest.mark.exhaustive
@pytest.mark.slow
@all_steps
def test_chains_are_finite_and_bounded_within_their_breakdown_point(kind, arguments):
    """One upload of 1e30 stays finite; as many as the breakdown point, if known, stay bounded."""
    check_chains(kind, arguments, AGGREGATORS)


@pytest.mark.slow
@all_steps
def test_chains_of_each_aggregator_are_finite_and_bounded(kind, arguments):
    """Each step has some aggregators behind it, and each aggregator some steps before it."""
    place = CONFIGURATIONS.index((kind, arguments))
    check_chains(kind, arguments, AGGREGATORS[place % 4 :: 4])


def check_chains(kind, arguments, aggregators):
    """Check the chains of a step and each of the aggregators."""
    place = CONFIGURATIONS.index((kind, arguments))  # each step and each aggregator has both seeds
    for seed, (aggregator, aggregator_arguments) in enumerate(aggregators, place):
        if kind.merges_clients and aggregator.remembers_clients:
            continue  # Chain refuses them
        chain = Chain([kind(**arguments)], make(aggregator, aggregator_arguments))
        check_chain(chain, NUM_UPLOADS.get(aggregator.__name__, 24), seed % 2)


NUM_UPLOADS = {"SMEA": 15}  # it tries all subsets; Bulyan needs the buckets of 24 uploads


def check_chain(chain, n, seed):
    """Check that a chain's result is finite, and bounded within its breakdown."""
    draw = torch.Generator().manual_seed(seed)
    bad = chain.breakdown(n)
    assert 0 <= bad <= (n - 1) // 2
    uploads = torch.randn(n, 20, generator=draw) + 1
    forged = torch.arange(n) < max(bad, 1)
    uploads[forged] = 1e30 * uploads[forged].sign()
    place = torch.randperm(n, generator=draw)
    round_context = replace(context(n, bad), root=uploads[~forged].mean(0))
    facts = aggregator_context(uploads)
    round_context = replace(
        round_context,
        broadcast=facts.broadcast,
        layout=facts.layout,
        net=facts.net,
        inputs=facts.inputs,
    )
    merged = chain(uploads[place], torch.ones(n), round_context)
    assert merged.isfinite().all(), (chain, seed)
    if bad:
        longest = uploads[~forged].norm(dim=1).max()
        assert merged.norm() <= 3 * n * longest, "three times for a step that mixes"


@all_steps
def test_chain_promises_no_more_than_its_aggregator(kind, arguments):
    step = kind(**arguments)
    for n in range(14):
        for then in (Mean(), Median(), Krum(), TrimmedMean(2)):
            chain = Chain([step], then)
            assert chain.max_byzantine(n) == 0
            assert 0 <= chain.breakdown(n) <= then.breakdown(n)


def test_breakdown_points_of_chains():
    kinds = pl_fed.aggregators
    for first, then, expected in (
        ([], Median(), 4),
        ([kinds.Clipping()], Median(), 4),
        ([kinds.Clipping(), kinds.NearestNeighborMixing()], Krum(), 3),
        ([kinds.NearestNeighborMixing(num_byzantine=1)], Median(), 1),
        ([kinds.Bucketing(2)], Median(), 2),  # five buckets
        ([kinds.Bucketing(2), kinds.Bucketing(2)], Median(), 1),  # three
        ([kinds.NormFilter()], Median(), 0),
        ([kinds.AdaptiveClipping()], Mean(), 0),
    ):
        assert Chain(first, then).breakdown(9) == expected, (first, then)
    assert Chain([], Median()).max_byzantine(9) == 4


def test_steps_run_in_their_order():
    uploads, now = torch.tensor([[1.0], [2.0], [60.0], [80.0]]), context(4, 1)
    kinds = pl_fed.aggregators
    clip, drop = kinds.Clipping(threshold=5.0), kinds.NormFilter(threshold=10.0)
    assert Chain([clip, drop], Mean())(uploads, torch.ones(4), now).tolist() == [13 / 4]
    assert Chain([drop, clip], Mean())(uploads, torch.ones(4), now).tolist() == [3 / 2]


def test_chain_has_the_needs_of_its_aggregator():
    kinds = pl_fed.aggregators
    steps = [kinds.Clipping()]
    assert Chain(steps, kinds.FLTrust()).needs_root
    assert not Chain(steps, Mean()).needs_root
    assert Chain(steps, kinds.Term()).needs_start_losses
    assert Chain(steps, Krum()).shards
    assert not Chain(steps, Mean()).shards


def test_memory_of_a_step_is_in_the_state_of_its_chain():
    class Counting(PreAggregator):
        def __init__(self):
            super().__init__()
            self.register_buffer("rounds", torch.zeros(1))

        def forward(self, uploads, weights, context):
            self.rounds += 1
            return kinds.PreparedUploads(uploads, weights, context)

    kinds = pl_fed.aggregators
    chain = Chain([Counting()], Mean())
    chain(torch.ones(2, 3), torch.ones(2), context(2))
    assert chain.state_dict() == {"first.0.rounds": torch.ones(1)}
    assert chain.breakdown(9) == 0, "a step of unknown breakdown point"
