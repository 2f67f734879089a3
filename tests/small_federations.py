"""Tiny federations for tests: arrays as data sets, rounds without a Trainer, and a quiet one."""

import copy
import re
from contextlib import nullcontext
from dataclasses import dataclass, fields

import numpy as np
import torch
from equal_trials import equal_trials_shared, trials_skipped
from torch import nn

from pl_fed import Adversary, EngineOptions, Federation, StorageOptions, Trainer
from pl_fed.clients.contract import ModelRows
from pl_fed.data import FederatedData
from pl_fed.data.source import Arrays, DataSource
from pl_fed.engine import Clipping, LocalSettings
from pl_fed.random import fork_torch_rng
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All, Sampler


def said(name, arguments):
    """Return an id for a parametrized test, without addresses: equal in every process."""
    return re.sub(r" at 0x\w+", "", f"{name}{list(arguments.values())}")


NOTHING_READABLE = r"a row of the round \(none outside of a round\) but got 'broadcast'"


class Given(DataSource):
    """Given: arrays as a data set."""

    def __init__(self, arrays):
        self.arrays = arrays

    def load(self):
        return self.arrays


class Only(Sampler):
    """Only: draws the same clients in every round."""

    def __init__(self, *clients):
        self.clients = clients

    def size_of_cohort(self, num_clients):
        return len(self.clients)

    def sample(self, num_clients, sizes, generator):
        return torch.tensor(self.clients)


class Cohorts(Sampler):
    """Cohorts: draws the given cohorts in order, one per round; all have the same size."""

    def __init__(self, *cohorts):
        self.cohorts = list(cohorts)

    def size_of_cohort(self, num_clients):
        return len(self.cohorts[0])

    def sample(self, num_clients, sizes, generator):
        cohort = self.cohorts.pop(0) if len(self.cohorts) > 1 else self.cohorts[0]
        return torch.tensor(cohort, dtype=torch.int64)


class VariedCohorts(Cohorts):
    """Draws the given cohorts, round after round; their sizes may differ."""

    def size_of_cohort(self, num_clients):
        return max(len(cohort) for cohort in self.cohorts)

    def draw(self, num_clients, sizes, generator):
        return self.sample(num_clients, sizes, generator)  # without the check of the size


def classes(sizes, shape=(4,), num_classes=3, seed=0):
    """Return random samples of random classes; ``sizes`` are the numbers of samples by client."""
    draw = torch.Generator().manual_seed(seed)
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    x = torch.randn(len(owner), *shape, generator=draw)
    y = torch.randint(num_classes, (len(owner),), generator=draw)
    return Arrays(x, y, owner, num_classes=num_classes)


def reals(x, y, owner):
    """Return samples with real-valued targets, from nested lists or tensors."""
    x, y = (torch.as_tensor(each, dtype=torch.float64) for each in (x, y))
    return Arrays(x, y, torch.as_tensor(owner))


def draw_regressions(seed, fewest=2, most=9):
    """Return samples of three clients of drawn sizes, with other slopes in each."""
    draw = np.random.default_rng(seed)
    owner = np.repeat(np.arange(3), draw.integers(fewest, most + 1, size=3))
    x, slopes = draw.normal(size=(len(owner), 3)), draw.normal(size=(3, 3, 2))
    return reals(x, np.einsum("ni,nio->no", x, slopes[owner]), owner)


def two_layers():
    """Return a linear net of two layers, for the samples of ``draw_regressions``."""
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))


def samples_of(data, client):
    """Return the training samples of a client as NumPy arrays: inputs and targets."""
    index = data.clients.train.samples(client)
    return data.clients.inputs[index].numpy(), data.clients.targets[index].numpy()


def shared_out(arrays, batch_size=4, **kwargs):
    """Return the arrays as a datamodule whose clients train on all their samples."""
    settings = {"val_fraction": 0.0, "test_fraction": 0.0, "seed": 0, **kwargs}
    return FederatedData(Given(arrays), batch_size=batch_size, **settings)


def seeded(make, seed=0):
    """Return ``make()`` with torch's generator seeded."""
    with fork_torch_rng(torch.device("cpu")) as seed_torch:
        seed_torch(seed)
        return make()


OF_THE_ADVERSARY = {entry.name for entry in fields(Adversary)}


