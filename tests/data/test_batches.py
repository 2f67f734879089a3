"""Minibatches: the same one by one and stacked, each pass a permutation, whatever the chunk."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

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


def batches(sizes, steps, rule=None, clients=None, seed=0, round=0, **kwargs):
    clients = torch.arange(len(sizes)) if clients is None else torch.tensor(clients)
    steps = [steps] * len(clients) if isinstance(steps, int) else steps
    rule = rule or BatchRule(batch_size=4)
    return Batches(federation(sizes), clients, steps, rule, seed, round, **kwargs)


def ids(batches, position):
    """The sample ids of each step of a client."""
    return [batch.samples.tolist() for batch in batches.iterate_client(position)]


def joined(lists):
    return [number for each in lists for number in each]


class Adding(nn.Module):
    """An augmentation that adds a random number to the whole minibatch."""

    def forward(self, x):
        return x + torch.rand(1)


# How many steps


@pytest.mark.parametrize(
    ("size", "drop_last", "expected"),
    [(12, False, 3), (13, False, 4), (13, True, 3), (3, False, 1), (3, True, 1), (1, True, 1)],
)
def test_minibatches_of_a_pass(size, drop_last, expected):
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
def test_steps_of_a_client_of_nine(work, limit, expected):
    assert BatchRule(batch_size=4, limit=limit).count(work, size=9) == expected


# Which samples


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
    made = batches(sizes, steps, rule)
    for position, size in enumerate(sizes):
        owned = made.data.train.samples(position).tolist()
        per_pass = rule.batches_per_pass(size)
        found = ids(made, position)
        assert len(found) == steps[position]
        for begin in range(0, len(found), per_pass):
            one = found[begin : begin + per_pass]
            assert sorted(joined(one)) == sorted(owned)
            assert [len(each) for each in one[:-1]] == [batch_size] * (per_pass - 1)


@quick
@given(
    sizes=st.lists(st.integers(1, 11), min_size=1, max_size=4),
    batch_size=st.integers(1, 12),
    steps=st.lists(st.integers(1, 7), min_size=4, max_size=4),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    changes=st.sampled_from(["", "augment", "poison", "both"]),
)
def test_stacked_minibatches_are_those_of_one_by_one(
    sizes, batch_size, steps, drop_last, shuffle, changes
):
    augment = Adding() if changes in ("augment", "both") else None
    poison = {0: poisoned} if changes in ("poison", "both") else None
    rule = BatchRule(batch_size, drop_last, shuffle)
    steps = steps[: len(sizes)]
    made = batches(sizes, steps, rule, augment=augment, poison=poison)
    singles = [list(made.iterate_client(position)) for position in range(len(sizes))]
    assert made.max_steps == max(steps)
    for step in range(max(steps)):
        stacked = made.stack_step(step)
        assert stacked.inputs.shape[:2] == stacked.targets.shape == stacked.mask.shape
        for position, own in enumerate(singles):
            count = int(stacked.mask[position].sum())
            assert stacked.mask[position, :count].all()
            assert count == (len(own[step].targets) if step < len(own) else 0)
            if count:
                for name in ("inputs", "targets", "samples"):
                    found = getattr(stacked, name)[position, :count]
                    assert torch.equal(found, getattr(own[step], name))


def poisoned(batch):
    return batch._replace(targets=batch.targets + 1000)


def test_samples_and_targets_belong_together():
    for batch in batches([9, 3], 5).iterate_client(0):
        assert torch.equal(batch.inputs[:, 0].long(), batch.samples)
        assert torch.equal(batch.targets, batch.samples)
        assert batch.mask is None


def test_a_partial_last_minibatch_has_its_true_size():
    assert [len(each) for each in ids(batches([10], 4), 0)] == [4, 4, 2, 4]


def test_drop_last_leaves_it_out_of_every_pass():
    made = batches([10], 5, BatchRule(4, drop_last=True))
    assert [len(each) for each in ids(made, 0)] == [4] * 5
    found = ids(made, 0)
    assert len(set(joined(found[:2]))) == len(set(joined(found[2:4]))) == 8


def test_drop_last_keeps_an_only_minibatch():
    assert [len(each) for each in ids(batches([3], 2, BatchRule(4, drop_last=True)), 0)] == [3, 3]


def test_without_shuffling_the_order_is_the_clients_own():
    made = batches([6, 5], 3, BatchRule(4, shuffle=False))
    own = made.data.train.samples(0).tolist()
    assert ids(made, 0) == [own[:4], own[4:], own[:4]]


def test_a_client_that_has_done_its_steps_gets_an_empty_mask():
    made = batches([9, 9], [3, 1])
    assert made.stack_step(1).mask.sum(dim=1).tolist() == [4, 0]
    assert len(ids(made, 1)) == 1


# What the order depends on


def test_orders_differ_between_passes_rounds_clients_and_seeds():
    sizes = [40, 40]
    rule = BatchRule(40)
    first, second = ids(batches(sizes, 2, rule), 0)
    (other_round,) = ids(batches(sizes, 1, rule, round=1), 0)
    (other_seed,) = ids(batches(sizes, 1, rule, seed=1), 0)
    own = batches(sizes, 1, rule).data.train.samples(0).tolist()
    orders = [own, first, second, other_round, other_seed]
    assert len({tuple(order) for order in orders}) == 5
    places = []
    for client in range(2):
        made = batches(sizes, 1, rule)
        samples = made.data.train.samples(client).tolist()
        places.append([samples.index(each) for each in joined(ids(made, client))])
    assert places[0] != places[1]


def test_the_first_place_falls_to_every_sample_alike():
    """2,000 rounds of 8 samples: each is first 250 times, give or take 5 standard deviations."""
    firsts = [ids(batches([8], 1, round=round), 0)[0][0] for round in range(2000)]
    counts = torch.tensor(firsts).bincount(minlength=8)
    assert counts.sub(250).abs().max() < 5 * (2000 * 1 / 8 * 7 / 8) ** 0.5


@quick
@given(st.permutations(range(4)), st.integers(1, 4))
def test_a_client_gets_the_same_in_whatever_chunk(order, length):
    sizes, steps = [9, 2, 5, 12], [4, 1, 6, 2]
    whole = batches(sizes, steps, augment=Adding())
    chunk = order[:length]
    part = batches(sizes, [steps[k] for k in chunk], clients=chunk, augment=Adding())
    for position, client in enumerate(chunk):
        pairs = zip(part.iterate_client(position), whole.iterate_client(client), strict=True)
        for found, expected in pairs:
            assert torch.equal(found.inputs, expected.inputs)
            assert torch.equal(found.samples, expected.samples)


def test_more_steps_begin_with_the_same_ones():
    short, long = batches([9], 2), batches([9], 6)
    assert ids(long, 0)[:2] == ids(short, 0)


# Attacks and augmentation


def test_only_the_poisoned_client_is_changed():
    made = batches([5, 5], 2, poison={1: poisoned})
    for position in range(2):
        for batch in made.iterate_client(position):
            assert torch.equal(batch.targets, batch.samples + 1000 * position)


def test_poison_is_called_by_the_id_and_not_by_the_place():
    made = batches([5, 5, 5], 1, clients=[2, 0], poison={0: poisoned})
    assert [
        int(batch.targets.min()) >= 1000 for p in range(2) for batch in made.iterate_client(p)
    ] == [
        False,
        True,
    ]


def test_poisoning_changes_no_data():
    made = batches([5], 3, poison={0: lambda batch: batch._replace(targets=batch.targets.zero_())})
    list(made.iterate_client(0)), made.stack_step(0)
    assert torch.equal(made.data.targets, torch.arange(5))


def test_large_samples_are_gathered_step_by_step_and_are_the_same(monkeypatch):
    whole = [list(batches([9, 5], 5, poison={0: poisoned}).iterate_client(k)) for k in range(2)]
    monkeypatch.setattr("pl_fed.data.batches._GATHER_BYTES", 0)
    steps = [list(batches([9, 5], 5, poison={0: poisoned}).iterate_client(k)) for k in range(2)]
    for one, other in zip(joined(whole), joined(steps), strict=True):
        assert all(torch.equal(one[i], other[i]) for i in (0, 1, 3))


def by_visit(batch):
    """Tell a sample's visits from one another."""
    return batch._replace(targets=batch.samples + 1000 * (1 + batch.visits))


