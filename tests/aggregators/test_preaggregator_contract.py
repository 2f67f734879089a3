"""What every pre-aggregator keeps to, over all that a walk through the package finds.

A new one is covered before its author writes a test. One that cannot be made without arguments,
needs more uploads, or breaks a law on purpose is named in the tables.
"""

import copy
import importlib
import inspect
import math
import pkgutil
from dataclasses import replace
from itertools import product

import pytest
import torch
from slices import in_slices
from test_aggregator_contract import ALL as AGGREGATORS
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
POOLS = {"Bucketing"}  # what comes out stands for several clients


def found():
    for entry in pkgutil.walk_packages(pl_fed.aggregators.__path__, "pl_fed.aggregators."):
        for name, member in vars(importlib.import_module(entry.name)).items():
            own = inspect.isclass(member) and member.__module__ == entry.name
            if own and issubclass(member, PreAggregator) and not inspect.isabstract(member):
                for arguments in ARGUMENTS.get(name, [{}]):
                    yield pytest.param(member, arguments, id=f"{name}{list(arguments.values())}")


ALL = list(found())
every = pytest.mark.parametrize(("kind", "arguments"), ALL)
scaled = pytest.mark.parametrize(
    ("kind", "arguments"), [each for each in ALL if "threshold" not in each.values[1]]
)


def random_uploads(n=11, d=30, seed=0, dtype=torch.float64):
    """Rows of several lengths, about 5 the most of them and two of 50."""
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
    )


def prepare(kind, arguments, uploads, now=None, weights=None):
    n = len(uploads)
    weights = torch.arange(1, n + 1) if weights is None else weights
    return kind(**arguments)(uploads, weights, context(n) if now is None else now)


def by_client(prepared):
    """All that there is for each client, in the order of their ids."""
    now = prepared.context
    order = now.clients.argsort()
    rows = (prepared.uploads, prepared.weights, now.clients, now.losses, now.start_losses)
    return [each[order].double() for each in rows]


class Notes(dict):
    """What was noted, added up."""

    def __call__(self, word, number):
        self[word] = self.get(word, 0) + int(number)


def test_the_walk_finds_the_pre_aggregators():
    assert {param.values[0].__name__ for param in ALL} >= {"Bucketing", "Clipping", "NormFilter"}


@every
def test_rows_follow_their_clients(kind, arguments):
    for seed in range(5):
        check_order(kind, arguments, seed)


def check_order(kind, arguments, seed):
    """Check that uploads in another order give each client the row that it had."""
    uploads, weights, now = random_uploads(seed=seed), torch.arange(1, 12), context(11)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(seed))
    moved = prepare(kind, arguments, uploads[order], now.select(order), weights[order])
    expected = prepare(kind, arguments, uploads, now, weights)
    for one, other in zip(by_client(moved), by_client(expected), strict=True):
        assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert moved.context.num_byzantine == expected.context.num_byzantine


@every
def test_what_comes_out_is_whole(kind, arguments):
    """As many weights, ids and losses as rows; and where none is left out, no sample is lost."""
    for num_uploads in (1, 5, 11):
        if num_uploads > arguments.get("num_byzantine", 0):
            check_prepared(kind, arguments, num_uploads)


def check_prepared(kind, arguments, n):
    """Check the shapes, ids, losses and weights that a step hands on."""
    notes, weights = Notes(), torch.arange(1, n + 1)
    now = replace(context(n), note=notes)
    uploads, weighs, after = prepare(kind, arguments, random_uploads(n), now, weights)
    m = len(uploads)
    assert uploads.shape == (m, 30)
    for each in (weighs, after.clients, after.losses, after.start_losses):
        assert each.shape == (m,)
    assert 1 <= m <= n
    assert set(after.clients.tolist()) <= set(now.clients.tolist())
    assert 0 <= after.num_byzantine <= now.num_byzantine
    assert (after.seed, after.round) == (now.seed, now.round)
    if kind.__name__ not in POOLS:
        assert n - m == notes.get("dropped", 0)
    if not notes.get("dropped"):
        assert weighs.sum() == weights.sum()
    for position, client in enumerate(after.clients.tolist()):
        known = now.clients.tolist().index(client)
        if kind.__name__ not in POOLS:
            assert after.losses[position] == now.losses[known]
            assert after.start_losses[position] == now.start_losses[known]
            assert weighs[position] == weights[known]


