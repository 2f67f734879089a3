"""FedRep against a loop that trains the head, then the body, with an optimizer for each."""

import by_hand
import pytest
import torch
from exhaustive import exhaustive_but
from small_federations import Only, classes, mlp, run_rounds, seeded, sgd, shared_out
from tables import table_test

from pl_fed import EngineOptions, Federation
from pl_fed.clients import FedAvg, FedPer, FedRep
from pl_fed.clients.fedper import belongs
from pl_fed.data.batches import LocalWork

SIZES = [7, 3, 10, 2]  # minibatches of 4: one to three in a pass
ENGINES = ["one_by_one", "stacked", "stacked_compiled", "one_by_one_compiled"]


def make_data(sizes=SIZES):
    return shared_out(classes(sizes, seed=2), batch_size=4)


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def simulate(own, rounds, head, body, optimizer, cohort):
    """``head`` and ``body`` give the number of steps of a client with so many in a pass."""
    data, server = make_data(), seeded(mlp).double()

    def is_own(name):
        return belongs(name, own)

    states = [server.state_dict() for _ in SIZES]
    for _ in range(rounds):
        nets = []
        for k in cohort:
            net = by_hand.mixed(server, states[k], is_own)
            batches, steps_per_pass = by_hand.minibatches(data, k, 4), by_hand.per_pass(data, k, 4)
            net = by_hand.trained(net, batches, head(steps_per_pass), is_own, optimizer)
            net = by_hand.trained(
                net, batches, body(steps_per_pass), lambda n: not is_own(n), optimizer
            )
            states[k] = net.state_dict()
            nets.append(net)
        server = by_hand.mean_of(nets, server, is_own)
    return [by_hand.mixed(server, state, is_own) for state in states], server


WORK = [
    (["2"], {"head_epochs": 2, "local_epochs": 1}, lambda n: 2 * n, lambda n: n),
    (["0", "2.bias"], {"head_steps": 3, "local_steps": 2}, lambda n: 3, lambda n: 2),
    (["2"], {"local_steps": 2}, lambda n: 2, lambda n: 2),
]


@exhaustive_but(
    "one_by_one-0.0-own0*",
    "one_by_one-0.9-own1*",
    "one_by_one-0.0-own2*",
    "stacked-0.9-own3*",
    "stacked_compiled-0.0-own8*",
    "one_by_one_compiled-0.9-own9*",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "momentum", "own", "work", "head", "body"),
    [
        (engine, (0.0, 0.9)[(i + j) % 2], *work)
        for i, engine in enumerate(ENGINES)
        for j, work in enumerate(WORK)
    ],
)
def test_rounds_train_the_head_before_the_body(uncompiled, engine, momentum, own, work, head, body):
    """The head's momentum does not move it on when it is the body's turn.

    Every pair of an engine, a momentum and work.
    """
    optimizer = sgd(0.1, momentum=momentum)
    nets, server = simulate(own, 2, head, body, optimizer, [0, 2, 3])
    client = FedRep(seeded(mlp), own, optimizer=optimizer, **work)
    settings = {"sampler": Only(0, 2, 3), "shuffle": False, "engine": engine, "chunk_size": 2}
    result = run_rounds(client, make_data(), rounds=2, **settings)
    torch.testing.assert_close(result.w, by_hand.row(server))
    torch.testing.assert_close(result.v, torch.stack([by_hand.row(net) for net in nets]))


def test_head_has_a_separate_adam_state():
    """The body's Adam counts steps that it stands still in, and no more: after one step of each
    part the head is that of Adam alone, and the body has moved by Adam's first step, corrected for
    two: 0.1 g / 0.19 over √(0.001 g² / 0.001999)."""
    client = FedRep(seeded(mlp), optimizer=adam, head_steps=1, local_steps=1)
    result = run_rounds(client, make_data([4]), rounds=1, shuffle=False)
    start = by_hand.row(seeded(mlp).double())
    torch.testing.assert_close(result.v[0, 25:], run_alone()[25:])
    step = 0.01 * (0.1 / 0.19) / (0.001 / 0.001999) ** 0.5
    moved = (result.v[0, :25] - start[:25]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, step), rtol=1e-3, atol=1e-6)


