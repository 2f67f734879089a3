"""Tiny federations for tests: given arrays, and rounds that are run without a Trainer."""

import copy
import re
from contextlib import nullcontext
from dataclasses import dataclass, fields

import torch
from torch import nn

from pl_fed import Adversary, EngineOptions, Federation, StorageOptions
from pl_fed.clients.contract import ModelRows
from pl_fed.data import FederatedData
from pl_fed.data.source import Arrays, DataSource
from pl_fed.engine import Clipping, LocalSettings
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All, Sampler


def said(name, arguments):
    """A name for a parametrized test, the same in every process: without addresses."""
    return re.sub(r" at 0x\w+", "", f"{name}{list(arguments.values())}")


NOTHING_READABLE = r"a row of the round \(none outside of a round\) but got 'broadcast'"


class Given(DataSource):
    """Arrays as a data set."""

    def __init__(self, arrays):
        self.arrays = arrays

    def load(self):
        return self.arrays


class Only(Sampler):
    """Draws the same clients in every round."""

    def __init__(self, *clients):
        self.clients = clients

    def size_of_cohort(self, num_clients):
        return len(self.clients)

    def sample(self, num_clients, sizes, generator):
        return torch.tensor(self.clients)


class Cohorts(Sampler):
    """Draws the cohorts that are given, round after round; each of the same size."""

    def __init__(self, *cohorts):
        self.cohorts = list(cohorts)

    def size_of_cohort(self, num_clients):
        return len(self.cohorts[0])

    def sample(self, num_clients, sizes, generator):
        return torch.tensor(self.cohorts.pop(0) if len(self.cohorts) > 1 else self.cohorts[0])


class VariedCohorts(Cohorts):
    """Draws the given cohorts, round after round; their sizes may differ."""

    def size_of_cohort(self, num_clients):
        return max(len(cohort) for cohort in self.cohorts)

    def draw(self, num_clients, sizes, generator):
        return self.sample(num_clients, sizes, generator)  # without the check of the size


def classes(sizes, shape=(4,), num_classes=3, seed=0):
    """Random samples of random classes, so many for each client."""
    draw = torch.Generator().manual_seed(seed)
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    x = torch.randn(len(owner), *shape, generator=draw)
    y = torch.randint(num_classes, (len(owner),), generator=draw)
    return Arrays(x, y, owner, num_classes=num_classes)


def reals(x, y, owner):
    """Samples with real-valued targets, as nested lists or tensors."""
    x, y = (torch.as_tensor(each, dtype=torch.float64) for each in (x, y))
    return Arrays(x, y, torch.as_tensor(owner))


def shared_out(arrays, batch_size=4, **kwargs):
    """The arrays as a datamodule whose clients train on all that they have."""
    settings = {"val_fraction": 0.0, "test_fraction": 0.0, "seed": 0, **kwargs}
    return FederatedData(Given(arrays), batch_size=batch_size, **settings)


def seeded(make, seed=0):
    """What ``make()`` gives when torch's generator begins with ``seed``."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return make()


OF_THE_ADVERSARY = {entry.name for entry in fields(Adversary)}


def sections(
    engine="auto", chunk_size=None, compile_mode=None, folder=None, memory=0.5, **settings
):
    """The arguments of a federation, given the arguments of its sections by their own names."""
    adversary = {name: settings.pop(name) for name in OF_THE_ADVERSARY & settings.keys()}
    return {
        "adversary": Adversary(**adversary),
        "engine": EngineOptions(engine, chunk_size, compile_mode),
        "storage": StorageOptions(folder, memory),
        **settings,
    }


@dataclass
class Outcome:
    """What rounds led to.

    These are w, and the rows of all v_k as they are evaluated; the running statistics of both; the
    reports; and what clients and the server keep, by name.
    """

    w: torch.Tensor
    v: torch.Tensor
    w_statistics: torch.Tensor
    v_statistics: torch.Tensor
    reports: list
    states: dict
    server_states: dict

    def distance(self, other):
        """The largest difference of any number."""
        pairs = [(self.w, other.w), (self.v, other.v)]
        pairs += [(self.w_statistics, other.w_statistics), (self.v_statistics, other.v_statistics)]
        mine, others = ({**each.states, **each.server_states} for each in (self, other))
        pairs += [(mine[name], others[name]) for name in mine.keys() & others.keys()]
        pairs += [(r["train/loss"], s["train/loss"]) for r, s in zip(self.reports, other.reports)]
        return max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs)


def run_rounds(
    client,
    data,
    rounds=2,
    dtype=torch.float64,
    clipping=None,
    autocast=None,
    sampler=None,
    shuffle=True,
    **settings,
):
    """Run rounds on a copy of the client; ``settings`` are those of :func:`sections`."""
    client = copy.deepcopy(client).to(dtype)
    federation = Federation(
        sampler or All(), **sections(**{"seed": 0, "engine": "one_by_one", **settings})
    )
    local = LocalSettings(autocast or nullcontext, clipping or Clipping())
    federation.setup(client, data, "fit", settings=RunSettings(local, shuffle=shuffle))
    client.train()
    optimizer = client.configure_optimizers()
    schedule = None
    if isinstance(optimizer, dict):
        optimizer, schedule = optimizer["optimizer"], optimizer["lr_scheduler"]["scheduler"]
        optimizer._opt_called = True  # as the loop does: the engine steps one that is built anew
    reports = []
    for round in range(rounds):
        reports.append(federation.run_round(round, optimizer))
        if schedule is not None:
            schedule.step()
    everyone = torch.arange(data.clients.num_clients)
    models = federation.states.begin(everyone).models
    nothing = torch.empty(0, dtype=dtype)
    personal = models.get("personal", ModelRows(nothing, nothing))
    return Outcome(
        client.row("global").data.clone(),
        personal.parameters,
        client.statistics("global").data.clone(),
        personal.statistics,
        reports,
        {name: federation.store.read(name, everyone) for name in federation.store.defaults},
        {name: row.clone() for name, row in federation.server_states.items()},
    )


def sgd(lr=0.1, **kwargs):
    """A builder of SGD, as a config gives it."""
    return lambda params: torch.optim.SGD(params, lr=lr, **kwargs)


def mlp(width=5, inputs=4, num_classes=3):
    """A smooth little net: nothing in it is exactly zero, so no rounding is blown up."""
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, num_classes))


class Point(nn.Module):
    """A net that gives its one parameter, whatever it is asked: a point to be estimated."""

    def __init__(self, dimensions=1, start=0.0):
        super().__init__()
        self.value = nn.Parameter(torch.full((dimensions,), start))

    def forward(self, x):
        return self.value.expand(len(x), -1)


class Recurrent(nn.Module):
    """Its layer has a list of its weights."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.GRU(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.layer(x.view(len(x), 2, 2))[0][:, -1])


class Views(nn.Module):
    """A net that no batch without samples goes through."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x.view(x.size(0), -1))


class HalfSquares(nn.Module):
    """½ ‖output − target‖², over the samples of a batch."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs, targets):
        losses = (outputs - targets).square().flatten(1).sum(1) / 2
        return losses.mean() if self.reduction == "mean" else losses


def points(*clients):
    """One-dimensional observations: for each client a list of numbers."""
    y = torch.tensor([[number] for client in clients for number in client])
    owner = [k for k, client in enumerate(clients) for _ in client]
    return reals(torch.zeros(len(y), 1), y, owner)
