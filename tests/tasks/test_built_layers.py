"""Layers that a LightningModule builds in ``configure_model`` or ``setup``."""

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from small_federations import classes, run_tried_rounds, seeded, shared_out
from torch import nn
from torch.nn import functional

from pl_fed.clients import FedAvg


class Plain(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Configured(Plain):
    def __init__(self):
        LightningModule.__init__(self)
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = nn.Linear(4, 3)


class SetUp(Configured):
    configure_model = LightningModule.configure_model

    def setup(self, stage):
        assert stage == "fit"
        self.net = nn.Linear(4, 3)


class NeedsTrainer(SetUp):
    def setup(self, stage):
        self.net = nn.Linear(self.trainer.datamodule.width, 3)


def run(kind):
    client = seeded(lambda: FedAvg(kind()))
    return run_tried_rounds(client, shared_out(classes([6, 8])))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Configured, SetUp])
def test_layers_of_a_hook_train_as_those_of_init(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no word about hooks that are not called
        assert run(kind).distance(run(Plain)) == 0


def test_setup_that_needs_a_trainer_is_refused():
    message = "Expected `setup` of NeedsTrainer to build its layers without a trainer but that fail"
    with pytest.raises(ValueError, match=message):
        run(NeedsTrainer)
