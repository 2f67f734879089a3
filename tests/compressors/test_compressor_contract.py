"""All compressors obey the rules in ``pl_fed/compressors/base.py``."""

import math

import pytest
import torch
from contract_suite import find_configurations, one_test, one_test_per_class
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import pl_fed.compressors
from pl_fed.compressors import Compressor
from pl_fed.compressors.base import ERROR
from pl_fed.nets.rows import RowLayout
from pl_fed.random import key

ARGUMENTS = {
    "TopK": [{"k": 7}, {"k": 0.2}, {"k": 5, "error_feedback": False}, {"k": 1.0}],
    "RandomK": [{"k": 7}, {"k": 0.2}, {"k": 5, "error_feedback": False}],
    "QSGD": [{}, {"levels": 1}, {"levels": 3, "bucket_size": 4}],
    "SignSGD": [{}, {"error_feedback": False}],
    "PowerSGD": [{"rank": 1}, {"rank": 2}],
}
CONFIGURATIONS = find_configurations(pl_fed.compressors, Compressor, ARGUMENTS)
WITH_FEEDBACK = [pair for pair in CONFIGURATIONS if pair[0](**pair[1]).error_feedback]
UNBIASED = [pair for pair in CONFIGURATIONS if pair[0](**pair[1]).is_unbiased]
all_codecs = one_test(CONFIGURATIONS)

SHAPES = {"weight": (6, 5), "bias": (6,), "kernel": (4, 2, 3)}
LAYOUT = RowLayout.from_tensors((name, torch.empty(shape)) for name, shape in SHAPES.items())
D = LAYOUT.numel


def draw_rows(n=4, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, D, generator=draw, dtype=torch.float64)
    return (rows * torch.linspace(0.01, 3, D)).to(dtype)


def draw_keys(clients, round=0):
    return torch.tensor([[key(0, "compression", round, client)] for client in clients])


def new_memory(codec, n, dtype=torch.float64):
    lengths = codec.memory_lengths(LAYOUT)
    return {name: torch.zeros(n, length, dtype=dtype) for name, length in lengths.items()}


def send(codec, rows, clients=None, memory=None, round=0):
    clients = range(len(rows)) if clients is None else clients
    dtype = torch.promote_types(rows.dtype, torch.float32)
    memory = new_memory(codec, len(rows), dtype) if memory is None else memory
    return codec.send(rows, LAYOUT, draw_keys(clients, round), memory)


def test_walk_finds_the_compressors():
    names = {kind.__name__ for kind, _ in CONFIGURATIONS}
    assert names >= {"TopK", "RandomK", "QSGD", "SignSGD", "NaturalCompression", "PowerSGD"}


@all_codecs
def test_each_codec_has_feedback_or_is_unbiased_or_a_user_turned_feedback_off(kind, arguments):
    codec = kind(**arguments)
    assert codec.error_feedback or codec.is_unbiased or arguments.get("error_feedback") is False
    assert not (codec.error_feedback and codec.is_unbiased)


@all_codecs
def test_rows_keep_their_shape_and_type(kind, arguments):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        rows = draw_rows(dtype=dtype)
        received, memory = send(kind(**arguments), rows)
        assert received.shape == rows.shape
        assert received.dtype == dtype
        assert received.isfinite().all()
        lengths = {name: row.shape[1] for name, row in memory.items()}
        assert lengths == kind(**arguments).memory_lengths(LAYOUT)


@all_codecs
def test_inputs_stay_unchanged(kind, arguments):
    codec, rows = kind(**arguments), draw_rows()
    _, memory = send(codec, rows)
    before = {name: row.clone() for name, row in memory.items()}
    row_before = rows.clone()
    received, _ = send(codec, rows, memory=memory)
    received.fill_(9e9)
    assert torch.equal(rows, row_before)
    assert all(torch.equal(memory[name], before[name]) for name in before)


@all_codecs
def test_a_client_has_the_same_message_alone_and_in_any_order(kind, arguments):
    codec, rows, clients = kind(**arguments), draw_rows(5), [8, 3, 1, 0, 6]
    _, memory = send(codec, draw_rows(5, seed=1), clients)
    together, after = send(codec, rows, clients, memory, round=1)
    for place, client in enumerate(clients):
        own = {name: row[[place]] for name, row in memory.items()}
        alone, own_after = send(codec, rows[[place]], [client], own, round=1)
        assert_close(alone, together[[place]], rtol=1e-12, atol=1e-12)
        for name, row in own_after.items():
            assert_close(row, after[name][[place]], rtol=1e-12, atol=1e-12)
    repeated, _ = send(codec, rows, clients, memory, round=1)
    assert torch.equal(repeated, together)


@all_codecs
def test_scale_does_not_matter(kind, arguments):
    rows = draw_rows()
    expected, _ = send(kind(**arguments), rows)
    for factor in (2.0**-40, 2.0, 2.0**60):
        received, _ = send(kind(**arguments), factor * rows)
        assert_close(received / factor, expected, rtol=1e-12, atol=1e-12)


