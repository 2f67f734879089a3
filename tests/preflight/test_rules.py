"""Rules over an algorithm, its aggregator and the server's optimizer."""

import warnings

import pytest
import torch
from further_cases import mark_if
from small_federations import classes, mlp, sections, seeded, sgd, shared_out
from tables import table_test

from pl_fed import Adversary, Federation, clients
from pl_fed.aggregators import (
    MDA,
    QFFL,
    RFLBAT,
    Clipping,
    FoolsGold,
    GeometricMedian,
    Mean,
    WeakDP,
)
from pl_fed.attacks import LargeLoss, SignFlipping
from pl_fed.preflight.rules import warn_of_unread_losses
from pl_fed.samplers import All

DATA = shared_out(classes([5, 8, 4]))
MEANS = {
    "FedADMM": {},
    "FLAME": {},
    "L2SGD": {},
    "LpProj": {"dimensions": 2},
    "MeanRegularized": {},
    "Mocha": {},
}


def set_up(name, arguments, *defence, **settings):
    client = getattr(clients, name)(seeded(mlp), **arguments)
    Federation(All(), *defence, seed=0, **sections(**settings)).setup(client, DATA, "fit")


def adam(params):
    return torch.optim.Adam(params, lr=0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("untried")
@table_test(("name", "arguments"), MEANS.items())
@table_test("first", [[], [Clipping()]])
@table_test("then", [Mean, GeometricMedian])
def test_mean_over_all_clients_refuses_weighting_by_samples(name, arguments, first, then):
    match = f"`weighting` of {then.__name__} to be 'uniform' for {name}, .* but got 'samples'"
    with pytest.raises(ValueError, match=match):
        set_up(name, arguments, then(weighting="samples"), pre_aggregators=first)
    set_up(name, arguments, then(), pre_aggregators=first)


@pytest.mark.slow
@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [mark_if(name in ("L2SGD", "LpProj", "Mocha"), name, a) for name, a in MEANS.items()],
)
def test_mean_over_all_clients_warns_of_another_server_optimizer(name, arguments):
    match = f"The global model of {name} is the mean over all clients only if"
    others = [adam, sgd(0.5), sgd(1.0, momentum=0.9), sgd(1.0, weight_decay=0.1)]
    for optimizer in others:
        with pytest.warns(UserWarning, match=match):
            set_up(name, arguments, server_optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is the mean over all clients only.*")
        set_up(name, arguments)
        set_up("FedAvg", {}, Mean("samples"), server_optimizer=adam)
        set_up("MeanRegularized", {"mean": "cohort"}, server_optimizer=adam)


@pytest.mark.slow
def test_losses_of_a_model_with_parts_that_nobody_trains_are_announced():
    match = "QFFL reads the results of the global model on the clients' data, but FedPer never"
    with pytest.warns(UserWarning, match=match):
        set_up("FedPer", {}, QFFL())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*never trains the parts.*")
        set_up("FedPer", {}, Mean())
        set_up("Ditto", {}, QFFL())


def test_forged_losses_that_no_server_reads_are_announced():
    with pytest.warns(UserWarning, match="LargeLoss changes nothing, because Mean reads no losses"):
        warn_of_unread_losses(LargeLoss(), Mean())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unread_losses(LargeLoss(), QFFL())
        warn_of_unread_losses(SignFlipping(), Mean())
        warn_of_unread_losses(None, Mean())


@pytest.mark.usefixtures("untried")
def test_a_defence_that_compares_only_a_kept_layer_is_refused():
    match = "parameters that clients of FedPer send but got {} on a layer that they keep"
    for defence in (FoolsGold(output_share=0.5), RFLBAT(layers=["2"])):
        for aggregator in (defence, WeakDP(aggregator=defence)):
            with pytest.raises(ValueError, match=match.format(type(defence).__name__)):
                set_up("FedPer", {}, aggregator)
        set_up("FedAvg", {}, defence)
    set_up("FedPer", {}, FoolsGold())
    set_up("FedPer", {}, RFLBAT(layers=["0", "2"]))


def test_too_many_byzantine_clients_for_an_aggregator_are_refused_before_training():
    federation = Federation(All(), MDA(), adversary=Adversary(expected=21), seed=0)
    with pytest.raises(ValueError, match="`num_byzantine` to be at most 20 for MDA"):
        federation.setup(clients.FedAvg(seeded(mlp)), shared_out(classes([1] * 43)), "fit")
