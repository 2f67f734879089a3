"""Flipped pairs: labels of source classes, and their success."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table_test

from pl_fed.attacks import FlippedPairs
from pl_fed.types import Batch, ClientContext

CONTEXT = ClientContext(seed=11, round=0, client=2, num_classes=10)


def make_batch(y):
    return Batch(torch.zeros(len(y), 3), y, samples=torch.arange(len(y)))


def test_all_pairs_flip_at_once():
    batch = make_batch(torch.tensor([0, 1, 2, 5, 3, 5]))
    flipped = FlippedPairs({5: 3, 3: 5, 1: 2}).poison(batch, CONTEXT)
    assert flipped.targets.tolist() == [0, 2, 2, 3, 5, 3]
    assert flipped.inputs is batch.inputs


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    pairs=st.dictionaries(st.integers(0, 9), st.integers(0, 9), min_size=1).filter(
        lambda pairs: all(source != target for source, target in pairs.items())
    ),
    seed=st.integers(0, 99),
)
def test_labels_and_mask_equal_a_table_of_numpy(pairs, seed):
    y = torch.randint(10, (50,), generator=torch.Generator().manual_seed(seed))
    table = np.array([pairs.get(label, label) for label in range(10)])
    attack = FlippedPairs(pairs)
    np.testing.assert_array_equal(attack.poison(make_batch(y), CONTEXT).targets, table[y])
    triggered = attack.trigger(make_batch(y))
    np.testing.assert_array_equal(triggered.targets, table[y])
    np.testing.assert_array_equal(triggered.mask, np.isin(y, list(pairs)))


def test_trigger_keeps_inputs_and_the_mask_of_the_batch():
    batch = make_batch(torch.tensor([5, 5, 3]))._replace(mask=torch.tensor([True, False, True]))
    triggered = FlippedPairs({5: 3}).trigger(batch)
    assert triggered.inputs is batch.inputs
    assert triggered.mask.tolist() == [True, False, False]


def test_a_share_of_the_source_class_flips_and_a_sample_keeps_its_draw():
    batch, attack = make_batch(torch.arange(20_000) % 10), FlippedPairs({5: 3}, samples=0.3)
    flipped = attack.poison(batch, CONTEXT).targets
    changed = flipped != batch.targets
    assert (batch.targets[changed] == 5).all()
    assert changed.sum().item() / 2000 == pytest.approx(0.3, abs=0.03)
    assert torch.equal(attack.poison(batch, replace(CONTEXT, round=7)).targets, flipped)
    other = attack.poison(batch, replace(CONTEXT, client=3)).targets
    assert not torch.equal(other, flipped)


@table_test(
    "pairs, error, match",
    [
        ({}, ValueError, "at least one source class"),
        ([5, 3], ValueError, "at least one source class"),
        ({5: 5}, ValueError, "another target but got 5: 5"),
        ({-1: 5}, ValueError, "`pairs`"),
        ({5: 1.5}, TypeError, "`pairs`"),
    ],
)
def test_useless_pairs_are_refused(pairs, error, match):
    with pytest.raises(error, match=match):
        FlippedPairs(pairs)


@table_test("pairs", [{10: 3}, {3: 10}])
@table_test("num_classes", [10, 0])
def test_pairs_are_classes_of_the_data(pairs, num_classes):
    context = replace(CONTEXT, num_classes=num_classes)
    with pytest.raises(ValueError, match=f"some of the {num_classes} classes but got"):
        FlippedPairs(pairs).poison(make_batch(torch.arange(5)), context)
