"""``begin`` sets the number of local steps of each client: for clients of unequal speed."""

import math

import pytest
import torch
from contract_suite import find_configurations
from further_cases import covering, mark_if
from small_federations import (
    HalfSquares,
    Point,
    classes,
    mlp,
    points,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)
from torch import nn

import pl_fed.clients
from pl_fed.aggregators import Mean
from pl_fed.clients import APFL, Client, Ditto, FedAvg, Scaffold
from pl_fed.engine.choice import COMPILED, EAGER

SIZES = [7, 3, 10, 1]  # in minibatches of 4
BUDGETS = torch.tensor([3, 0, 1, 2])  # of each client, in steps; an epoch has 2, 1, 3 and 1


class Budgeted:
    """A client whose number of steps is its own budget."""

    budgets = BUDGETS

    def begin(self, client):
        super().begin(client)
        for model, planned in client.steps.items():
            client.steps[model] = self.budgets.to(planned)[client.ids][:, None]


def budgeted(client, budgets=BUDGETS):
    """Return a client with the budgets of ``Budgeted``."""
    kind = type(client)
    client.__class__ = type(f"Budgeted{kind.__name__}", (Budgeted, kind), {"budgets": budgets})
    return client


def run(client, engine="one_by_one", **settings):
    return run_rounds(client, shared_out(classes(SIZES)), engine=engine, **settings)


# of the others, the engines agree in test_shipped_pieces_agree.py or test_client_contract.py
CHOSEN = {"FedAvg", "FedRep", "Local", "Mapper", "PFedMe"}


def walk_clients():
    """Return a case for each algorithm that needs nothing but a net."""
    own = {"Scaffold": [{"optimizer": sgd(0.1)}], "LpProj": [{"dimensions": 7}]}
    own |= {"L2SGD": [{"lam": 0.5}], "MeanRegularized": [{"lam": 0.5}]}
    pairs = find_configurations(pl_fed.clients, Client, own)
    return [
        mark_if(kind.__name__ not in CHOSEN, kind, arguments, id=kind.__name__)
        for kind, arguments in pairs
        if kind.__name__ != "FedExLoRA"
    ]


def net():
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "arguments"), walk_clients())
def test_engines_agree_on_the_steps_of_every_algorithm(kind, arguments):
    client = budgeted(kind(seeded(net), **{"optimizer": sgd(0.1), **arguments}))
    expected = run(client)
    assert expected.w.isfinite().all()
    assert all(report["train/rejected"] == 0 for report in expected.reports)
    assert expected.distance(run(client, "stacked")) <= 1e-10
    # not always 0: a product of matrices of another size may round otherwise (Mocha)
    assert expected.distance(run(client, chunk_size=1)) <= 1e-14
    assert expected.distance(run(client, "stacked", chunk_size=2)) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "kept"), covering([sgd(0.1, momentum=0.9), torch.optim.Adam], [False, True])
)
def test_every_engine_takes_the_steps(uncompiled, optimizer, kept):
    client = budgeted(Ditto(seeded(mlp), optimizer=optimizer))
    settings = {"chunk_size": 2, "keep_optimizer_state": kept}
    expected = run(client, **settings)
    for engine in ("stacked", *COMPILED):
        assert expected.distance(run(client, engine, **settings)) <= 1e-10, engine


def test_as_many_steps_as_planned_are_the_same_run():
    planned = torch.tensor([2, 1, 3, 1])
    assert run(FedAvg(seeded(mlp), optimizer=sgd(0.1))).distance(
        run(budgeted(FedAvg(seeded(mlp), optimizer=sgd(0.1)), planned))
    ) == 0  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("engine", EAGER)
def test_steps_of_one_client_have_a_closed_form(engine):
    """A point moves to its client's mean: after k steps of 0.5, 1 − 0.5^k of the way is done."""
    client = FedAvg(Point(), criterion=HalfSquares(), optimizer=sgd(0.5))
    client = budgeted(client, torch.tensor([0, 1, 2]))
    data = shared_out(points([8.0], [8.0], [8.0]))
    outcome = run_rounds(client, data, rounds=1, engine=engine, aggregator=Mean())
    assert outcome.w.tolist() == [(0 + 4 + 6) / 3]