@all_codecs
def test_zero_arrives_as_zero(kind, arguments):
    received, memory = send(kind(**arguments), torch.zeros(3, D))
    assert not received.any()
    assert not memory.get(ERROR, received).any()


@all_codecs
def test_a_broken_upload_arrives_as_nan_and_changes_no_other(kind, arguments):
    codec, rows = kind(**arguments), draw_rows()
    expected, after = send(codec, rows)
    for value in (math.nan, math.inf, -math.inf):
        broken = rows.clone()
        broken[2, 11] = value
        received, memory = send(codec, broken)
        assert received[2].isnan().all()
        others = [0, 1, 3]
        assert torch.equal(received[others], expected[others])
        for name, row in memory.items():
            assert row.isfinite().all()
            assert torch.equal(row[others], after[name][others])


@one_test(WITH_FEEDBACK)
def test_a_memory_that_overflows_makes_the_upload_broken(kind, arguments):
    codec, rows = kind(**arguments), torch.full((2, D), 3e38)
    memory = new_memory(codec, 2, torch.float32)
    memory[ERROR][1] = 3e38
    received, _ = send(codec, rows, memory=memory)
    assert received[1].isnan().all()


@all_codecs
def test_messages_are_shorter_than_uploads_or_of_equal_length(kind, arguments):
    codec = kind(**arguments)
    for bits in (16, 32, 64):
        length = codec.count_bits(LAYOUT, bits)
        assert isinstance(length, int)
        assert 0 < length <= D * bits + D, "a share of 1.0 also sends positions"
        if arguments.get("k") != 1.0 and arguments.get("bucket_size") is None:
            assert length < D * bits or length == D * bits == D * 16, "numbers of half precision"


@one_test(WITH_FEEDBACK)
def test_sent_rows_and_memory_add_up_to_all_uploads(kind, arguments):
    """Σ C(p_s) + e_{t+1} = Σ u_s in each round, so that nothing is lost."""
    codec, memory = kind(**arguments), None
    sent, total = torch.zeros(4, D).double(), torch.zeros(4, D).double()
    for round in range(12):
        uploads = draw_rows(seed=round)
        received, memory = send(codec, uploads, memory=memory, round=round)
        sent, total = sent + received, total + uploads
        assert_close(sent + memory[ERROR], total, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(sent, total) or arguments.get("k") == 1.0


@one_test(WITH_FEEDBACK)
def test_memory_of_narrow_uploads_keeps_what_their_rounding_loses(kind, arguments):
    uploads = draw_rows(dtype=torch.bfloat16)
    received, memory = send(kind(**arguments), uploads)
    assert memory[ERROR].dtype == torch.float32
    assert_close(received.float() + memory[ERROR], uploads.float(), rtol=1e-6, atol=1e-6)


@one_test_per_class(WITH_FEEDBACK)
@pytest.mark.slow
def test_codecs_with_feedback_are_contractions(kind, arguments):
    """‖C(x) − x‖² ≤ ‖x‖² for any row, and < on average over keys."""

    @settings(max_examples=30, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=D, max_size=D))
    def check(numbers):
        rows = torch.tensor(numbers, dtype=torch.float64).expand(8, -1)
        received, _ = send(kind(**arguments), rows)
        error = (received - rows).square().sum(1)
        norm = rows.square().sum(1)
        assert (error <= norm * (1 + 1e-12)).all()
        if norm[0] > 1e-200:
            assert error.mean() < norm[0] or kind.__name__ == "RandomK"

    check()


@one_test_per_class(UNBIASED)
@pytest.mark.slow
def test_unbiased_codecs_have_the_upload_as_mean(kind, arguments):
    """The mean over 40,000 keys lies within 5 standard errors of the upload."""
    n, codec = 40_000, kind(**arguments)
    rows = draw_rows(1, seed=3)
    keys = torch.arange(n)[:, None] * 7919
    received, _ = codec.send(rows.expand(n, -1), LAYOUT, keys, {})
    error = (received.mean(0) - rows[0]).abs()
    bound = 5 * received.std(0) / math.sqrt(n) + 1e-7 * rows[0].abs()  # 24 bits of a draw
    assert (error <= bound).all()


@all_codecs
def test_layouts_of_one_number_are_sent(kind, arguments):
    if arguments.get("k", 1.0) in (5, 7):
        with pytest.raises(ValueError, match="`k` to be at most 1"):
            kind(**arguments).check(ONE)
        return
    codec = kind(**arguments)
    codec.check(ONE)
    memory = {name: torch.zeros(1, length) for name, length in codec.memory_lengths(ONE).items()}
    received, _ = codec.send(torch.tensor([[2.0]]), ONE, draw_keys([0]), memory)
    assert received.tolist() == [[2.0]]
    assert codec.count_bits(ONE, 32) > 0


ONE = RowLayout.from_tensors([("value", torch.empty(1))])
