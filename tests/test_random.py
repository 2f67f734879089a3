"""The keyed random numbers: published values, distributions and independence."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest, norm

from pl_fed.random import generator, integers, key, mix, normals, random_bits, uniforms

GAMMA = 0x9E3779B97F4A7C15
COUNTERS = torch.arange(50_000)
EXPECTED_KEY = 3996241534076482386  # the key of the text "0/batches/3"


def signed(number):
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


def reference_mix(z):
    """Return SplitMix64's output in Python's unbounded integers."""
    z &= 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return z ^ (z >> 31)


def test_mix_gives_splitmix64s_published_sequence():
    states = torch.tensor([signed(step * GAMMA) for step in (1, 2, 3)])
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix(states).tolist() == [signed(number) for number in expected]


def test_random_bits_equal_a_reference_in_unbounded_integers():
    keys, counters = [0, 1, -1, key(5, "x"), 2**63 - 1, -(2**63)], [0, 1, 17, 2**40, 2**62]
    for k, i in itertools.product(keys, counters):
        expected = signed(reference_mix(reference_mix(i * GAMMA + k) + GAMMA))
        assert random_bits(k, torch.tensor([i])).item() == expected


def test_keys_are_the_same_in_every_process_and_version():
    assert key(0, "batches", 3) == EXPECTED_KEY
    assert -(2**63) <= EXPECTED_KEY < 2**63


def test_keys_differ_by_seed_purpose_and_parts():
    arguments = [
        (seed, purpose, *parts)
        for seed in (0, 1, 11)
        for purpose in ("batches", "cohort")
        for parts in ((), (0,), (1,), (11,), (1, 1), (0, 1), (1, 0), (1, 11), (11, 1))
    ]
    assert len({key(*key_arguments) for key_arguments in arguments}) == len(arguments)


def test_tensors_and_numpy_numbers_are_accepted_as_parts():
    assert key(0, "x", torch.tensor(3)) == key(0, "x", np.int64(3)) == key(0, "x", 3)


@pytest.mark.parametrize("seed", range(5))
def test_uniforms_are_uniform(seed):
    numbers = uniforms(key(seed, "test"), COUNTERS)
    assert numbers.dtype == torch.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert kstest(numbers.double().numpy(), "uniform").pvalue > 0.001


@pytest.mark.parametrize("seed", range(5))
def test_normals_are_normal(seed):
    numbers = normals(key(seed, "test"), COUNTERS)
    assert numbers.dtype == torch.float32
    assert kstest(numbers.double().numpy(), norm.cdf).pvalue > 0.001
    bound = 4 / len(COUNTERS) ** 0.5
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < bound


def test_normals_equal_the_box_muller_formula():
    """The formula uses the uniforms of two neighbouring counters."""
    u, v = uniforms(3, torch.tensor([14, 15])).tolist()
    expected = math.sqrt(-2 * math.log(1 - u)) * math.cos(2 * math.pi * v)
    assert normals(3, torch.tensor([7])).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_normals_are_finite():
    numbers = normals(key(0, "test"), torch.arange(2_000_000))
    assert numbers.isfinite().all()
    assert 4.5 < numbers.abs().max() < 5.8


def test_largest_uniform_is_below_one():
    # 24 bits fit a float32 exactly; one more would round up to 1
    numbers = uniforms(key(0, "test"), torch.arange(2_000_000))
    scaled = numbers.double() * 2**24
    assert torch.equal(scaled, scaled.round())
    assert numbers.max().item() <= 1 - 2**-24


def test_neighbouring_counters_and_keys_are_not_correlated():
    keys = torch.tensor([key(0, "test", client) for client in range(2)]).unsqueeze(1)
    first, second = uniforms(keys, COUNTERS).double().numpy()
    adjacent = uniforms(torch.tensor([[7], [8]]), COUNTERS).double().numpy()
    bound = 4 / len(COUNTERS) ** 0.5
    assert abs(np.corrcoef(first, second)[0, 1]) < bound
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < bound
    assert abs(np.corrcoef(*adjacent)[0, 1]) < bound


def test_numbers_of_different_keys_do_not_overlap():
    # key + i·γ overlaps for keys that lie a multiple of γ apart. Hashed keys do not.
    keys = [key(0, "test", client) for client in range(200)]
    numbers = random_bits(torch.tensor(keys).unsqueeze(1), torch.arange(1000))
    assert numbers.unique().numel() == numbers.numel()


@pytest.mark.parametrize("high", [1, 2, 3, 10, 62, 1000])
def test_integers_are_uniform_below_high(high):
    counts = integers(key(1, "test", high), COUNTERS, high).bincount(minlength=high)
    assert len(counts) == high
    if high > 1:
        assert chisquare(counts.numpy()).pvalue > 0.001


def test_number_does_not_depend_on_the_other_counters():
    numbers = uniforms(key(0, "test"), COUNTERS)
    order = torch.randperm(len(COUNTERS), generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniforms(key(0, "test"), COUNTERS[order]), numbers[order])
    assert torch.equal(uniforms(key(0, "test"), COUNTERS[17:19]), numbers[17:19])


@pytest.mark.parametrize("draw", [uniforms, normals, random_bits, lambda k, i: integers(k, i, 10)])
def test_eager_broadcast_and_vmap_agree_bit_for_bit(draw):
    keys = torch.tensor([key(0, "test", client) for client in range(6)])
    counters = torch.arange(1000)
    one_by_one = torch.stack([draw(k.item(), counters) for k in keys])
    assert torch.equal(draw(keys.unsqueeze(1), counters), one_by_one)
    mapped = torch.func.vmap(draw, in_dims=(0, None))(keys, counters)
    assert torch.equal(mapped, one_by_one)


def test_generators_depend_on_the_key_only():
    def draws(*question):
        return torch.rand(4, generator=generator(*question))

    assert torch.equal(draws(0, "split", 1), draws(0, "split", 1))
    assert not torch.equal(draws(0, "split", 1), draws(0, "split", 2))
