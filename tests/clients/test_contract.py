"""Declarations of an algorithm, and its part of a round without a federation."""

import copy

import pytest
import torch
from small_federations import classes, mlp, run_rounds, seeded, sgd, shared_out
from tables import table_test

from pl_fed import Federation
from pl_fed.clients import Client, FedAvg, Scaffold
from pl_fed.clients.contract import RESERVED_NAMES, MissingModelError, Model
from pl_fed.samplers import Uniform
from pl_fed.types import Batch


def make_batch(size=5):
    draw = torch.Generator().manual_seed(0)
    return Batch(torch.randn(size, 4, generator=draw), torch.arange(size) % 3)


# Names


def declare(client, kind, name):
    if kind == "model":
        client.set_models({"global": Model(), name: Model()})
    else:
        {"state": client.add_state, "server state": client.add_server_state}[kind](name, 0.0)


KINDS = ("model", "state", "server state")


@table_test("kind", KINDS)
@table_test("name", RESERVED_NAMES)
def test_a_reserved_name_is_refused(kind, name):
    match = f"name of a {kind} to differ from the reserved names broadcast, .* '{name}'"
    with pytest.raises(ValueError, match=match):
        declare(FedAvg(seeded(mlp)), kind, name)


@table_test("kind", KINDS)
@table_test("name", ["", "a.b", "two words", "3rd", "personal-2"])
def test_a_name_that_is_no_identifier_is_refused(kind, name):
    match = f"^Expected the name of a {kind} to be an identifier but got '{name}'"
    with pytest.raises(ValueError, match=match):
        declare(FedAvg(seeded(mlp)), kind, name)


@table_test("second", KINDS)
@table_test("first", KINDS)
def test_duplicate_name_is_refused(first, second):
    client = FedAvg(seeded(mlp))
    declare(client, first, "own")
    if first == second == "model":  # models are declared together, in place of those before
        declare(client, second, "own")
        return
    match = f"name of a {second} to differ from the names of other models and states but got 'own'"
    with pytest.raises(ValueError, match=match):
        declare(client, second, "own")


@table_test("name", ["global", "personal"])
def test_state_with_the_name_of_a_default_model_is_refused(name):
    with pytest.raises(ValueError, match=f"to differ from .* but got '{name}' twice"):
        FedAvg(seeded(mlp)).add_state(name, 0.0)


def test_refused_name_of_a_server_state_declares_no_state():
    client = FedAvg(seeded(mlp))
    with pytest.raises(ValueError, match="name of a server state to differ from the reserved"):
        client.add_state("own", 0.0, mean="samples")
    with pytest.raises(ValueError, match=r"name of a server state .* but got 'own' twice"):
        client.add_state("own", 0.0, mean="own")
    assert client.state_defaults() == {}
    assert client.server_state_defaults() == {}


@table_test(
    ("models", "description"),
    [
        ({}, "none"),
        ({"global": Model(trained=False), "personal": Model(trained=False)}, "global, personal"),
    ],
)
def test_models_without_a_trained_model_are_refused(models, description):
    match = f"`models` of FedAvg to have a trained model but got {description}"
    with pytest.raises(ValueError, match=match):
        FedAvg(seeded(mlp)).set_models(models)


class Idle(Client):
    """Its personal model is evaluated, and trained nowhere: it is the broadcast."""

    def __init__(self, net, **kwargs):
        models = {"global": Model(), "personal": Model(trained=False)}
        super().__init__(net, models=models, **kwargs)

    def training_step(self, batch, batch_idx):
        return self.loss("global", batch)


def test_untrained_model_equals_the_broadcast():
    client = Idle(seeded(mlp), optimizer=sgd(0.1))
    assert client.trained == ("global",)
    assert client.evaluated == ("global", "personal")
    assert client.state_defaults() == {}
    outcome = run_rounds(client, shared_out(classes([7, 3])))
    assert torch.equal(outcome.v, outcome.w.expand(2, -1))


# Rows


def test_error_for_an_unknown_row_lists_the_rows_of_the_round():
    client = Counting(seeded(mlp))
    round = client.run_begin(client.new_round())
    with client.reading(round.client_rows(0)):
        match = r"row of the round \(broadcast, .*, count, .*global.lr\) but got 'cuont': dec"
        with pytest.raises(ValueError, match=match):
            client.read("cuont")
        assert client.read("count").tolist() == [2.0]
    with pytest.raises(ValueError, match="none outside of a round"):
        client.read("count")