def sections(
    engine="auto",
    chunk_size=None,
    compile_mode=None,
    keep_optimizer_state=False,
    folder=None,
    memory=0.5,
    **settings,
):
    """Return the arguments of a federation from the arguments of its sections."""
    adversary = {name: settings.pop(name) for name in OF_THE_ADVERSARY & settings.keys()}
    return {
        "adversary": Adversary(**adversary),
        "engine": EngineOptions(engine, chunk_size, compile_mode, keep_optimizer_state),
        "storage": StorageOptions(folder, memory),
        **settings,
    }


@dataclass
class Outcome:
    """Outcome: the models, states and reports after some rounds.

    Attributes:
        w: The global model's parameters.
        v: The parameters of all personal models, as they are evaluated.
        w_statistics: The running statistics of the global model.
        v_statistics: The running statistics of all personal models.
        reports: The report of each round.
        states: The states of all clients, by name.
        server_states: The states of the server, by name.
    """

    w: torch.Tensor
    v: torch.Tensor
    w_statistics: torch.Tensor
    v_statistics: torch.Tensor
    reports: list
    states: dict
    server_states: dict

    def distance(self, other):
        """Return the largest difference of any number."""
        pairs = [(self.w, other.w), (self.v, other.v)]
        pairs += [(self.w_statistics, other.w_statistics), (self.v_statistics, other.v_statistics)]
        own, others = ({**run.states, **run.server_states} for run in (self, other))
        pairs += [(own[name], others[name]) for name in own.keys() & others.keys()]
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
    batches_per_step=1,
    tries=False,
    **settings,
):
    """Run rounds on a copy of the client; ``settings`` are those of :func:`sections`.

    They need no trial of the client before training; ``tries`` makes it.
    """
    client = copy.deepcopy(client).to(dtype)
    federation = Federation(
        sampler or All(), **sections(**{"seed": 0, "engine": "one_by_one", **settings})
    )
    local = LocalSettings(autocast or nullcontext, clipping or Clipping(), batches_per_step)
    with equal_trials_shared() if tries else trials_skipped():
        federation.setup(client, data, "fit", settings=RunSettings(local, shuffle=shuffle))
    client.train()
    optimizer = client.configure_optimizers()
    schedule = None
    if isinstance(optimizer, dict):
        optimizer, schedule = optimizer["optimizer"], optimizer["lr_scheduler"]["scheduler"]
        optimizer._opt_called = True  # as the loop does: the engine steps a rebuilt optimizer
    reports = []
    for round in range(rounds):
        reports.append(federation.run_round(round, optimizer))
        if schedule is not None:
            schedule.step()
    everyone = torch.arange(data.clients.num_clients)
    losses = federation.session.evaluation.centers.measure(everyone)
    models = federation.session.states.begin(everyone, center_losses=losses).models
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


def run_tried_rounds(client, data, **settings):
    """Run rounds as :func:`run_rounds`, after the trials of the client before training."""
    return run_rounds(client, data, **{"tries": True, **settings})


def quiet_trainer(folder, rounds, **kwargs):
    """Return a trainer of all clients in each round, one by one, that prints nothing."""
    return Trainer(
        Federation(All(), engine=EngineOptions("one_by_one"), seed=0),
        run_dir=folder,
        max_epochs=rounds,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )


def sgd(lr=0.1, **kwargs):
    """Return a builder of SGD, as a config gives it."""
    return lambda params: torch.optim.SGD(params, lr=lr, **kwargs)


def mlp(width=5, inputs=4, num_classes=3):
    """Return a small smooth net without exact zeros, which would amplify rounding errors."""
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, num_classes))


class Point(nn.Module):
    """Point: a net that returns its one parameter for any input, a point to be estimated."""

    def __init__(self, dimensions=1, start=0.0):
        super().__init__()
        self.value = nn.Parameter(torch.full((dimensions,), start))

    def forward(self, x):
        return self.value.expand(len(x), -1)


class Recurrent(nn.Module):
    """Recurrent: a net whose layer keeps a list of its weights."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.GRU(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.layer(x.view(len(x), 2, 2))[0][:, -1])


class Views(nn.Module):
    """Views: a net that fails on a batch without samples."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x.view(x.size(0), -1))


class HalfSquares(nn.Module):
    """Half squares: ½ ‖output − target‖² of each sample, or its mean over a batch."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs, targets):
        losses = (outputs - targets).square().flatten(1).sum(1) / 2
        return losses.mean() if self.reduction == "mean" else losses


def points(*clients):
    """Return one-dimensional observations, from a list of numbers for each client."""
    y = torch.tensor([[number] for client in clients for number in client])
    owner = [k for k, client in enumerate(clients) for _ in client]
    return reals(torch.zeros(len(y), 1), y, owner)
