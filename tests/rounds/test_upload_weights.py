"""The weights of uploads that clients propose: the server's mean is weighted by them."""

import numpy as np
import pytest
import torch
from small_federations import (
    HalfSquares,
    Point,
    classes,
    mlp,
    points,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)

from pl_fed.aggregators import Mean
from pl_fed.clients import Client, FedAvg


class Weighted(Client):
    """Weighted: FedAvg with a weight of each client, from its id."""

    weigher = "weight"
    weights = (2.0, 6.0, 0.0)

    def __init__(self, net, **kwargs):
        super().__init__(net, **kwargs)
        self.add_server_state("weight", 1.0)

    def training_step(self, batch, batch_idx):
        return self.loss("global", batch)

    def end_round(self, client):
        weights = torch.tensor(self.weights)[client.ids, None]
        client.proposals["weight"] = weights.to(client.broadcast.parameters)
        return super().end_round(client)


DATA = shared_out(points([8.0], [16.0, 16.0], [32.0, 32.0, 32.0]))
OPTIONS = {"optimizer": sgd(0.5), "criterion": HalfSquares(), "local_steps": 1}


@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_mean_is_weighted(engine, weighting):
    outcome = run_rounds(
        Weighted(Point(), **OPTIONS), DATA, 2, engine=engine, aggregator=Mean(weighting)
    )
    w = 0.0
    shares = np.array([2.0, 6.0, 0.0]) * ([1, 2, 3] if weighting == "samples" else 1)
    for _ in range(2):
        w += float(shares @ (np.array([8.0, 16.0, 32.0]) - w)) / 2 / shares.sum()
    assert outcome.w.item() == pytest.approx(w, abs=1e-12)


def test_equal_weights_are_fedavg_bit_for_bit_and_zero_weights_move_nothing():
    class Equal(Weighted):
        weights = (0.3, 0.3, 0.3)

    class Zero(Weighted):
        weights = (0.0, 0.0, 0.0)

    data, options = shared_out(classes([7, 5, 8])), {"optimizer": sgd(0.1), "local_steps": 3}
    outcomes = [run_rounds(kind(seeded(mlp), **options), data, 3) for kind in (Equal, FedAvg)]
    assert torch.equal(outcomes[0].w, outcomes[1].w)
    assert run_rounds(Zero(Point(), **OPTIONS), DATA, 1).w.isfinite().all()


def test_a_broken_upload_counts_in_no_mean():
    class Broken(Weighted):
        def end_round(self, client):
            upload = super().end_round(client)
            return torch.where(client.ids[:, None] == 1, torch.nan, upload)

    outcome = run_rounds(Broken(Point(), **OPTIONS), DATA, 1)
    assert outcome.w.item() == pytest.approx(4.0)
