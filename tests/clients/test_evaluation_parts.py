"""Submodules that a LightningModule sets to evaluation mode keep it in local steps."""

import logging

import pytest
from lightning import LightningModule
from torch import nn

from pl_fed.clients import Ditto, FedAvg


class LitNorm(LightningModule):
    """LitNorm: a module with a BatchNorm in evaluation mode and trainable weights."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2).eval()
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.dropout(self.norm(x))), y)


def modes(module):
    return [module.training, module.norm.training, module.dropout.training, module.head.training]


@pytest.mark.parametrize("algorithm", [FedAvg, Ditto])
def test_a_submodule_in_evaluation_mode_keeps_it_in_every_model(algorithm):
    client = algorithm(LitNorm())
    client.eval()
    client.train()
    for model in client.models:
        assert modes(client.model(model)) == [True, False, True, True]


def test_a_module_that_is_in_evaluation_mode_as_a_whole_is_trained():
    client = FedAvg(LitNorm().eval())
    client.train()
    assert modes(client.global_model) == [True, True, True, True]


def test_a_net_without_steps_is_trained_as_a_whole_as_by_net_train():
    client = FedAvg(nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Linear(2, 2)))
    client.train()
    assert client.global_model[0].training


def test_a_frozen_layer_in_training_mode_is_told(caplog):
    body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.1)).requires_grad_(False)
    with caplog.at_level(logging.INFO):
        FedAvg(nn.Sequential(body, nn.Linear(2, 2)))
    assert "act as in evaluation in `0.1` and 1 others." in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        FedAvg(nn.Sequential(body.eval(), nn.Linear(2, 2)))
    assert not caplog.text
