"""Minibatches: the same one by one and stacked, each pass a permutation, whatever the chunk."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pl_fed.data.augmentation import Augmentation, RandomFlip
from pl_fed.data.batches import Batches, BatchRule, LocalWork
from pl_fed.data.client_data import ClientData, Part
from pl_fed.types import Batch

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def federation(sizes):
    """Data whose samples say who they are: x is [id, 10 id], y is the id; ids are scrambled."""
    total = sum(sizes)
    ids = torch.randperm(total, generator=torch.Generator().manual_seed(1))
    x = torch.stack([torch.arange(total), 10 * torch.arange(total)], dim=1).float()
    part = Part.from_pieces(list(ids.split(sizes)))
    return ClientData(x, torch.arange(total), part, part, part, num_classes=total)


def make_batches(sizes, steps, rule=None, clients=None, seed=0, round=0, **kwargs):
    clients = torch.arange(len(sizes)) if clients is None else torch.tensor(clients)
    steps = [steps] * len(clients) if isinstance(steps, int) else steps
    rule = rule or BatchRule(batch_size=4)
    return Batches(federation(sizes), clients, steps, rule, seed, round, **kwargs)


def ids(minibatches, position):
    """Return the sample ids of a client, one list per step."""
    return [batch.samples.tolist() for batch in minibatches.iterate_client(position)]


def concatenate(lists):
    return [number for numbers in lists for number in numbers]


class Adding(nn.Module):
    """An augmentation that adds a random number to the whole minibatch."""

    def forward(self, x):
        return x + torch.rand(1)


# Number of steps


@pytest.mark.parametrize(
    ("size", "drop_last", "expected"),
    [(12, False, 3), (13, False, 4), (13, True, 3), (3, False, 1), (3, True, 1), (1, True, 1)],
)
def test_number_of_minibatches_of_a_pass(size, drop_last, expected):
    assert BatchRule(batch_size=4, drop_last=drop_last).batches_per_pass(size) == expected


@pytest.mark.parametrize(
    ("work", "limit", "expected"),
    [
        (LocalWork(epochs=2), None, 6),
        (LocalWork(steps=5), None, 5),
        (LocalWork(steps=5, epochs=9), None, 5),
        (LocalWork(epochs=2), 4, 4),
        (LocalWork(epochs=2), 40, 6),
        (LocalWork(epochs=2), 0.5, 3),
        (LocalWork(epochs=2), 0.01, 1),
    ],
)
def test_number_of_steps_of_a_client_with_nine_samples(work, limit, expected):
    assert BatchRule(batch_size=4, limit=limit).count(work, size=9) == expected


# Samples


@quick
@given(
    sizes=st.lists(st.integers(1, 11), min_size=1, max_size=4),
    batch_size=st.integers(1, 12),
    passes=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_every_pass_takes_every_sample_once(sizes, batch_size, passes, shuffle):
    rule = BatchRule(batch_size, shuffle=shuffle)
    steps = [passes * rule.batches_per_pass(size) for size in sizes]
    batches = make_batches(sizes, steps, rule)
    for position, size in enumerate(sizes):
        owned = batches.data.train.samples(position).tolist()
        per_pass = rule.batches_per_pass(size)
        actual = ids(batches, position)
        assert len(actual) == steps[position]
        for begin in range(0, len(actual), per_pass):
            minibatches = actual[begin : begin + per_pass]
            assert sorted(concatenate(minibatches)) == sorted(owned)
            assert [len(samples) for samples in minibatches[:-1]] == [batch_size] * (per_pass - 1)


@pytest.mark.slow
@quick
@given(
    sizes=st.lists(st.integers(1, 11), min_size=1, max_size=4),
    batch_size=st.integers(1, 12),
    steps=st.lists(st.integers(1, 7), min_size=4, max_size=4),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    changes=st.sampled_from(["", "augment", "poison", "both"]),
)
def test_stacked_minibatches_equal_minibatches_one_by_one(
    sizes, batch_size, steps, drop_last, shuffle, changes
):
    augment = Adding() if changes in ("augment", "both") else None
    poison = {0: poison_labels} if changes in ("poison", "both") else None
    rule = BatchRule(batch_size, drop_last, shuffle)
    steps = steps[: len(sizes)]
    batches = make_batches(sizes, steps, rule, augment=augment, poison=poison)
    singles = [list(batches.iterate_client(position)) for position in range(len(sizes))]
    assert batches.max_steps == max(steps)
    for step in range(max(steps)):
        stacked = batches.stack_step(step)
        assert stacked.inputs.shape[:2] == stacked.targets.shape == stacked.mask.shape
        for position, own in enumerate(singles):
            count = int(stacked.mask[position].sum())
            assert stacked.mask[position, :count].all()
            assert count == (len(own[step].targets) if step < len(own) else 0)
            if count:
                for name in ("inputs", "targets", "samples"):
                    actual = getattr(stacked, name)[position, :count]
                    assert torch.equal(actual, getattr(own[step], name))


def poison_labels(batch):
    return batch._replace(targets=batch.targets + 1000)


def test_targets_match_their_samples():
    for batch in make_batches([9, 3], 5).iterate_client(0):
        assert torch.equal(batch.inputs[:, 0].long(), batch.samples)
        assert torch.equal(batch.targets, batch.samples)
        assert batch.mask is None


def test_partial_last_minibatch_has_its_true_size():
    assert [len(samples) for samples in ids(make_batches([10], 4), 0)] == [4, 4, 2, 4]


def test_drop_last_excludes_the_partial_minibatch_of_every_pass():
    batches = make_batches([10], 5, BatchRule(4, drop_last=True))
    assert [len(samples) for samples in ids(batches, 0)] == [4] * 5
    actual = ids(batches, 0)
    assert len(set(concatenate(actual[:2]))) == len(set(concatenate(actual[2:4]))) == 8


def test_drop_last_keeps_a_single_minibatch():
    assert [
        len(samples) for samples in ids(make_batches([3], 2, BatchRule(4, drop_last=True)), 0)
    ] == [3, 3]


def test_order_without_shuffling_is_that_of_the_clients_samples():
    batches = make_batches([6, 5], 3, BatchRule(4, shuffle=False))
    own = batches.data.train.samples(0).tolist()
    assert ids(batches, 0) == [own[:4], own[4:], own[:4]]


def test_mask_is_empty_after_the_last_step_of_a_client():
    batches = make_batches([9, 9], [3, 1])
    assert batches.stack_step(1).mask.sum(dim=1).tolist() == [4, 0]
    assert len(ids(batches, 1)) == 1


# What the order depends on


def test_orders_differ_between_passes_rounds_clients_and_seeds():
    sizes = [40, 40]
    rule = BatchRule(40)
    first, second = ids(make_batches(sizes, 2, rule), 0)
    (other_round,) = ids(make_batches(sizes, 1, rule, round=1), 0)
    (other_seed,) = ids(make_batches(sizes, 1, rule, seed=1), 0)
    own = make_batches(sizes, 1, rule).data.train.samples(0).tolist()
    orders = [own, first, second, other_round, other_seed]
    assert len({tuple(order) for order in orders}) == 5
    places = []
    for client in range(2):
        batches = make_batches(sizes, 1, rule)
        samples = batches.data.train.samples(client).tolist()
        places.append([samples.index(sample) for sample in concatenate(ids(batches, client))])
    assert places[0] != places[1]


@pytest.mark.slow
def test_every_sample_comes_first_equally_often():
    """2,000 rounds of 8 samples: every sample is first 250 times, within 5 standard deviations."""
    firsts = [ids(make_batches([8], 1, round=round), 0)[0][0] for round in range(2000)]
    counts = torch.tensor(firsts).bincount(minlength=8)
    assert counts.sub(250).abs().max() < 5 * (2000 * 1 / 8 * 7 / 8) ** 0.5


@pytest.mark.slow
@quick
@given(st.permutations(range(4)), st.integers(1, 4))
def test_minibatches_of_a_client_do_not_depend_on_the_chunk(order, length):
    sizes, steps = [9, 2, 5, 12], [4, 1, 6, 2]
    all_batches = make_batches(sizes, steps, augment=Adding())
    chunk = order[:length]
    part = make_batches(sizes, [steps[k] for k in chunk], clients=chunk, augment=Adding())
    for position, client in enumerate(chunk):
        pairs = zip(part.iterate_client(position), all_batches.iterate_client(client), strict=True)
        for actual, expected in pairs:
            assert torch.equal(actual.inputs, expected.inputs)
            assert torch.equal(actual.samples, expected.samples)


def test_longer_runs_start_with_the_same_minibatches():
    short, long = make_batches([9], 2), make_batches([9], 6)
    assert ids(long, 0)[:2] == ids(short, 0)


# Attacks and augmentation


def test_poison_changes_only_its_client():
    batches = make_batches([5, 5], 2, poison={1: poison_labels})
    for position in range(2):
        for batch in batches.iterate_client(position):
            assert torch.equal(batch.targets, batch.samples + 1000 * position)


def test_poison_is_selected_by_client_id():
    batches = make_batches([5, 5, 5], 1, clients=[2, 0], poison={0: poison_labels})
    assert [
        int(batch.targets.min()) >= 1000 for p in range(2) for batch in batches.iterate_client(p)
    ] == [
        False,
        True,
    ]


def test_poisoning_changes_no_data():
    batches = make_batches(
        [5], 3, poison={0: lambda batch: batch._replace(targets=batch.targets.zero_())}
    )
    list(batches.iterate_client(0)), batches.stack_step(0)
    assert torch.equal(batches.data.targets, torch.arange(5))


def test_large_samples_gathered_step_by_step_are_equal(monkeypatch):
    all_batches = [
        list(make_batches([9, 5], 5, poison={0: poison_labels}).iterate_client(k)) for k in range(2)
    ]
    monkeypatch.setattr("pl_fed.data.batches._GATHER_BYTES", 0)
    steps = [
        list(make_batches([9, 5], 5, poison={0: poison_labels}).iterate_client(k)) for k in range(2)
    ]
    for expected, batch in zip(concatenate(all_batches), concatenate(steps), strict=True):
        assert all(torch.equal(expected[i], batch[i]) for i in (0, 1, 3))


def encode_visits(batch):
    """Tell a sample's visits from one another."""
    return batch._replace(targets=batch.samples + 1000 * (1 + batch.visits))


