"""What the tests of private rounds share: small federations with the noise on or off."""

import copy

import torch
from equal_trials import trials_skipped
from small_federations import classes, mlp, seeded, sgd, shared_out

from pl_fed import DifferentialPrivacy, EngineOptions, Federation
from pl_fed.clients import FedAvg
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import Poisson

SIZES = [5, 6, 7, 8, 3, 4, 9, 5]


def private(**settings):
    return DifferentialPrivacy(
        **{
            "clip_norm": 0.05,
            "noise_multiplier": 1.0,
            "delta": 0.01,
            "noise_seed": 0,
            **settings,
        }
    )


def build(client=None, privacy=None, data=None, rounds=3, dtype=torch.float64, **settings):
    """Return a federation after its setup, and its local optimizer."""
    client = client or FedAvg(seeded(mlp), optimizer=sgd(0.1))
    client = copy.deepcopy(client).to(dtype)
    settings = {"sampler": Poisson(0.5), "engine": EngineOptions("one_by_one"), **settings}
    settings = {"privacy": privacy or private(), "seed": 0, **settings}
    federation = Federation(**settings)
    data = data or shared_out(classes(SIZES))
    with trials_skipped():
        federation.setup(client, data, "fit", settings=RunSettings(rounds=rounds))
    client.train()
    return federation, client.configure_optimizers()


def silence(federation):
    """Replace the noise of a federation by zeros."""
    privacy = federation.session.rounds.privacy
    privacy._draw_noise = lambda numel, _: torch.zeros(numel, dtype=torch.float64)
    return federation


def set_cohort(federation, *clients):
    """Let the federation draw the same clients in every round."""
    training = federation.session.rounds.local_training
    training.draw_cohort = lambda _: torch.tensor(clients, dtype=torch.int64)


def model_row(federation):
    return federation.client.row("global").data


def run(federation, optimizer, round=0):
    """Run a round; return the update of the global model, and the report."""
    before = model_row(federation).clone()
    report = federation.run_round(round, optimizer)
    return model_row(federation) - before, report
