"""FedAvg against plain gradient descent, run by a plain Lightning Trainer."""

import copy

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
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
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import pl_fed
from pl_fed.aggregators import Mean
from pl_fed.clients import FedAvg
from pl_fed.samplers import All

QUIET = {
    "accelerator": "cpu",
    "precision": "64-true",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
EPOCHS = 4


class Plain(LightningModule):
    """A plain LightningModule without federated learning."""

    def __init__(self, net, lr):
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def run_gradient_descent(net, arrays, folder, lr=0.3):
    """The net after full-batch descent by Lightning on all samples, as a row."""
    plain = Plain(copy.deepcopy(net), lr)
    loader = DataLoader(
        TensorDataset(arrays.inputs.double(), arrays.targets), batch_size=len(arrays)
    )
    trainer = LightningTrainer(max_epochs=EPOCHS, logger=False, default_root_dir=folder, **QUIET)
    trainer.fit(plain, loader)
    return torch.cat([parameter.detach().flatten() for parameter in plain.net.parameters()])


def run_federation(net, arrays, folder, lr=0.3, aggregator=None, engine="one_by_one"):
    """Train in a federation; clients take one full-batch step per round."""
    client = FedAvg(copy.deepcopy(net), optimizer=sgd(lr), local_steps=1)
    federation = pl_fed.Federation(
        All(), aggregator=aggregator, engine=pl_fed.EngineOptions(engine), seed=0
    )
    trainer = pl_fed.Trainer(federation, max_epochs=EPOCHS, default_root_dir=folder, **QUIET)
    trainer.fit(client, shared_out(arrays, batch_size=len(arrays)))
    return client.row("global").data


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_one_client_with_one_full_batch_step_equals_gradient_descent(tmp_path, engine):
    net, arrays = seeded(mlp), classes([11])
    result = run_federation(net, arrays, tmp_path, engine=engine)
    torch.testing.assert_close(
        result, run_gradient_descent(net, arrays, tmp_path), rtol=0, atol=1e-14
    )


@pytest.mark.slow
def test_clients_of_equal_size_equal_centralised_descent(tmp_path):
    """Where each takes one full-batch step: the mean of the gradients is that of the whole."""
    net, arrays = seeded(mlp), classes([6] * 5)
    result = run_federation(net, arrays, tmp_path)
    torch.testing.assert_close(
        result, run_gradient_descent(net, arrays, tmp_path), rtol=0, atol=1e-14
    )


@pytest.mark.slow
def test_clients_weighted_by_samples_equal_centralised_descent(tmp_path):
    net, arrays = seeded(mlp), classes([2, 9, 5, 1])
    centralised = run_gradient_descent(net, arrays, tmp_path)
    weighted = run_federation(net, arrays, tmp_path, aggregator=Mean("samples"))
    torch.testing.assert_close(weighted, centralised, rtol=0, atol=1e-14)
    unweighted = run_federation(net, arrays, tmp_path)
    assert (unweighted - centralised).abs().max() > 1e-3


@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_round_of_two_clients_equals_a_hand_computed_round(engine):
    """η = 1/2, two steps on ½ (w − y)²: w_k = 3/4 y + 1/4 w. From w = 0: w = 3, then 15/4."""
    client = FedAvg(Point(), optimizer=sgd(0.5), criterion=HalfSquares(), local_steps=2)
    data = shared_out(points([2.0], [6.0]))
    outcomes = [run_rounds(client, data, rounds, engine=engine) for rounds in (1, 2)]
    assert [outcome.w.tolist() for outcome in outcomes] == [[3.0], [3.75]]
    # the mean of each client's two losses before its steps: (2 + 1/2) / 2 and (18 + 9/2) / 2
    assert outcomes[0].reports[0]["train/loss"].item() == (1.25 + 11.25) / 2
    assert outcomes[0].reports[0]["train/update_norm"].item() == 3.0


def test_clients_keep_no_personal_model():
    client = FedAvg(seeded(mlp))
    assert client.state_defaults() == {}
    assert client.trained == ("global",)