def run_alone():
    """One client, one Adam step on the head."""
    data, net = make_data([4]), seeded(mlp).double()
    batches = by_hand.minibatches(data, 0, 4)
    return by_hand.row(by_hand.trained(net, batches, 1, lambda n: belongs(n, ["2"]), adam))


@pytest.mark.slow
def test_no_head_equals_fedavg():
    settings = {"optimizer": sgd(0.1, momentum=0.5), "local_epochs": 2}
    client = FedRep(seeded(mlp), [], head_epochs=3, **settings)
    result = run_rounds(client, make_data())
    assert torch.equal(result.w, run_rounds(FedAvg(seeded(mlp), **settings), make_data()).w)


@pytest.mark.slow
def test_rounds_differ_from_fedper():
    settings = {"optimizer": sgd(0.1), "local_steps": 2}
    outcome = run_rounds(FedRep(seeded(mlp), **settings), make_data())
    assert outcome.distance(run_rounds(FedPer(seeded(mlp), **settings), make_data())) > 1e-3


@pytest.mark.slow
def test_the_head_never_leaves_the_client():
    client = FedRep(seeded(mlp), optimizer=sgd(0.1), head_epochs=2)
    federation = Federation(Only(1, 2), seed=0, engine=EngineOptions("stacked"))
    federation.setup(client, make_data(), "fit")
    first = client.row("global").data.clone()
    federation.run_round(0, client.train().configure_optimizers())
    moved = client.row("global").data != first
    assert moved[:25].all()
    assert not moved[25:].any()
    own = federation.store.read("own", torch.arange(4))
    assert torch.equal(own[[0, 3]], first[25:].expand(2, -1))
    assert not torch.equal(own[1], own[2])


@pytest.mark.parametrize(
    ("settings", "head", "personal"),
    [
        ({}, LocalWork(None, 1), LocalWork(None, 2)),
        ({"local_epochs": 2}, LocalWork(None, 2), LocalWork(None, 4)),
        ({"local_steps": 3}, LocalWork(3), LocalWork(6)),
        ({"head_steps": 5, "local_steps": 1}, LocalWork(5), LocalWork(6)),
        ({"head_epochs": 10}, LocalWork(None, 10), LocalWork(None, 11)),
    ],
)
def test_default_work_on_head_and_body(settings, head, personal):
    client = FedRep(seeded(mlp), **settings)
    assert [client.objective.work(model) for model in client.trained] == [head, personal]


@table_test(
    ("arguments", "match"),
    [
        ({"head_steps": 0}, "`head_steps` to be at least 1 but got 0"),
        ({"head_epochs": -1}, "`head_epochs` to be at least 1 but got -1"),
        ({"head_steps": 1, "head_epochs": 1}, "only one of `model.head_steps` and"),
        ({"head_steps": 5}, "same unit but got 5 steps on the head and 1 epochs on the body"),
        ({"head_epochs": 2, "local_steps": 3}, "got 2 epochs on the head and 3 steps on the body"),
        ({"own": ["7"]}, "`own` to list names among"),
    ],
)
def test_invalid_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        FedRep(seeded(mlp), **arguments)


def test_states_of_local_optimizers_that_clients_keep_are_refused():
    data, kept = make_data(), {"keep_optimizer_state": True}
    optimizer = sgd(0.1, momentum=0.9)
    client = FedRep(seeded(mlp), local_steps=1, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"`federation\.engine\.keep_optimizer_state` to be false"):
        run_rounds(client, data, 1, **kept)
    averaging = FedRep(seeded(mlp), own=[], local_steps=1, optimizer=optimizer)  # without a head
    run_rounds(averaging, data, 1, **kept)