@pytest.mark.slow
@pytest.mark.parametrize("engine", EAGER)
def test_client_without_steps_does_not_count_in_the_loss(engine):
    counted = run(budgeted(FedAvg(seeded(mlp), optimizer=sgd(0.1))), engine, rounds=1)
    stepping = torch.tensor([3, 9, 1, 2])
    losses = [
        run(budgeted(FedAvg(seeded(mlp), optimizer=sgd(0.1)), only(k, stepping)), engine, rounds=1)
        .reports[0]["train/loss"]
        for k in (0, 2, 3)
    ]  # fmt: skip
    assert float(counted.reports[0]["train/loss"]) == pytest.approx(sum(map(float, losses)) / 3)


def only(client, steps):
    """Return the steps of one client, and none for the others."""
    return torch.where(torch.arange(len(steps)) == client, steps, 0)


@pytest.mark.slow
@pytest.mark.parametrize("engine", EAGER)
def test_round_without_any_step_changes_nothing(engine):
    client = budgeted(Ditto(seeded(mlp), optimizer=sgd(0.1)), torch.zeros(4, dtype=torch.int64))
    outcome = run(client, engine)
    assert torch.equal(outcome.w, client.row("global").data.double())
    assert torch.equal(outcome.v, outcome.w.expand(4, -1))
    assert all("train/loss" not in report for report in outcome.reports)
    assert all(report["train/rejected"] == 0 for report in outcome.reports)


def test_mean_over_no_step_is_zero_for_the_algorithm():
    """APFL moves α by a mean over the local steps."""
    client = budgeted(APFL(seeded(mlp), alpha=0.3, alpha_lr=0.1, optimizer=sgd(0.1)))
    alphas = run(client).states["alpha"].flatten().tolist()
    assert alphas[1] == pytest.approx(0.3)
    assert all(abs(alpha - 0.3) > 1e-6 for alpha in (alphas[0], alphas[2], alphas[3]))


def test_control_variate_of_scaffold_stays_without_steps():
    client = budgeted(Scaffold(seeded(mlp), optimizer=sgd(0.1)))
    controls = run(client).states["own_control"]
    assert not controls[1].any()
    assert controls[[0, 2, 3]].abs().sum(1).gt(0).all()


@pytest.mark.slow
def test_each_model_has_its_own_steps():
    class Personal(Ditto):
        def begin(self, client):
            super().begin(client)
            if client.steps:  # an evaluation has none
                client.steps["global"] = torch.zeros_like(client.steps["global"])

    client = Personal(seeded(mlp), optimizer=sgd(0.1))
    for engine in EAGER:
        outcome = run(client, engine)
        assert torch.equal(outcome.w, client.row("global").data.double())
        assert not torch.equal(outcome.v[0], outcome.v[1])


@pytest.mark.slow
def test_steps_may_be_changed_in_place():
    class InPlace(FedAvg):
        def begin(self, client):
            super().begin(client)
            for steps in client.steps.values():
                steps.copy_(BUDGETS[client.ids][:, None])

    client = InPlace(seeded(mlp), optimizer=sgd(0.1))
    assert run(client).distance(run(budgeted(FedAvg(seeded(mlp), optimizer=sgd(0.1))))) == 0


def test_losses_of_aggregators_are_undefined_without_steps():
    class Notes(Mean):
        losses = None

        def __call__(self, uploads, weights, context):
            Notes.losses = context.losses
            return super().__call__(uploads, weights, context)

    run(budgeted(FedAvg(seeded(mlp), optimizer=sgd(0.1))), aggregator=Notes())
    assert [math.isnan(loss) for loss in Notes.losses.tolist()] == [False, True, False, False]
