"""Compressors against closed forms of their papers and versions in plain NumPy."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_compressor_contract import LAYOUT, D, draw_keys, draw_rows, send
from torch.testing import assert_close

from pl_fed.compressors import QSGD, NaturalCompression, PowerSGD, RandomK, SignSGD, TopK
from pl_fed.compressors.base import Sending
from pl_fed.nets.rows import RowLayout
from pl_fed.random import normals, uniforms

numbers = st.lists(st.floats(-100, 100, width=32), min_size=D, max_size=D)


def flat(d):
    return RowLayout.from_tensors([("weight", torch.empty(d))])


@given(numbers, st.integers(1, D))
@pytest.mark.slow
def test_top_k_contracts_by_the_share_of_coordinates(row, k):
    """‖C(x) − x‖² ≤ (1 − k/d) ‖x‖², with the k largest coordinates unchanged."""
    rows = torch.tensor([row], dtype=torch.float64)
    received, _ = send(TopK(k, error_feedback=False), rows)
    error, norm = (received - rows).square().sum(), rows.square().sum()
    assert error <= (1 - k / D) * norm + 1e-9
    largest = np.sort(np.abs(row))[::-1][:k]
    assert sorted(received.abs()[0].tolist(), reverse=True)[:k] == largest.tolist()
    assert (received != 0).sum() <= k


def test_random_k_draws_every_set_with_the_same_probability():
    d, k, n = 5, 2, 50_000
    rows = torch.ones(n, d)
    received, _ = RandomK(k, error_feedback=False).send(
        rows, flat(d), torch.arange(n)[:, None] * 104729, {}
    )
    assert set(received.unique().tolist()) == {0.0, d / k}
    codes = ((received != 0) * 2 ** torch.arange(d)).sum(1).bincount(minlength=2**d)
    expected = n / math.comb(d, k)
    sets = [sum(2**i for i in chosen) for chosen in combinations(range(d), k)]
    assert int(codes[sets].sum()) == n
    chi_squared = float(((codes[sets] - expected) ** 2 / expected).sum())
    assert chi_squared < 33.7  # 9 degrees of freedom, 1 in 10,000


def test_random_k_has_the_variance_of_its_formula():
    """E‖C(x) − x‖² = (d/k − 1) ‖x‖² without feedback, (1 − k/d) ‖x‖² with it, over all sets."""
    row = draw_rows(1)[0, :6]
    for scale, factor in ((6 / 2, 6 / 2 - 1), (1.0, 1 - 2 / 6)):
        errors = []
        for chosen in combinations(range(6), 2):
            sent = torch.zeros(6).double()
            sent[list(chosen)] = scale * row[list(chosen)]
            errors.append((sent - row).square().sum())
        assert_close(torch.stack(errors).mean(), factor * row.square().sum())
    n = 20_000
    keys = torch.arange(n)[:, None] * 15485863
    received, _ = RandomK(2, error_feedback=False).send(row.expand(n, -1), flat(6), keys, {})
    mean_error = (received - row).square().sum(1).mean()
    assert_close(mean_error, 2 * row.square().sum(), rtol=0.03, atol=0)


@given(numbers, st.integers(1, 200))
@pytest.mark.slow
def test_qsgd_rounds_to_the_neighbouring_levels_with_the_variance_of_the_paper(row, levels):
    """Σ p (1 − p) (‖x‖/s)² ≤ min(d/s², √d/s) ‖x‖², with the exact p of each coordinate."""
    rows = torch.tensor([row], dtype=torch.float64)
    received, _ = send(QSGD(levels), rows)
    norm = float(rows.norm())
    if norm < 1e-30:  # it is sent as 0 or, if float32 has it, by its level
        assert (received.abs() <= norm * (1 + 1e-6)).all()
        return
    places = levels * rows.abs() / norm
    sent = levels * received.abs() / norm
    assert_close(sent, sent.round(), rtol=0, atol=1e-9)
    assert ((sent - places).abs() < 1 + 1e-9).all()
    assert (received * rows >= 0).all()
    p = places - places.floor()
    variance = float((p * (1 - p)).sum()) * (norm / levels) ** 2
    assert variance <= min(D / levels**2, math.sqrt(D) / levels) * norm**2 * (1 + 1e-9)


def test_qsgd_rounds_up_with_the_probability_of_the_paper():
    """In NumPy: a coordinate rounds up exactly if its draw is below s |x| / ‖x‖ − ℓ."""
    for levels, size in ((1, None), (7, None), (3, 8)):
        rows, keys = draw_rows(), draw_keys(range(4))
        received, _ = send(QSGD(levels, size), rows)
        draws = uniforms(keys, torch.arange(-(-D // (size or D)) * (size or D))).numpy()
        for client, row in enumerate(rows.numpy()):
            for begin in range(0, D, size or D):
                x = row[begin : begin + (size or D)]
                norm = np.sqrt((x**2).sum())
                place = levels * np.abs(x) / norm
                level = np.floor(place) + (draws[client, begin : begin + len(x)] < place % 1)
                expected = norm * np.sign(x) * level / levels
                got = received[client, begin : begin + len(x)].numpy()
                np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)


def test_qsgd_sends_large_numbers_without_overflow():
    rows = torch.full((1, D), 1e25)
    assert_close(send(QSGD(127), rows)[0].norm(), rows.norm(), rtol=0.1, atol=0)


@given(numbers)
@pytest.mark.slow
def test_sign_sgd_leaves_out_the_part_of_its_formula(row):
    """‖C(x) − x‖² = ‖x‖² − ‖x‖₁² / d."""
    rows = torch.tensor([row], dtype=torch.float64)
    received, _ = send(SignSGD(error_feedback=False), rows)
    expected = rows.square().sum() - rows.abs().sum() ** 2 / D
    assert_close((received - rows).square().sum(), expected, rtol=1e-9, atol=1e-9)
    assert_close(received.abs(), rows.abs().mean().expand_as(rows))


@given(st.floats(2.0**-90, 2.0**90, width=32))
@pytest.mark.slow
def test_natural_compression_is_unbiased_between_powers_of_two(number):
    """p 2^(a+1) + (1 − p) 2^a = x, and the variance is at most x²/8."""
    lower = 2.0 ** (math.frexp(number)[1] - 1)
    assert lower <= number < 2 * lower
    received, _ = send(NaturalCompression(), torch.full((1, D), number, dtype=torch.float64))
    assert set(received.unique().tolist()) <= {lower, 2 * lower}
    p = number / lower - 1
    draws = uniforms(draw_keys([0]), torch.arange(D))
    assert torch.equal(received == 2 * lower, draws < p)
    assert p * 2 * lower + (1 - p) * lower == pytest.approx(number)
    assert p * (1 - p) * lower**2 <= number**2 / 8 * (1 + 1e-12)


def test_natural_compression_rounds_subnormal_numbers_to_the_smallest_normal_one_or_to_zero():
    tiny = torch.finfo(torch.float32).tiny
    rows = torch.full((400, D), -tiny / 4)
    received, _ = send(NaturalCompression(), rows)
    assert set(received.unique().tolist()) == {-tiny, 0.0}
    assert float((received != 0).float().mean()) == pytest.approx(1 / 4, abs=0.02)


def power_sgd(rows, rank, factors):
    """Algorithm 1 in NumPy for one client with the layout of these tests; Gram–Schmidt, one r."""
    sent, new_factors, begin, offset = rows.copy(), [], 0, 0
    for shape in ((6, 5), (6,), (4, 6)):
        numel = int(np.prod(shape))
        if len(shape) == 2 and rank * sum(shape) < numel:
            matrix = rows[offset : offset + numel].reshape(shape)
            q = factors[begin : begin + shape[1] * rank].reshape(shape[1], rank)
            begin += shape[1] * rank
            p = matrix @ q
            for i in range(rank):
                for j in range(i):
                    p[:, i] -= (p[:, i] @ p[:, j]) * p[:, j]
                p[:, i] /= np.linalg.norm(p[:, i])
            q = matrix.T @ p
            sent[offset : offset + numel] = (p @ q.T).ravel()
            new_factors.append(q.ravel())
        offset += numel
    return sent, np.concatenate(new_factors)


@pytest.mark.parametrize("rank", [1, 2])
def test_power_sgd_equals_its_algorithm_over_rounds(rank):
    codec, memory, n = PowerSGD(rank), None, 3
    first = normals(draw_keys(range(n)), torch.arange(rank * (5 + 6))).double()
    factors = [row.numpy() for row in first]
    errors = [np.zeros(D) for _ in range(n)]
    for round in range(5):
        uploads = draw_rows(n, seed=round)
        received, memory = send(codec, uploads, memory=memory, round=round)
        for client in range(n):
            target = uploads[client].numpy() + errors[client]
            sent, factors[client] = power_sgd(target, rank, factors[client])
            errors[client] = target - sent
            np.testing.assert_allclose(received[client].numpy(), sent, atol=1e-10)
            np.testing.assert_allclose(memory["error"][client].numpy(), errors[client], atol=1e-10)


def test_power_sgd_sends_matrices_of_low_rank_and_biases_without_an_error():
    draw = torch.Generator().manual_seed(0)
    low = torch.randn(6, 1, generator=draw) @ torch.randn(1, 5, generator=draw)
    rows = torch.cat([low.flatten(), torch.randn(6, generator=draw), torch.zeros(24)])[None]
    received, memory = send(PowerSGD(1), rows)
    assert_close(received, rows, rtol=1e-5, atol=1e-5)
    assert memory["factors"][:, :5].any()
    assert not memory["factors"][:, 5:].any(), "the kernel is 0"


def test_power_sgd_comes_closer_to_the_best_approximation_with_each_round():
    """The warm start is a power iteration: its error falls to that of the SVD."""
    codec, rows = PowerSGD(1), draw_rows(1, seed=5)
    matrix = rows[0, :30].view(6, 5)
    best = torch.linalg.svdvals(matrix)[1:].square().sum()
    memory = {"factors": torch.zeros(1, 11).double()}
    errors = []
    for _ in range(40):
        sending = Sending(LAYOUT, draw_keys([0]), memory)
        received = codec.compress(rows, sending)
        memory = {"factors": sending.memory["factors"]}
        errors.append(float((received[0, :30] - rows[0, :30]).square().sum()))
    assert errors == sorted(errors, reverse=True) or max(np.diff(errors)) < 1e-12
    assert errors[-1] == pytest.approx(float(best), rel=1e-6)
    assert errors[0] > float(best)


def test_messages_have_the_bits_of_their_formulas():
    d = D
    for codec, bits in (
        (TopK(7), 7 * 32 + 7 * 6),
        (TopK(50), 50 * 32 + d),  # a bit for each coordinate is shorter than 50 positions
        (RandomK(7), 7 * 32),
        (RandomK(0.25), 15 * 32),
        (QSGD(1), 32 + 2 * d),
        (QSGD(127), 32 + 8 * d),
        (QSGD(128), 32 + 9 * d),
        (QSGD(7, bucket_size=16), 4 * 32 + 4 * d),
        (SignSGD(), 32 + d),
        (NaturalCompression(), 9 * d),
        (PowerSGD(1), 32 * ((6 + 5) + 6 + (4 + 6))),
        (PowerSGD(2), 32 * (2 * (6 + 5) + 6 + 2 * (4 + 6))),
        (PowerSGD(3), 32 * d),  # three times (6 + 5) numbers are no fewer than 30
    ):
        assert codec.count_bits(LAYOUT, 32) == bits, (codec, codec.constructor_arguments)


def test_arguments_out_of_range_are_refused_with_one_sentence():
    for kind in (TopK, RandomK):
        for k in (0, -1, 0.0, 1.5, math.nan):
            with pytest.raises(ValueError, match="Expected argument `k` to be"):
                kind(k)
        for k in ("3", True, None):
            with pytest.raises(TypeError, match="Expected argument `k` to be an integer"):
                kind(k)
        with pytest.raises(ValueError, match=f"`k` to be at most {D} but got {D + 1}"):
            kind(D + 1).check(LAYOUT)
    for make in (lambda: QSGD(0), lambda: QSGD(bucket_size=0), lambda: PowerSGD(0)):
        with pytest.raises(ValueError, match="to be at least 1 but got 0"):
            make()
