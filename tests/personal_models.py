"""What tests of personal models share: rounds, what is kept after them, and what is evaluated."""

import copy
from dataclasses import dataclass

import torch
from equal_trials import trials_skipped
from small_federations import sections

from pl_fed import Federation
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All


@dataclass
class Trained:
    """A federation after some rounds.

    Attributes:
        client: The algorithm.
        federation: The federation.
        w: The global model's row.
        kept: What each client keeps, by name [clients, length].
        metrics: Of each model that is evaluated, each client's numbers on its validation data.
    """

    client: object
    federation: Federation
    w: torch.Tensor
    kept: dict
    metrics: dict


def trained(client, data, rounds=2, sampler=None, shuffle=True, **settings):
    """Run rounds on a copy of the client, in float64, and evaluate it."""
    client = copy.deepcopy(client).double()
    federation = Federation(
        sampler or All(), **sections(**{"seed": 0, "engine": "one_by_one", **settings})
    )
    with trials_skipped():
        federation.setup(client, data, "fit", settings=RunSettings(shuffle=shuffle))
    optimizer = client.train().configure_optimizers()
    for round in range(rounds):
        federation.run_round(round, optimizer)
    everyone = torch.arange(data.clients.num_clients)
    kept = {n: federation.store.read(n, everyone) for n in federation.store.defaults}
    client.eval()
    with torch.inference_mode():
        federation.evaluate("val", everyone)
    metrics = {n: each.per_client() for n, each in federation.metrics("val").items()}
    return Trained(client, federation, client.row("global").data.clone(), kept, metrics)


def validated_by_training(data):
    """Let all training data of each client be its validation data as well."""
    object.__setattr__(data.clients, "val", data.clients.train)
    return data
