"""The attacks on labels, number by number."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2_contingency, chisquare
from tables import table_test

from pl_fed.attacks import FlippedLabels, RandomLabels
from pl_fed.random import integers, key
from pl_fed.types import Batch, ClientContext

CONTEXT = ClientContext(seed=11, round=0, client=2, num_classes=10)


def make_batch(y):
    return Batch(torch.zeros(len(y), 3), y, samples=torch.arange(len(y)))


def random_labels(n=20_000, redraw=False, **changes):
    context = replace(CONTEXT, **changes)
    return (
        RandomLabels(redraw).poison(make_batch(torch.zeros(n, dtype=torch.int64)), context).targets
    )


def test_flipped_labels_equal_a_hand_computed_example():
    y = torch.tensor([0, 3, 9])
    assert FlippedLabels().poison(make_batch(y), CONTEXT).targets.tolist() == [9, 6, 0]
    binary = replace(CONTEXT, num_classes=2)
    flipped = FlippedLabels().poison(make_batch(torch.tensor([0, 1, 1])), binary)
    assert flipped.targets.tolist() == [1, 0, 0]


def test_flipping_twice_gives_the_labels_back():
    batch = make_batch(torch.arange(10))
    attack = FlippedLabels()
    assert torch.equal(attack.poison(attack.poison(batch, CONTEXT), CONTEXT).targets, batch.targets)


def test_flipping_needs_no_sample_ids():
    batch = Batch(torch.zeros(2, 1), torch.tensor([0, 1]))
    assert FlippedLabels().poison(batch, CONTEXT).targets.tolist() == [9, 8]


def test_random_labels_are_the_documented_draw():
    expected = integers(key(11, "random-labels", 2), torch.arange(50), 10)
    assert torch.equal(random_labels(50), expected)


@pytest.mark.parametrize("num_classes", [2, 10, 62])
def test_random_labels_are_uniform(num_classes):
    counts = random_labels(num_classes=num_classes).bincount(minlength=num_classes)
    assert len(counts) == num_classes
    assert chisquare(counts.numpy()).pvalue > 0.001


def test_random_labels_do_not_depend_on_the_true_label():
    true = torch.arange(20_000) % 10
    labels_drawn = RandomLabels().poison(make_batch(true), CONTEXT).targets
    table = torch.bincount(true * 10 + labels_drawn, minlength=100).reshape(10, 10)
    assert chi2_contingency(table.numpy()).pvalue > 0.001
    assert torch.equal(labels_drawn, random_labels())  # so the true label may come out, by chance


def test_a_sample_keeps_its_random_label_from_round_to_round():
    assert torch.equal(random_labels(round=0), random_labels(round=9))


def test_redrawn_labels_differ_from_round_to_round():
    first, second = (random_labels(redraw=True, round=number) for number in (0, 1))
    assert (first == second).double().mean().item() == pytest.approx(0.1, abs=0.01)
    assert torch.equal(first, random_labels(redraw=True, round=0))


@pytest.mark.parametrize("change", [{"client": 3}, {"seed": 12}, {"redraw": True}])
def test_clients_seeds_and_modes_draw_independently(change):
    agreement = (random_labels() == random_labels(**change)).double().mean().item()
    assert agreement == pytest.approx(0.1, abs=0.01)


def test_every_element_of_a_dense_target_draws_its_own_label():
    y = torch.zeros(100, 8, 8, dtype=torch.int64)
    batch = Batch(torch.zeros(100, 1, 8, 8), y, samples=torch.arange(100))
    labels = RandomLabels().poison(batch, CONTEXT).targets
    assert labels.shape == y.shape
    assert chisquare(labels.flatten().bincount(minlength=10).numpy()).pvalue > 0.001
    assert len(torch.unique(labels.flatten(1), dim=0)) == 100
    single = Batch(batch.inputs[7:8], y[7:8], samples=torch.tensor([7]))
    assert torch.equal(RandomLabels().poison(single, CONTEXT).targets, labels[7:8])


@table_test("attack", [RandomLabels(), RandomLabels(redraw=True), FlippedLabels()])
def test_real_valued_targets_are_refused(attack):
    with pytest.raises(ValueError, match=r"Expected argument `context.num_classes` .* but got 0\."):
        attack.poison(make_batch(torch.rand(3)), replace(CONTEXT, num_classes=0))


def test_random_labels_need_the_sample_ids():
    batch = Batch(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"Expected argument `batch.samples` .* but got None"):
        RandomLabels().poison(batch, CONTEXT)


@pytest.mark.parametrize("redraw", ["yes", 1, None])
def test_redraw_is_a_bool_or_access(redraw):
    match = f'Expected argument `redraw` to be a bool or "access" but got {redraw!r}'
    with pytest.raises(TypeError, match=match):
        RandomLabels(redraw)


def labels_at_visit(visit, round=0, n=20_000):
    batch = make_batch(torch.zeros(n, dtype=torch.int64))
    batch = batch._replace(visits=torch.full((n,), visit))
    return RandomLabels("access").poison(batch, replace(CONTEXT, round=round)).targets


def test_labels_drawn_at_every_access_differ_from_pass_to_pass_and_round_to_round():
    labels_drawn = [labels_at_visit(visit, round) for round in (0, 1) for visit in (0, 1, 2)]
    for i, labels in enumerate(labels_drawn):
        assert chisquare(labels.bincount(minlength=10).numpy()).pvalue > 0.001
        for earlier_labels in labels_drawn[:i]:
            assert (labels == earlier_labels).double().mean().item() == pytest.approx(0.1, abs=0.01)


def test_first_access_equals_the_draw_of_the_round():
    """So it is where visits are not counted, as over all training data at once."""
    first = random_labels(redraw=True, round=4)
    assert torch.equal(labels_at_visit(0, round=4), first)
    assert torch.equal(random_labels(redraw="access", round=4), first)


def test_every_element_of_a_dense_target_draws_its_own_label_at_every_access():
    batch = Batch(
        torch.zeros(2, 1, 8, 8),
        torch.zeros(2, 8, 8, dtype=torch.int64),
        samples=torch.tensor([5, 5]),
        visits=torch.tensor([1, 2]),
    )
    labels = RandomLabels("access").poison(batch, CONTEXT).targets
    assert chisquare(labels.flatten().bincount(minlength=10).numpy()).pvalue > 0.001
    assert not torch.equal(labels[0], labels[1])


@pytest.mark.parametrize("attack", [RandomLabels(), FlippedLabels()])
def test_poisoned_batch_shares_the_inputs_tensor(attack):
    batch = make_batch(torch.arange(10))
    assert attack.poison(batch, CONTEXT).inputs is batch.inputs