@pytest.mark.parametrize(
    ("default", "row"),
    [
        (2, [2.0]),
        (0.5, [0.5]),
        (torch.tensor([1, 2]), [1.0, 2.0]),
        (lambda: torch.tensor([3.0, 4.0, 5.0]), [3.0, 4.0, 5.0]),
    ],
)
def test_a_default_is_a_number_a_tensor_or_a_function(default, row):
    client = FedAvg(seeded(mlp)).double()
    client.add_state("own", default)
    client.add_server_state("shared", default)
    assert client.state_defaults()["own"].tolist() == row
    assert client.server_state_defaults()["shared"].tolist() == row
    assert client.state_defaults()["own"].dtype == torch.float64
    assert client.new_round(clients=2).states["own"].tolist() == [row, row]


@table_test(
    ("default", "description"),
    [
        (torch.zeros(2, 3), r"shape \[2, 3\]"),
        (torch.tensor(1.0), r"shape \[\]"),
        ("0", "str"),
        (None, "NoneType"),
        (lambda: 1.5j, "complex"),
    ],
)
def test_default_of_a_wrong_shape_or_type_is_refused(default, description):
    client = FedAvg(seeded(mlp))
    client.add_state("own", default)
    match = rf"default of state `own` to be a number or a tensor \[length\] but got {description}"
    with pytest.raises(ValueError, match=match):
        client.state_defaults()


def test_copied_client_has_independent_defaults():
    """A bound method belongs to the copy, and its parameters are independent."""
    client = FedAvg(seeded(mlp))
    client.add_state("own", client.initial_row)
    copied_client = copy.deepcopy(client)
    copied_client.renew_rows()
    copied_client.row("global").data.add_(1.0)
    assert torch.equal(copied_client.state_defaults()["own"], copied_client.row("global").data)
    assert torch.equal(client.state_defaults()["own"], client.row("global").data)
    difference = copied_client.state_defaults()["own"] - client.state_defaults()["own"]
    torch.testing.assert_close(difference, torch.ones_like(difference))
    copied_client.add_state("more", 0.0)
    assert set(client.state_defaults()) == {"own"}


class Remembers(FedAvg):
    """Keeps its last model; the server keeps the mean over all clients."""

    def __init__(self, net, **kwargs):
        super().__init__(net, **kwargs)
        self.add_state("last", self.initial_row, mean="mean_of_last")

    def end_round(self, client):
        client.states["last"] = client.models["global"].parameters.clone()
        return super().end_round(client)


@pytest.mark.parametrize(
    ("kind", "state", "mean"),
    [(Remembers, "last", "mean_of_last"), (Scaffold, "own_control", "control")],
)
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_the_server_keeps_the_mean_over_all_clients(kind, state, mean, engine):
    """Two of five clients take part in a round."""
    client, data = kind(seeded(mlp), optimizer=sgd(0.1)), shared_out(classes([7, 3, 10, 1, 5]))
    settings = {"sampler": Uniform(2), "engine": engine, "chunk_size": 1}
    outcome = run_rounds(client, data, rounds=4, **settings)
    rows = outcome.states[state]
    assert 2 < len(rows.unique(dim=0)) <= 5
    torch.testing.assert_close(outcome.server_states[mean], rows.mean(0), rtol=0, atol=1e-14)


# A plain test of an algorithm


class Counting(Client):
    """Weights the loss of the global model by the client's number of rounds."""

    def __init__(self, net, **kwargs):
        super().__init__(net, models={"global": Model()}, **kwargs)
        self.add_state("count", 1)

    def begin(self, client):
        client.states["count"] = client.states["count"] + 1

    def training_step(self, batch, batch_idx):
        return self.read("count")[0] * self.loss("global", batch)

    def end_round(self, client):
        return super().end_round(client) / client.states["count"]