class Idle(nn.Module):
    """An augmentation that leaves inputs as they are, and gathers them step by step."""

    def forward(self, x):
        return x


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "gathers", ["at once", "in steps", "by twos", "augmented", "stacked", "stacked by twos"]
)
def test_attacks_are_told_how_often_a_round_had_come_to_a_sample(monkeypatch, gathers, drop_last):
    """Nine samples by fours, five steps: two passes, the second cut short."""
    if gathers != "at once":
        two_steps = 2 * 4 * batches([9, 3], 1).data.inputs[0].nbytes
        at_once = two_steps if "twos" in gathers else 0 if gathers == "in steps" else 1 << 20
        monkeypatch.setattr("pl_fed.data.batches._GATHER_BYTES", at_once)
    rule = BatchRule(4, drop_last=drop_last)
    augment = Idle() if gathers == "augmented" else None
    made = batches([9, 3], [5, 2], rule, poison={0: by_visit, 1: by_visit}, augment=augment)
    for position, passes in enumerate(([0, 0, 1, 1, 2] if drop_last else [0, 0, 0, 1, 1], [0, 1])):
        for step, visit in enumerate(passes):
            if gathers.startswith("stacked"):
                batch = made.stack_step(step)
                batch = Batch(*(None if each is None else each[position] for each in batch))
            else:
                batch = list(made.iterate_client(position))[step]
            mask = slice(None) if batch.mask is None else batch.mask
            expected = batch.samples[mask] + 1000 * (1 + visit)
            assert torch.equal(batch.targets[mask], expected)
            assert batch.visits is None, "clients are not told"


def test_augmentation_draws_anew_in_every_step_round_and_client():
    shifts = [
        float((batch.inputs[:, 0] - batch.samples)[0])
        for number in range(2)
        for client in range(2)
        for batch in batches([9, 9], 3, round=number, augment=Adding()).iterate_client(client)
    ]
    assert len({round(shift, 4) for shift in shifts}) == len(shifts) == 12


def test_augmentation_leaves_torchs_generator_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    list(batches([9], 3, augment=Adding()).iterate_client(0))
    assert torch.equal(torch.rand(1), expected)
