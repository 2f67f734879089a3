"""Rounds without a Trainer, and all that there is after each of them."""

import copy
import warnings

import pytest
import torch
from equal_trials import trials_skipped
from exhaustive import exhaustive_but
from small_federations import Only, sections

from pl_fed import Federation
from pl_fed.random import generator
from pl_fed.samplers import All, Uniform


def after_each_round(client, data, rounds, sampler=None, **settings):
    """Yield, after each round, what there is by name.

    ``w``, the server's model; ``cohort``, who took part; ``report``, what was logged; and each
    state of the clients [clients, length] and of the server [length].
    """
    for read_all in run_each_round(client, data, rounds, sampler, **settings):
        yield read_all()


def run_each_round(client, data, rounds, sampler=None, **settings):
    """Yield, after each round, the function that reads what there is by name."""
    client = copy.deepcopy(client).double()
    federation = Federation(
        sampler or All(), **sections(**{"seed": 0, "engine": "stacked", **settings})
    )
    with trials_skipped():
        federation.setup(client, data, "fit")
    client.train()
    optimizer = client.configure_optimizers()
    everyone = torch.arange(data.clients.num_clients)
    for round in range(rounds):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Local steps run eagerly")
            warnings.filterwarnings("error", "Clients are run one by one")
            report = federation.run_round(round, optimizer)

        def read_all(round=round, report=report):
            states = {n: federation.store.read(n, everyone) for n in federation.store.defaults}
            states |= {n: row.clone() for n, row in federation.server_states.items()}
            states |= {"w": client.row("global").data.clone(), "report": report}
            return {**states, "cohort": federation.draw_cohort(round)}

        yield read_all


def after(client, data, rounds, sampler=None, **settings):
    """Return what there is after the last of them."""
    *_, read_all = run_each_round(client, data, rounds, sampler, **settings)
    return read_all()


def cohorts(data, rounds, sampler=None, seed=0):
    """Return who takes part in each round, as lists."""
    sampler, sizes = sampler or All(), data.clients.train.sizes
    draws = (generator(seed, "cohort", round) for round in range(rounds))
    return [sampler.sample(len(sizes), sizes, draw).tolist() for draw in draws]


def engines_agree(client, data, rounds, graphs, sampler, tolerance=1e-11):
    """Hold that all that there is in the end does not depend on engine and chunks; return it.

    ``graphs`` is the fixture ``uncompiled``: of each compiled engine there is one.
    """
    first = after(client, data, rounds, sampler, engine="one_by_one")
    for engine, chunk_size in (
        ("one_by_one", 1),
        ("one_by_one_compiled", None),
        ("stacked", None),
        ("stacked", 1),
        ("stacked_compiled", 2),
    ):
        again = after(client, data, rounds, sampler, engine=engine, chunk_size=chunk_size)
        for name in first.keys() - {"report", "cohort"}:
            torch.testing.assert_close(again[name], first[name], rtol=tolerance, atol=tolerance)
    assert len(graphs) == 2
    return first


def cohorts_weights_and_engines(test):
    """Run a test of five clients for all, drawn and fixed cohorts, both weights, eager engines."""
    samplers = [All(), Uniform(2), Only(1, 3, 4)]
    for axis in (
        pytest.mark.parametrize("sampler", samplers, ids=["all", "2", "same 3"]),
        pytest.mark.parametrize("weights", ["uniform", "samples"]),
        pytest.mark.parametrize("engine", ["one_by_one", "stacked"]),
        exhaustive_but(
            "all-uniform-one_by_one",
            "all-samples-stacked",
            "2-samples-one_by_one",
            "2-uniform-stacked",
            "same 3-samples-stacked",
        ),
    ):
        test = axis(test)
    return test
