"""Keyed augmentations: one call for all clients, and draws of each sample by its key."""

import pytest
import torch
from small_federations import classes, run_rounds, seeded, sgd, shared_out
from torch import nn

from pl_fed.clients import FedAvg
from pl_fed.data import KeyedAugmentation, RandomFlip, RandomShift
from pl_fed.data.augmentation import Augmentation
from pl_fed.random import uniforms

SHAPE = (1, 4, 4)
KEYS = torch.arange(1000)


class Counting(KeyedAugmentation):
    """Adds a draw to each sample, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, inputs, keys):
        self.calls += 1
        draws = uniforms(keys, torch.zeros_like(keys)).to(inputs)
        return inputs + draws.view(-1, *([1] * (inputs.dim() - 1)))


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def run(augment, sizes=(9, 4, 6), **settings):
    """Run two rounds of clients of unequal sizes."""
    client = FedAvg(seeded(net), optimizer=sgd(0.1), local_epochs=2)
    return run_rounds(client, shared_out(classes(list(sizes), SHAPE), augment=augment), **settings)


def test_flip_mirrors_a_share_of_the_images():
    images = torch.rand(1000, *SHAPE)
    flipped = RandomFlip(0.3)(images, KEYS)
    is_flipped = (flipped != images).flatten(1).any(1)
    assert torch.equal(flipped[is_flipped], images[is_flipped].flip(-1))
    assert is_flipped.float().mean() == pytest.approx(0.3, abs=0.05)


def test_shift_moves_each_image_as_a_whole_with_zeros_behind_it():
    images = torch.rand(1000, 2, 4, 5) + 1
    moved, places = RandomShift(1)(images, KEYS), set()
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    for image, source in zip(moved, padded):
        found = [
            (down, right)
            for down in range(3)
            for right in range(3)
            if torch.equal(image, source[:, down : down + 4, right : right + 5])
        ]
        assert len(found) == 1
        places |= {*found}
    assert len(places) == 9


def test_modules_of_one_augmentation_have_draws_of_their_own():
    twice = Augmentation([RandomFlip(0.5), RandomFlip(0.5)])
    images = torch.rand(1000, *SHAPE)
    is_same = (twice(images, KEYS) == images).flatten(1).all(1)
    assert is_same.float().mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_engines_and_chunks_agree(engine):
    augment = [RandomFlip(), RandomShift(1)]
    expected = run(augment, engine="one_by_one")
    for size in (None, 1, 2):
        assert expected.distance(run(augment, engine=engine, chunk_size=size)) <= 1e-12
    assert expected.distance(run([nn.Identity()])) > 1e-3


def test_draws_do_not_depend_on_other_clients():
    """A client alone has the draws that it has among others."""
    images = torch.zeros(9, *SHAPE)
    alone, together = Counting(), Counting()
    assert torch.equal(alone(images[:3], KEYS[:3]), together(images, KEYS[:9])[:3])


def test_stack_augments_all_clients_by_one_call():
    counts = {}
    for clients in (2, 6):
        module = Counting()
        run([module], sizes=[8] * clients, rounds=1, engine="stacked")
        counts[clients] = module.calls
    assert counts[2] == counts[6]


@pytest.mark.slow
def test_a_module_without_keys_beside_it_is_called_for_each_client():
    mixed = Augmentation([RandomFlip(), nn.Identity()])
    assert not mixed.is_keyed
    assert run([RandomFlip(), nn.Identity()]).distance(
        run([RandomFlip(), nn.Identity()], engine="stacked")
    ) <= 1e-12  # fmt: skip


def test_a_function_alone_augments_and_transforms():
    data = shared_out(classes([4], SHAPE), augment=torch.neg, transforms=torch.neg)
    assert data.augment.modules == (torch.neg,)
    assert data.transforms == [torch.neg]