class Idle(nn.Module):
    """The identity as an augmentation; inputs are gathered step by step."""

    def forward(self, x):
        return x


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "gathers", ["at once", "in steps", "by twos", "augmented", "stacked", "stacked by twos"]
)
def test_attacks_receive_the_number_of_visits_of_a_sample(monkeypatch, gathers, drop_last):
    """Nine samples by fours, five steps: two passes, the second cut short."""
    if gathers != "at once":
        two_steps = 2 * 4 * make_batches([9, 3], 1).data.inputs[0].nbytes
        at_once = two_steps if "twos" in gathers else 0 if gathers == "in steps" else 1 << 20
        monkeypatch.setattr("pl_fed.data.batches._GATHER_BYTES", at_once)
    rule = BatchRule(4, drop_last=drop_last)
    augment = Idle() if gathers == "augmented" else None
    batches = make_batches(
        [9, 3], [5, 2], rule, poison={0: encode_visits, 1: encode_visits}, augment=augment
    )
    for position, passes in enumerate(([0, 0, 1, 1, 2] if drop_last else [0, 0, 0, 1, 1], [0, 1])):
        for step, visit in enumerate(passes):
            if gathers.startswith("stacked"):
                batch = batches.stack_step(step)
                batch = Batch(*(None if value is None else value[position] for value in batch))
            else:
                batch = list(batches.iterate_client(position))[step]
            mask = slice(None) if batch.mask is None else batch.mask
            expected = batch.samples[mask] + 1000 * (1 + visit)
            assert torch.equal(batch.targets[mask], expected)
            assert batch.visits is None, "clients are not told"


