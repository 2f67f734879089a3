"""Exported files continue elsewhere: as checkpoints of the user's own class, and as safetensors."""

import lightning.pytorch as pl
import pytest
import torch
from tables import table_test
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pl_fed.exports.formats import LightningCheckpoint, Safetensors
from pl_fed.exports.request import find_client

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


class Module(pl.LightningModule):
    """A module with hyperparameters, and a value of its own in checkpoints."""

    def __init__(self, width, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.visits = 0

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()

    def test_step(self, batch, batch_idx):
        self.log("mean", self(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["visits"] = 7

    def on_load_checkpoint(self, checkpoint):
        self.visits = checkpoint["visits"]


class Plain(pl.LightningModule):
    """A module without hyperparameters."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, x):
        return self.net(x)


@table_test("make", [lambda: Module(width=4, lr=0.5), Plain])
@pytest.mark.slow
def test_lightning_loads_the_checkpoint_by_the_users_class(make, tmp_path):
    module = make().eval()
    LightningCheckpoint(X).write(module, tmp_path / "client_1.ckpt")
    loaded = type(module).load_from_checkpoint(tmp_path / "client_1.ckpt", weights_only=True)
    assert loaded.hparams == module.hparams
    assert getattr(loaded, "visits", 7) == 7
    torch.testing.assert_close(loaded.eval()(X), module(X), rtol=0, atol=0)


def test_lightning_tests_by_the_checkpoint(tmp_path):
    module = Module(width=4).eval()
    LightningCheckpoint(X).write(module, tmp_path / "client_1.ckpt")
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    samples = DataLoader(TensorDataset(X), 6)
    path = str(tmp_path / "client_1.ckpt")
    (result,) = trainer.test(Module(width=4), samples, ckpt_path=path, verbose=False)
    assert result["mean"] == pytest.approx(module(X).mean().item())


def test_a_net_of_torch_has_no_lightning_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="is a LightningModule for format lightning but got Lin"):
        LightningCheckpoint(X).write(nn.Linear(3, 1), tmp_path / "client_1.ckpt")


def test_safetensors_keep_tensors_and_shared_ones(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).eval()
    net[2].weight = net[0].weight
    Safetensors(X).write(net, tmp_path / "client_1.safetensors")
    loaded = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).eval()
    loaded[2].weight = loaded[0].weight
    safetensors.load_model(loaded, tmp_path / "client_1.safetensors")
    torch.testing.assert_close(loaded(X), net(X), rtol=0, atol=0)


OWNERS = [["clinic a"], ["clinic b", "clinic c"], ["clinic c", "7"]]


@table_test("word, client", [("2", 2), ("clinic a", 0), ("clinic b", 1)])
def test_clients_are_found_by_id_or_owner(word, client):
    assert find_client(word, 3, OWNERS) == client


@table_test(
    "word, owners, match",
    [
        ("clinic c", OWNERS, "an owner of one client but got 'clinic c', which owns samples of 2"),
        ("clinic d", OWNERS, "ids from 0 to 2, or names of owners such as 'clinic a', but got"),
        ("clinic d", [], "ids from 0 to 2 but got 'clinic d'"),
        ("3", OWNERS, "ids from 0 to 2, or names of owners such as 'clinic a', but got '3'"),
    ],
)
def test_unknown_and_ambiguous_clients_are_refused(word, owners, match):
    with pytest.raises(ValueError, match=match):
        find_client(word, 3, owners)


class Noted(nn.Linear):
    """A net with a value of its own in its state dict."""

    def get_extra_state(self):
        return {"temperature": 2.0}

    def set_extra_state(self, state):
        pass


def test_safetensors_refuse_a_state_with_other_values(tmp_path):
    pytest.importorskip("safetensors")
    with pytest.raises(ValueError, match=r"more than tensors but got .* `_extra_state` of Noted"):
        Safetensors(X).write(Noted(2, 2), tmp_path / "client_1.safetensors")