def test_client_runs_its_round_without_a_federation():
    client, batch = Counting(seeded(mlp), optimizer=sgd(0.25)), make_batch()
    round = client.new_round(clients=2, samples=5, steps=3)
    round.states["count"][1] = 6.0
    client.run_begin(round)
    plain = client.loss("global", batch)
    for position, count in enumerate((2.0, 7.0)):
        with client.reading(round.client_rows(position)):
            torch.testing.assert_close(client.training_step(batch, 0), count * plain)
    round.models["global"].parameters = round.models["global"].parameters + 14.0
    upload, new_states = client.run_end_round(round)
    torch.testing.assert_close(upload[0], torch.full_like(upload[0], 7.0), rtol=0, atol=1e-5)
    torch.testing.assert_close(upload[1], torch.full_like(upload[1], 2.0), rtol=0, atol=1e-5)
    assert new_states["count"].tolist() == [[2.0], [7.0]]


def test_new_round_has_the_default_states():
    client = Counting(seeded(mlp), optimizer=sgd(0.25))
    round = client.new_round(clients=3, samples=5, steps=2)
    assert len(round) == 3
    assert round.ids.tolist() == [0, 1, 2]
    assert round.samples.tolist() == [[5.0]] * 3
    assert round.validation_samples.tolist() == [[0.0]] * 3
    assert round.steps["global"].tolist() == [[2]] * 3
    assert round.lr["global"].tolist() == [0.25]
    assert torch.equal(round.broadcast.parameters, client.row("global").data)
    round.broadcast.parameters.zero_()
    round.states["count"].zero_()
    assert client.row("global").data.any()
    assert client.new_round().states["count"].tolist() == [[1.0]]


class BeginsAt(FedAvg):
    """Begins at: an algorithm with personal models, whose `begin` reads a model by name."""

    def __init__(self, net, name, models=("global",)):
        super().__init__(net, optimizer=sgd(0.1))
        self.set_models({model: Model() for model in models})
        self.name = name

    def begin(self, client):
        client.extra["start"] = client.models[self.name].parameters


@table_test(
    ("models", "name", "match"),
    [
        (["global"], "global", r"\(empty at this stage\) but got 'global': read .*broadcast"),
        (["global", "personal"], "global", r"\(personal\) but got 'global': read the global model"),
        (["global", "personal"], "own", r"\(personal\) but got 'own': declare further models by"),
    ],
)
def test_a_model_that_the_round_does_not_have_is_refused(models, name, match):
    client = BeginsAt(seeded(mlp), name, models)
    match = rf"^Expected a name in `client.models` {match}"
    with pytest.raises(MissingModelError, match=match):
        client.run_begin(client.new_round())
    with pytest.raises(MissingModelError, match=match) as error:
        run_rounds(client, shared_out(classes([6, 6])), rounds=1)
    assert "`begin`" in error.value.__notes__[0]


def test_models_of_a_round_are_a_dictionary():
    client = BeginsAt(seeded(mlp), "personal", ["global", "personal"])
    round = client.run_begin(client.new_round(clients=2))
    assert {*round.copy().models} == {*round.select(torch.tensor([1])).models}
    assert round.copy().models["personal"] is round.models["personal"]
    with pytest.raises(KeyError):
        round.select(torch.tensor([1])).models["own"]


@table_test(
    ("settings", "match"),
    [
        ({"work": 2}, "`work` of a Model to be a pl_fed.data.batches.LocalWork, .* but got 2"),
        ({"lr": "0.1"}, "`lr` of a Model to be a number, or None, but got '0.1'"),
    ],
)
def test_settings_of_a_model_are_checked(settings, match):
    with pytest.raises(TypeError, match=match):
        Model(**settings)


def test_models_are_records():
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1))
    with pytest.raises(TypeError, match="a Model for each name but got 'kept' for 'own': give pl"):
        client.set_models({"global": Model(), "own": "kept"})


def test_a_misspelt_option_of_a_model_is_refused():
    """torch ignores unknown options of parameter groups."""

    def set_up(**options):
        client = FedAvg(seeded(mlp), optimizer=sgd(0.1))
        client.set_models({"global": Model(options=options)})
        Federation(Uniform(2), seed=0).setup(client, shared_out(classes([6, 6])), "fit")

    with pytest.raises(
        ValueError, match=r"`options` of model `global` .* \(lr, mom.* got `momentun`"
    ):
        set_up(momentun=0.5)
    set_up(momentum=0.5, foreach=False, beta=0.0)
