"""Hierarchical federated averaging: Algorithm 1 by hand, and its limit without edge servers."""

import pytest
import torch
from small_federations import classes, mlp, run_rounds, seeded, sgd, shared_out
from test_ifca import train_by_hand
from torch import nn
from torch.testing import assert_close

from pl_fed.clients import FedAvg, HierFedAvg

SIZES = [9, 20, 12, 16, 7, 11, 8]
OPTIONS = {"local_steps": 3, "optimizer": sgd()}


def make(**options):
    return HierFedAvg(seeded(mlp), **{**OPTIONS, **options})


@pytest.mark.parametrize(("edges", "edge_rounds"), [(2, 2), (3, 2), (3, 5)])
@pytest.mark.slow
def test_rounds_are_algorithm_1_by_hand(edges, edge_rounds):
    data, client = shared_out(classes(SIZES)), make(edges=edges, edge_rounds=edge_rounds)
    sizes = data.clients.train.sizes.double()
    edge_of = torch.arange(len(SIZES)) * edges // len(SIZES)
    models = client.row("global").data.double().expand(edges, -1).clone()
    for round in range(5):
        trained = [
            train_by_hand(make(), data, models[edge], number)
            for number, edge in enumerate(edge_of.tolist())
        ]
        for edge in range(edges):
            mine = [row for row, own in zip(trained, edge_of.tolist()) if own == edge]
            models[edge] = torch.stack(mine).mean(0)
        if (round + 1) % edge_rounds == 0:
            weights = torch.stack([sizes[edge_of == edge].sum() for edge in range(edges)])
            models[:] = (weights[:, None] * models).sum(0) / weights.sum()
    got = run_rounds(client, data, rounds=5, shuffle=False)
    assert_close(got.server_states["centers"].view(edges, -1), models)
    assert_close(got.v, models[edge_of])


@pytest.mark.slow
def test_cloud_rounds_of_equal_edges_are_federated_averaging():
    data = shared_out(classes([12] * 6))
    expected = run_rounds(FedAvg(seeded(mlp), **OPTIONS), data, rounds=3)
    got = run_rounds(make(edges=3, edge_rounds=1), data, rounds=3)
    assert_close(got.v, expected.w.expand(6, -1))


def test_wrong_arguments():
    with pytest.raises(
        ValueError, match="`edges` to be at most 7, the number of clients, but got "
    ):
        run_rounds(make(edges=8), shared_out(classes(SIZES)))
    with pytest.raises(ValueError, match="`edge_rounds`"):
        make(edge_rounds=0)
    with pytest.raises(ValueError, match=r"got 1\.running_mean.* the models of HierFedAvg would"):
        HierFedAvg(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