@scaled
def test_a_factor_on_all_uploads_is_a_factor_on_what_comes_out(kind, arguments):
    uploads = random_uploads()
    expected = prepare(kind, arguments, uploads)
    for factor in (-3.0, 1e-6, 1e12):
        found = prepare(kind, arguments, factor * uploads)
        assert torch.equal(found.context.clients, expected.context.clients)
        assert_close(found.uploads, factor * expected.uploads, rtol=1e-9, atol=0)
    assert not prepare(kind, arguments, 0.0 * uploads).uploads.any()


@every
def test_the_input_is_not_changed_and_what_is_changed_is_new(kind, arguments):
    """A row that is as it was may be the very one that was given, and no other may."""
    uploads, weights, now = random_uploads(), torch.arange(1, 12), context(11)
    tensors = [uploads, weights, now.clients, now.losses, now.start_losses]
    before = copy.deepcopy(tensors)
    found = prepare(kind, arguments, uploads, now, weights)
    assert found.uploads.untyped_storage().data_ptr() != uploads.untyped_storage().data_ptr()
    found.uploads.fill_(7e7)
    for one, other in zip(tensors, before, strict=True):
        assert torch.equal(one, other)
    harmless = torch.full((11, 3), 1e-3, dtype=torch.float64)
    found = prepare(kind, arguments, harmless, now, weights)
    shares = found.uploads.untyped_storage().data_ptr() == harmless.untyped_storage().data_ptr()
    assert torch.equal(found.uploads, harmless) or not shares


