"""``data.min_batch`` leaves out small minibatches, such as one sample for BatchNorm."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_federations import classes, mlp, run_rounds, seeded, sgd, shared_out
from tables import table_test
from torch import nn

from pl_fed.clients import APFL, Ditto, FedAvg
from pl_fed.data.batches import BatchRule, LocalWork


def batch_norm():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@given(st.integers(0, 60), st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_minibatches_are_those_of_a_pass_cut_by_hand(size, batch_size, min_batch, drop_last):
    min_batch = min(min_batch, batch_size)
    rule = BatchRule(batch_size, drop_last, min_batch=min_batch)
    pieces = [min(batch_size, size - start) for start in range(0, size, batch_size)]
    pieces = [piece for piece in pieces if piece >= min_batch]
    if drop_last and len(pieces) > 1 and pieces[-1] < batch_size:
        pieces.pop()
    assert rule.batches_per_pass(size) == len(pieces)
    assert rule.smallest_batch(size) == min(pieces, default=0)
    assert rule.count(LocalWork(epochs=2), size) == 2 * len(pieces)
    assert rule.count(LocalWork(steps=3), size) == (3 if pieces else 0)
    assert rule.is_uniform(torch.tensor([size])) == (len(set(pieces)) <= 1)


@pytest.mark.slow
@table_test("sizes", [[9, 8, 12], [1, 8, 12]])
def test_single_samples_are_refused_before_training_with_the_remedy(sizes):
    client = FedAvg(seeded(batch_norm), optimizer=sgd(0.1))
    message = r"one sample, which 1 of 3 clients have, but .*: set `data.min_batch` to 2"
    with pytest.raises(ValueError, match=message):
        run_rounds(client, shared_out(classes(sizes)), tries=True)
    run_rounds(FedAvg(seeded(mlp), optimizer=sgd(0.1)), shared_out(classes(sizes)), rounds=1)


def test_client_without_a_minibatch_takes_no_step():
    data = shared_out(classes([1, 9, 12]), min_batch=2)
    client = Ditto(seeded(batch_norm), optimizer=sgd(0.1), lam=0.0)
    outcome = run_rounds(client, data)
    start = client.row("personal").data.double()
    assert torch.equal(outcome.v[0], start)
    assert not torch.equal(outcome.v[1], start)
    assert all(report["train/rejected"] == 0 for report in outcome.reports)


def test_stacked_clients_take_the_same_minibatches():
    data = shared_out(classes([1, 9, 12, 6]), min_batch=2)
    client = Ditto(seeded(mlp), optimizer=sgd(0.1))
    assert run_rounds(client, data).distance(run_rounds(client, data, engine="stacked")) < 1e-12


def test_means_over_steps_are_0_if_no_client_of_a_chunk_takes_a_step():
    data = shared_out(classes([1, 9, 12]), min_batch=2)
    client = APFL(seeded(mlp), optimizer=sgd(0.1), alpha=0.4, alpha_lr=0.5)
    outcome = run_rounds(client, data, chunk_size=1)
    assert outcome.states["alpha"][0] == 0.4
    assert outcome.distance(run_rounds(client, data, chunk_size=3)) < 1e-12


def test_smallest_minibatch_is_at_most_the_batch_size():
    with pytest.raises(ValueError, match="`min_batch`"):
        shared_out(classes([4]), batch_size=4, min_batch=5)
