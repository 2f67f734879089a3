"""Ditto's clients choose λ by their own validation data: against a choice made anew."""

import pytest
import torch
from exhaustive import exhaustive_for
from personal_models import trained
from small_federations import Only, Views, classes, mlp, run_rounds, seeded, sgd, shared_out
from tables import table_test
from torch import nn
from torch.nn.functional import cross_entropy

from pl_fed.clients import Ditto, DittoChoice, DittoGreedy
from pl_fed.samplers import All

SIZES = [30, 24, 12, 8, 40, 16, 4, 26]  # with a quarter for validation: 7 6 3 2 10 4 1 6, about
LAMS = (0.0, 0.5, 3.0)


def make_data(**kwargs):
    return shared_out(classes(SIZES, seed=4), val_fraction=0.25, **kwargs)


def make_client(net=mlp, **kwargs):
    settings = {"lams": LAMS, "lam": 0.5, "optimizer": sgd(0.3), "local_epochs": 4, **kwargs}
    return DittoChoice(seeded(net), **settings)


def validation_losses(rows, data):
    """By plain torch: each client's loss with each candidate, [clients, candidates]; 0 for none."""
    losses = torch.zeros(len(SIZES), len(rows), dtype=torch.float64)
    net = mlp().double()
    for k in range(len(SIZES)):
        index = data.clients.val.samples(k)
        for i, candidates in enumerate(rows):
            nn.utils.vector_to_parameters(candidates[k], net.parameters())
            if len(index):
                outputs = net(data.clients.inputs[index].double())
                losses[k, i] = cross_entropy(outputs, data.clients.targets[index]).detach()
    return losses


@exhaustive_for("one_by_one-4", "one_by_one-6")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "enough"),
    [("one_by_one", 1), ("one_by_one", 4), ("one_by_one", 6), ("stacked", 4)],
)
def test_clients_with_enough_validation_data_choose_the_best_lambda(engine, enough):
    data = make_data()
    result = trained(make_client(min_validation=enough), data, engine=engine)
    rows = [result.kept[f"personal_{i}"] for i in range(3)]
    losses = validation_losses(rows, data)
    sizes = data.clients.val.sizes
    assert {1, 4, 6} <= set(sizes.tolist())  # on both sides of each bound, and at it
    expected = torch.where(sizes >= enough, losses.argmin(1), 1)
    assert result.kept["choice"][:, 0].tolist() == expected.tolist()
    assert len(set(expected[sizes >= enough].tolist())) > 1
    chosen = losses.gather(1, expected[:, None])[:, 0]
    measured = result.metrics["personal"]["loss"][sizes > 0]
    torch.testing.assert_close(measured, chosen[sizes > 0])


@pytest.mark.slow
def test_each_candidate_equals_ditto_with_its_lambda():
    result = trained(make_client(personal_lr=0.1, personal_steps=3), make_data())
    for i, lam in enumerate(LAMS):
        settings = {"optimizer": sgd(0.3), "local_epochs": 4}
        alone = Ditto(seeded(mlp), lam, personal_lr=0.1, personal_steps=3, **settings)
        expected = trained(alone, make_data())
        torch.testing.assert_close(result.kept[f"personal_{i}"], expected.kept["personal"])
        torch.testing.assert_close(result.w, expected.w)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_single_candidate_equals_ditto():
    result = trained(make_client(lams=[0.5]), make_data(), 3)
    settings = {"optimizer": sgd(0.3), "local_epochs": 4}
    expected = trained(Ditto(seeded(mlp), 0.5, **settings), make_data(), 3)
    assert torch.equal(result.w, expected.w)
    assert torch.equal(result.kept["personal_0"], expected.kept["personal"])
    for model in ("global", "personal"):
        assert torch.equal(result.metrics[model]["loss"], expected.metrics[model]["loss"])


@pytest.mark.slow
def test_client_keeps_its_choice_until_its_next_round():
    client = make_client()
    first = trained(client, make_data(), 1, sampler=All())
    only = trained(client, make_data(), 3, sampler=Only(0, 3))
    choice = only.kept["choice"][:, 0]
    assert choice[[1, 2, 4, 5, 6, 7]].tolist() == [1.0] * 6  # that of `lam`, before any round
    assert choice[3] == 1
    assert first.kept["choice"][:, 0].tolist() != [1.0] * 8


def batch_norm_net():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.mark.slow
def test_statistics_belong_to_the_chosen_model():
    result = trained(make_client(batch_norm_net, min_validation=1), make_data(batch_size=64))
    models = result.federation.session.states.begin(torch.arange(len(SIZES))).models
    for k, choice in enumerate(result.kept["choice"][:, 0].long().tolist()):
        personal, candidate = models["personal"][k], models[f"personal_{choice}"][k]
        assert torch.equal(personal.parameters, candidate.parameters)
        assert torch.equal(personal.statistics, candidate.statistics)


@table_test(
    ("arguments", "match"),
    [
        ({"lams": []}, r"`lams` to be distinct numbers but got \[\]"),
        ({"lams": [1.0, 1.0]}, r"`lams` to be distinct numbers but got \[1.0, 1.0\]"),
        ({"lams": [-1.0, 1.0]}, "`lams` to be at least 0, and finite, but got -1.0"),
        ({"lam": 0.3}, r"`lam` to be one of \(0.1, 1.0, 2.0\) but got 0.3"),
        ({"min_validation": 0}, "`min_validation` to be at least 1 but got 0"),
    ],
)
def test_invalid_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        DittoChoice(mlp(), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.0, 0.2])
@pytest.mark.parametrize("kind", [DittoChoice, DittoGreedy])
@pytest.mark.parametrize("chunk_size", [1, None])
def test_clients_without_validation_data_have_finite_personal_models(kind, fraction, chunk_size):
    """One of three, or all: each takes the λ that there is for them."""
    data = shared_out(classes([20, 12, 2], shape=(2, 2)), val_fraction=fraction)
    client = kind(seeded(Views), lams=LAMS, lam=0.5, optimizer=sgd(0.1), local_steps=2)
    result = run_rounds(client, data, rounds=1, chunk_size=chunk_size)
    assert result.v.isfinite().all()


def test_single_number_as_lams_is_refused():
    for kind in (DittoChoice, DittoGreedy):
        with pytest.raises(TypeError, match="`lams` to be an object of a subclass of Sequence but"):
            kind(mlp(), lams=0.5)