CHANGED_IN = {  # dtype of the uploads -> dtype of the result
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


@every
def test_narrow_uploads_are_changed_in_float32(kind, arguments):
    for upload_type, result_type in CHANGED_IN.items():
        uploads = random_uploads(d=300, dtype=upload_type)
        found = prepare(kind, arguments, uploads)
        assert found.uploads.dtype == result_type, upload_type
        exact = prepare(kind, arguments, uploads.double())
        assert_close(found.uploads.double(), exact.uploads, rtol=1e-6, atol=1e-6)


@every
def test_nothing_to_change_is_an_error_that_says_what_came(kind, arguments):
    shapes = {(0, 4): "0", (3,): r"shape \[3\]", (2, 2, 2): r"shape \[2, 2, 2\]"}
    for shape, got in shapes.items():
        with pytest.raises(ValueError, match=rf"Expected argument `uploads` .* but got {got}[:.]"):
            prepare(kind, arguments, torch.zeros(shape))


@every
def test_one_upload_stays_as_it_is(kind, arguments):
    if arguments.get("num_byzantine"):
        pytest.skip("needs more than one upload")
    upload = torch.tensor([[1.5, -2.0, 0.0]])
    found = prepare(kind, arguments, upload, context(1))
    assert torch.equal(found.uploads, upload)
    assert torch.equal(found.weights, torch.tensor([1]))


@every
def test_short_rows(kind, arguments):
    for d in (0, 1):
        assert prepare(kind, arguments, torch.ones(4, d)).uploads.shape[1] == d


@every
def test_equal_uploads_stay_as_they_are(kind, arguments):
    row = torch.tensor([0.1, -3.0, 0.0, 1e-20])
    found = prepare(kind, arguments, row.repeat(7, 1))
    assert_close(found.uploads, row.expand(len(found.uploads), -1), rtol=1e-6, atol=0)


@every
def test_what_is_done_is_noted(kind, arguments):
    """As many are said to be clipped as are shorter than before, with all else as it was."""
    notes, uploads = Notes(), random_uploads()
    now = replace(context(11), note=notes)
    found = prepare(kind, arguments, uploads, now)
    assert set(notes) <= {"clipped", "dropped"}
    if "clipped" in notes:
        ratio = found.uploads.norm(dim=1) / uploads.norm(dim=1)
        assert notes["clipped"] == int((ratio < 1 - 1e-9).sum()) > 0
        assert_close(found.uploads, uploads * ratio[:, None])
    if "dropped" in notes:
        kept = torch.isin(now.clients, found.context.clients)
        assert notes["dropped"] == int((~kept).sum()) > 0
        assert torch.equal(found.uploads, uploads[kept])


SHARDS = [each for each in ALL if each.values[0](**each.values[1]).shards]


@pytest.mark.parametrize(("kind", "arguments"), SHARDS)
def test_slices_of_the_coordinates_are_changed_alike(kind, arguments):
    for cuts in ((100,), (1, 7, 250), (299, 300)):
        check_slices(kind, arguments, cuts)


def check_slices(kind, arguments, cuts):
    """Check that slices of the coordinates are changed as whole rows are."""
    uploads, now = random_uploads(d=300), context(11)
    expected = prepare(kind, arguments, uploads, now)
    parts = in_slices(lambda piece, told: prepare(kind, arguments, piece, told), uploads, now, cuts)
    assert_close(torch.cat([each.uploads for each in parts], 1), expected.uploads)
    for part in parts:
        assert torch.equal(part.weights, expected.weights)
        assert torch.equal(part.context.clients, expected.context.clients)
        assert torch.equal(part.context.losses, expected.context.losses)
        assert part.context.num_byzantine == expected.context.num_byzantine


def test_there_is_something_to_change_in_slices():
    names = {param.values[0].__name__ for param in SHARDS}
    assert names >= {"Bucketing", "Clipping", "NearestNeighborMixing", "NormFilter"}


@every
def test_a_restored_memory_goes_on_alike(kind, arguments, tmp_path):
    running = kind(**arguments)
    for round_number in range(3):
        running(random_uploads(seed=round_number), torch.ones(11), context(11))
    torch.save(running.state_dict(), tmp_path / "memory.pt")
    restored = kind(**arguments)
    restored.load_state_dict(torch.load(tmp_path / "memory.pt", weights_only=True))
    last = random_uploads(seed=3), torch.ones(11), context(11)
    assert torch.equal(restored(*last).uploads, running(*last).uploads)


# In a chain


@every
def test_no_chain_gives_nan_or_infinity(kind, arguments):
    a_row, a_number = slice(None), slice(2, 3)
    cases = product((Mean, Median, Krum), (math.nan, math.inf, -math.inf), (a_row, a_number))
    for then, bad, place in cases:
        uploads = random_uploads()
        uploads[4, place] = bad
        try:
            merged = Chain([kind(**arguments)], then())(uploads, torch.ones(11), context(11, 1))
        except ValueError as error:
            said = str(error)
            assert said.startswith("Expected argument `uploads` to be finite")
        else:
            assert merged.isfinite().all(), (then, bad, place)


@pytest.mark.slow
@every
def test_any_chain_is_finite_and_bounded_if_it_says_so(kind, arguments):
    """One upload of 1e30; or as many as the chain stands, and it is told how many they are."""
    for param, seed in product(AGGREGATORS, range(2)):
        merging, merging_arguments = param.values
        check_chain(Chain([kind(**arguments)], make(merging, merging_arguments)), seed)


def check_chain(chain, seed):
    """Check that a chain's result is finite, and bounded within its breakdown."""
    n, draw = 24, torch.Generator().manual_seed(seed)
    bad = chain.breakdown(n)
    assert 0 <= bad <= (n - 1) // 2
    uploads = torch.randn(n, 20, generator=draw) + 1
    hostile = torch.arange(n) < max(bad, 1)
    uploads[hostile] = 1e30 * uploads[hostile].sign()
    place, now = torch.randperm(n, generator=draw), context(n, bad)
    now = replace(now, root=uploads[~hostile].mean(0))
    merged = chain(uploads[place], torch.ones(n), now)
    assert merged.isfinite().all(), (chain, seed)
    if bad:
        longest = uploads[~hostile].norm(dim=1).max()
        assert merged.norm() <= 3 * n * longest, "three times for a step that mixes"


@every
def test_a_chain_promises_no_more_than_its_aggregator(kind, arguments):
    step = kind(**arguments)
    for n in range(14):
        for then in (Mean(), Median(), Krum(), TrimmedMean(2)):
            chain = Chain([step], then)
            assert chain.max_byzantine(n) == 0
            assert 0 <= chain.breakdown(n) <= then.breakdown(n)


def test_what_chains_stand():
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


def test_steps_go_in_their_order():
    uploads, now = torch.tensor([[1.0], [2.0], [60.0], [80.0]]), context(4, 1)
    kinds = pl_fed.aggregators
    clip, drop = kinds.Clipping(threshold=5.0), kinds.NormFilter(threshold=10.0)
    assert Chain([clip, drop], Mean())(uploads, torch.ones(4), now).tolist() == [13 / 4]
    assert Chain([drop, clip], Mean())(uploads, torch.ones(4), now).tolist() == [3 / 2]


def test_a_chain_asks_for_what_its_aggregator_needs():
    kinds = pl_fed.aggregators
    steps = [kinds.Clipping()]
    assert Chain(steps, kinds.FLTrust()).needs_root
    assert not Chain(steps, Mean()).needs_root
    assert Chain(steps, kinds.Term()).needs_start_losses
    assert Chain(steps, Krum()).shards
    assert not Chain(steps, Mean()).shards


def test_what_a_chain_remembers_is_in_its_state():
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
    assert chain.breakdown(9) == 0, "nothing is known of it"
