"""Padding of stacks: a client's overflow stays with the client, in float32."""

import warnings

import pytest
import torch
from further_cases import covering
from small_federations import classes, run_rounds, seeded, sgd, shared_out
from test_compiled import needs_a_compiler
from torch import nn

from pl_fed.clients import DittoGreedy, FedAvg
from pl_fed.data.batches import Batches, BatchRule

SIZES = [6, 4, 5, 3]  # minibatches of 4: short ones, and clients without a second step


def group_norm():
    return nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.ReLU(), nn.Linear(6, 3))


def layer_norm():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3))


def cnn():
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3))


NETS = {"group norm": (group_norm, (4,)), "layer norm": (layer_norm, (4,)), "cnn": (cnn, (1, 4, 4))}


def overflowing(shape, position, sentinel, sizes=SIZES, **settings):
    """Return clients of which one has samples with a sentinel for missing values."""
    arrays = classes(sizes, shape)
    own = arrays.client == position
    arrays.inputs[own] = arrays.inputs[own].sign() * sentinel
    return shared_out(arrays, **settings)


def rejected(net, data, engine, **settings):
    client = FedAvg(seeded(net), optimizer=sgd(0.1), local_epochs=2)
    settings = {"max_rejected": 1.0, "dtype": torch.float32, "rounds": 1, **settings}
    run = run_rounds(client, data, engine=engine, **settings)
    assert run.w.isfinite().all()
    return run.reports[0]["train/rejected"], run.w


@pytest.mark.slow
@pytest.mark.parametrize(("sentinel", "name"), covering([1e30, 3.4e38], NETS))
def test_stack_loses_only_the_client_that_overflows(name, sentinel):
    net, shape = NETS[name]
    for position in range(len(SIZES)):
        data = overflowing(shape, position, sentinel)
        alone, row = rejected(net, data, "one_by_one")
        stacked, stacked_row = rejected(net, data, "stacked")
        assert stacked == alone <= 1, position
        torch.testing.assert_close(stacked_row, row, rtol=1e-5, atol=1e-6)


def test_padding_of_every_place_is_the_clients_own_first_sample():
    data = overflowing((4,), 0, 1e30).clients
    batches = Batches(data, torch.tensor([2, 0, 3]), [4, 4, 1], BatchRule(4), seed=0, round=0)
    owner = torch.arange(4).repeat_interleave(torch.tensor(SIZES))
    for step in range(4):
        batch = batches.stack_step(step)
        assert (owner[batch.samples] == torch.tensor([[2], [0], [3]])).all(), step
        assert not batch.mask.all()


@needs_a_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("position", [2, 3])
def test_compiled_stack_loses_only_the_client_that_overflows(position):
    data = overflowing((4,), position, 1e30)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Local steps run eagerly")
        count, _ = rejected(group_norm, data, "stacked_compiled", chunk_size=2)
    assert count <= 1  # compiled code may take the variance of large numbers without overflow


def test_validation_samples_are_padded_by_the_client_itself():
    sizes = [8, 12, 4, 8]
    for position in range(4):
        data = overflowing((4,), position, 3.4e38, sizes, val_fraction=0.25).clients
        x, _ = data.pad_part("val", torch.arange(4))
        large = (x.abs() > 1e30).flatten(1).any(1)
        assert large.tolist() == [client == position for client in range(4)]


def test_validation_padding_of_a_client_without_any_is_its_training_sample():
    data = overflowing((4,), 1, 1e30, [8, 8, 1], val_fraction=0.25).clients
    assert data.val.sizes.tolist() == [2, 2, 0]
    x, y = data.pad_part("val", torch.tensor([2, 0]))
    first = int(data.train.samples(2)[0])
    assert torch.equal(x[0], data.inputs[[first, first]])
    assert y[0].tolist() == [int(data.targets[first])] * 2


@pytest.mark.slow
def test_algorithm_that_reads_validation_samples_loses_one_client():
    data = overflowing((4,), 1, 1e30, [8, 12, 4, 8], val_fraction=0.25)
    client = DittoGreedy(seeded(group_norm), optimizer=sgd(0.1), local_epochs=2)
    settings = {"max_rejected": 1.0, "dtype": torch.float32, "rounds": 1}
    reports = [
        run_rounds(client, data, engine=engine, **settings).reports[0]["train/rejected"]
        for engine in ("one_by_one", "stacked")
    ]
    assert reports[0] == reports[1] <= 1
