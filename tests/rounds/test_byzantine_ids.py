"""The Byzantine clients: a fraction that the seed draws, or a list of ids."""

import warnings

import pytest
from small_federations import classes, mlp, sections, seeded, shared_out
from tables import table_test

from pl_fed import Federation, clients
from pl_fed.attacks import SameValue
from pl_fed.rounds.byzantine_clients import draw_byzantine, mark_byzantine
from pl_fed.samplers import All

DATA = shared_out(classes([5, 8, 4]))


def set_up(name, arguments, *defence, **settings):
    client = getattr(clients, name)(seeded(mlp), **arguments)
    Federation(All(), *defence, seed=0, **sections(**settings)).setup(client, DATA, "fit")


@pytest.mark.slow
def test_warning_if_the_fraction_rounds_to_no_client():
    with pytest.warns(
        UserWarning, match=r"No client is Byzantine: `federation.adversary.fraction` = 0.1"
    ):
        set_up("FedAvg", {}, fraction=0.1, attack=SameValue())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*No client is Byzantine.*")
        set_up("FedAvg", {}, fraction=0.4, attack=SameValue())
        set_up("FedAvg", {}, fraction=0.0)


@pytest.mark.parametrize("nobody", [{}, {"fraction": 0.0}, {"fraction": 0}, {"ids": []}])
def test_warning_if_an_attack_has_no_byzantine_client(nobody):
    with pytest.warns(UserWarning, match="No client is Byzantine, so SameValue does nothing: set"):
        set_up("FedAvg", {}, attack=SameValue(), **nobody)


@pytest.mark.parametrize(
    ("fraction", "clients", "expected"),
    [(0, 10, 0), (0.2, 10, 2), (0.29, 10, 2), (1, 7, 7), (0.05, 10, 0), (0.7, 10, 7), (0.3, 10, 3)],
)
def test_fraction_is_rounded_down(fraction, clients, expected):
    assert int(draw_byzantine(fraction, clients, seed=0).sum()) == expected


@pytest.mark.slow
def test_rounding_of_the_fraction_loses_no_byzantine_client():
    for num_clients in range(1, 101):
        for count in range(num_clients + 1):
            draw = draw_byzantine(count / num_clients, num_clients, seed=0)
            assert int(draw.sum()) == count, (count, num_clients)


def test_seed_draws_the_byzantine_clients():
    def draw(seed):
        return draw_byzantine(0.3, 50, seed).nonzero().flatten().tolist()

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    clients = {client for seed in range(60) for client in draw(seed)}
    assert clients == set(range(50)), "everybody's turn comes"


def test_more_byzantine_clients_include_fewer():
    """Attacks of different strength are comparable."""
    few, many = draw_byzantine(0.2, 50, 3), draw_byzantine(0.6, 50, 3)
    assert bool(many[few].all())


def test_listed_ids_are_byzantine():
    assert mark_byzantine([4, 0], 5).tolist() == [True, False, False, False, True]
    assert mark_byzantine([], 3).tolist() == [False] * 3


@table_test("ids", [[5], [-1], [0, 9, 2]])
def test_unknown_ids_are_refused(ids):
    with pytest.raises(ValueError, match=r"adversary.ids` to be client ids from 0 to 4 but got \["):
        mark_byzantine(ids, 5)
