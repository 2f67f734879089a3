"""The distributed backdoor: the pixels of the authors' code, and the attackers' parts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table_test

from pl_fed.aggregators import Mean
from pl_fed.attacks import Backdoor, Combined, DistributedBackdoor, ModelReplacement
from pl_fed.types import Batch, ClientContext, RoundContext

ATTACKERS = (3, 8, 11, 20, 21)
CONTEXT = ClientContext(seed=1, round=0, client=3, num_classes=10, attackers=ATTACKERS)
MNIST = {"size": 4, "gap": 2}
CIFAR = {"size": 6, "gap": 3}
PARTS = {  # (row, columns), from `mnist_params.yaml` and `cifar_params.yaml` of the authors' code
    "mnist": (MNIST, 28, [(0, "0123"), (0, "6789"), (3, "0123"), (3, "6789")]),
    "cifar": (
        CIFAR,
        32,
        [(0, range(6)), (0, range(9, 15)), (4, range(6)), (4, range(9, 15))],
    ),
}


def black_images(shape, n=1):
    return Batch(torch.zeros(n, *shape), torch.arange(n) % 10, samples=torch.arange(n))


def bright_pixels(images):
    return {(int(row), int(column)) for row, column in images[0, 0].nonzero()}


@pytest.mark.parametrize("data", PARTS)
def test_parts_are_the_pixels_of_the_authors_code(data):
    arguments, width, expected = PARTS[data]
    attack = DistributedBackdoor(2, samples=1.0, value=1.0, **arguments)
    batch = black_images((3, width, width))
    pixels = [{(row, int(column)) for column in columns} for row, columns in expected]
    for rank, attacker in enumerate(ATTACKERS):  # the fifth attacker has part 0 again
        poisoned = attack.poison(batch, replace(CONTEXT, client=attacker))
        assert bright_pixels(poisoned.inputs) == pixels[rank % 4]
        assert poisoned.targets.tolist() == [2]
        assert torch.equal(poisoned.inputs[:, 0], poisoned.inputs[:, 2]), "all channels"
    triggered = attack.trigger(batch)
    assert bright_pixels(triggered.inputs) == set().union(*pixels)
    assert int(triggered.inputs.sum()) == 3 * sum(map(len, pixels))


def stamp_with_numpy(x, part, size, gap, shift):
    """Return a copy of images [n, height, width] with a part as bright as the brightest pixel."""
    stamped = x.copy()
    for offset in range(size):
        row = int(np.floor(part / 2)) * (gap + 1) + shift
        stamped[:, row, (part % 2) * (size + gap) + offset + shift] = x.max(axis=(1, 2))
    return stamped


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    parts=st.integers(1, 6),
    size=st.integers(1, 4),
    gap=st.integers(0, 3),
    shift=st.integers(0, 2),
    rank=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_stamped_images_equal_those_of_numpy(parts, size, gap, shift, rank, seed):
    height, width = 2 * (1 + gap) + 1 + shift, 2 * size + gap + shift
    x = torch.rand(5, height, width, generator=torch.Generator().manual_seed(seed))
    batch = Batch(x, torch.arange(5), samples=torch.arange(5))
    attack = DistributedBackdoor(2, 1.0, parts=parts, size=size, gap=gap, shift=shift)
    poisoned = attack.poison(batch, replace(CONTEXT, client=ATTACKERS[rank])).inputs
    expected = stamp_with_numpy(x.numpy(), rank % parts, size, gap, shift)
    np.testing.assert_array_equal(poisoned.numpy(), expected)
    together = x.numpy()
    for part in range(parts):
        together = stamp_with_numpy(together, part, size, gap, shift)
    np.testing.assert_array_equal(attack.trigger(batch).inputs.numpy(), together)


def test_a_client_that_is_no_attacker_takes_the_part_of_its_id():
    attack = DistributedBackdoor(2, samples=1.0, value=1.0)
    batch, corrupted = black_images((1, 28, 28)), replace(CONTEXT, client=6, attackers=())
    expected = attack.poison(batch, replace(CONTEXT, client=ATTACKERS[2])).inputs  # 6 mod 4 = 2
    assert torch.equal(attack.poison(batch, corrupted).inputs, expected)


def test_stamped_samples_are_those_of_a_backdoor_with_the_same_share():
    batch = black_images((1, 28, 28), n=4000)
    poisoned = DistributedBackdoor(2, samples=0.3, value=1.0).poison(batch, CONTEXT)
    same = Backdoor(2, samples=0.3, value=1.0).poison(batch, CONTEXT)
    assert torch.equal(poisoned.targets, same.targets)
    assert poisoned.inputs.flatten(1).any(1).double().mean().item() == pytest.approx(0.3, abs=0.03)


def test_single_shot_replaces_the_global_model():
    """η / n · γ = 0.1 / 10 · 100 = 1: the scaled upload of one attacker moves w to its model."""
    attack = Combined([DistributedBackdoor(2), ModelReplacement(factor=100.0)])
    own, honest = torch.tensor([[0.3, -0.7]], dtype=torch.float64), torch.zeros(9, 2).double()
    context = RoundContext(clients=torch.arange(10), attackers=torch.tensor([9]))
    rows = torch.cat([honest, attack.forge(honest, own, context)])
    moved = 0.1 * Mean()(rows, torch.ones(10), context)
    torch.testing.assert_close(moved, own[0], rtol=0, atol=1e-15)


@table_test(
    "shape, arguments, pixels",
    [
        ((1, 8, 8), MNIST, "4 x 10"),
        ((3, 4, 32), CIFAR, "5 x 15"),
        ((64,), MNIST, "4 x 10"),
        ((1, 28, 11), {**MNIST, "shift": 2}, "6 x 12"),
        ((1, 3, 28), {**MNIST, "parts": 3}, "4 x 10"),
    ],
)
def test_too_small_images_and_flat_inputs_are_refused(shape, arguments, pixels):
    attack = DistributedBackdoor(2, samples=1.0, **arguments)
    with pytest.raises(ValueError, match=f"images of at least {pixels} pixels .* but got shape"):
        attack.trigger(black_images(shape))
    with pytest.raises(ValueError, match="reduce `size` or `gap`, or use Backdoor"):
        attack.poison(black_images(shape), CONTEXT)


def test_smallest_images_hold_the_trigger():
    for parts, shape in ((1, (1, 4)), (2, (1, 10)), (4, (4, 10))):
        attack = DistributedBackdoor(2, value=1.0, parts=parts, **MNIST)
        assert int(attack.trigger(black_images((1, *shape))).inputs.sum()) == 4 * parts


@table_test(
    "arguments, name",
    [
        ({"parts": 0}, "parts"),
        ({"size": 0}, "size"),
        ({"gap": -1}, "gap"),
        ({"shift": -1}, "shift"),
        ({"samples": 1.5}, "samples"),
        ({"value": float("nan")}, "value"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        DistributedBackdoor(2, **arguments)


def test_target_is_a_class_of_the_data():
    with pytest.raises(ValueError, match="`target` to be one of the 10 classes but got 10"):
        DistributedBackdoor(10).poison(black_images((1, 28, 28)), CONTEXT)
