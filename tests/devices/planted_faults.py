"""Faults of devices, planted in several rooms: each works on the CPU, and must fail on a device."""

from functools import partial
from unittest import mock

import torch
from device_cases import ditto, run
from lightning.pytorch import LightningDataModule
from torchmetrics import MeanMetric

from pl_fed.aggregators import Mean, Median
from pl_fed.attacks import SignFlipping
from pl_fed.clients import Ditto
from pl_fed.data import FederatedData
from pl_fed.state.store import ClientStore
from pl_fed.tasks import Classification

TRAINING_STEP, MERGE, FORGE = Ditto.training_step, Mean.forward, SignFlipping.forge
READ = ClientStore.read


def train_with_a_constant(client, batch, batch_idx):
    loss = TRAINING_STEP(client, batch, batch_idx)
    return (loss * torch.ones(2)).mean()


def merge_by_shares(aggregator, uploads, weights, context):
    return torch.full((1, len(uploads)), 1 / len(uploads), dtype=uploads.dtype).mm(uploads)[0]


def forge_noise(attack, honest, own, context):
    return FORGE(attack, honest, own, context) + torch.zeros(own.shape, dtype=own.dtype)


def read_to_cpu(store, name, clients):
    return READ(store, name, clients).cpu()


class Scaled(MeanMetric):
    """A metric with a plain tensor, which does not follow it to a device."""

    def __init__(self):
        super().__init__()
        self.scale = torch.full((3,), 2.0)

    def update(self, predictions, targets):
        super().update((predictions * self.scale).mean())


class MeasuredClassification(Classification):
    """A task with that metric."""

    def metrics(self):
        return {"scaled": Scaled()}


def patched(device, folder, owner, name, function, **settings):
    """Run a federation with a patched method."""
    with mock.patch.object(owner, name, function):
        return run(device, folder, rounds=1, **settings)


def planted_faults():
    """Return the faults by room."""
    attack = {"attack": SignFlipping(), "ids": [1], "aggregator": Median()}
    move = LightningDataModule.transfer_batch_to_device
    faults = {
        "client": (Ditto, "training_step", train_with_a_constant),
        "aggregator": (Mean, "forward", merge_by_shares),
        "evaluator": (FederatedData, "transfer_batch_to_device", move),
        "store": (ClientStore, "read", read_to_cpu),
    }
    cases = {
        room: partial(patched, owner=owner, name=name, function=function)
        for room, (owner, name, function) in faults.items()
    }
    cases["adversary"] = partial(
        patched, owner=SignFlipping, name="forge", function=forge_noise, **attack
    )
    client = partial(ditto, task=MeasuredClassification())
    cases["metric"] = partial(run, client=client, rounds=1)
    return cases