def test_augmentation_differs_between_steps_rounds_and_clients():
    shifts = [
        float((batch.inputs[:, 0] - batch.samples)[0])
        for number in range(2)
        for client in range(2)
        for batch in make_batches([9, 9], 3, round=number, augment=Adding()).iterate_client(client)
    ]
    assert len({round(shift, 4) for shift in shifts}) == len(shifts) == 12


class AddingOutsideOfTorch(nn.Module):
    """An augmentation that adds random numbers of NumPy and Python to the whole minibatch."""

    def forward(self, x):
        return x + np.random.rand() + random.random()  # noqa: NPY002


def test_draws_of_numpy_and_python_depend_on_the_client_and_the_step_alone():
    """An earlier client, or an earlier draw of the process, changed them."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    augment = AddingOutsideOfTorch()
    both = make_batches([9, 9], 3, augment=augment)
    _, second = ([b.inputs - b.samples[:, None] for b in both.iterate_client(k)] for k in range(2))
    alone = make_batches([9, 9], 3, augment=augment).iterate_client(1)
    for step, (shift, batch) in enumerate(zip(second, alone, strict=True)):
        assert torch.equal(shift, batch.inputs - batch.samples[:, None])
        stacked = both.stack_step(step)
        own = (stacked.inputs - stacked.samples[..., None])[1][stacked.mask[1]]
        assert torch.equal(shift, own)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # noqa: NPY002


def test_keyed_module_has_the_same_draws_beside_one_without_keys():
    def inputs(*modules):
        """Return the inputs of all minibatches, one by one and stacked."""
        batches = make_batches([9, 9], 3, round=1, augment=Augmentation([RandomFlip(), *modules]))
        stacked = map(batches.stack_step, range(3))
        one_by_one = [batch.inputs for k in range(2) for batch in batches.iterate_client(k)]
        return [*one_by_one, *(batch.inputs[batch.mask] for batch in stacked)]

    assert all(map(torch.equal, inputs(), inputs(nn.Identity())))


def test_augmentation_does_not_use_the_generator_of_torch():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    list(make_batches([9], 3, augment=Adding()).iterate_client(0))
    assert torch.equal(torch.rand(1), expected)
