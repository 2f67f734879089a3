"""Ditto's steps, worked by hand on points.

Client k observes y; F_k(v) = ½ (v − y)², so a step on w is w + η (y − w), and one on v is
v + η (y − v + λ (w^t − v)).
"""

import copy
import functools

import pytest
import torch
from small_federations import (
    HalfSquares,
    Only,
    Point,
    classes,
    mlp,
    points,
    run_rounds,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test

import pl_fed
from pl_fed import EngineOptions, Federation
from pl_fed.aggregators import Median
from pl_fed.clients import Ditto, FedAvg
from pl_fed.samplers import All
from pl_fed.types import Batch

QUIET = {
    "accelerator": "cpu",
    "precision": "64-true",
    "limit_val_batches": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
ENGINES = ["one_by_one", "stacked"]
all_engines = pytest.mark.parametrize("engine", ENGINES)


def ditto(kind=Ditto, lr=0.5, optimizer=None, **kwargs):
    settings = {"local_steps": 1, "lam": 1.0, **kwargs}
    return kind(Point(), optimizer=optimizer or sgd(lr), criterion=HalfSquares(), **settings)


def solve(client, data, rounds, **kwargs):
    """Return w, and each client's v."""
    outcome = run_rounds(client, data, rounds=rounds, **kwargs)
    return outcome.w.tolist(), outcome.v.flatten().tolist()


TWO = shared_out(points([2.0], [6.0]))


@pytest.mark.slow
@all_engines
def test_one_step_on_w_and_two_on_v_equal_hand_computed_steps(engine):
    """λ = 1, η = 1/2, so that a step takes v to the mean of y and w^t.

    Round 0 from w = v = 0: w_k = 1, 3; v_k goes to (y + 0) / 2 = 1, 3 and stays there.
    Round 1 from w = 2: w_k = 2, 4; v_k goes to (y + 2) / 2 = 2, 4 and stays there.
    """
    client = ditto(personal_steps=2)
    assert solve(client, TWO, rounds=1, engine=engine) == ([2.0], [1.0, 3.0])
    assert solve(client, TWO, rounds=2, engine=engine) == ([3.0], [2.0, 4.0])


class PulledToTheLiveModel(Ditto):
    """The mistake of several known implementations: the pull follows w_k as it is trained."""

    def squared_distance(self, model, centre="broadcast"):
        live = self.global_model.value.detach()
        return (self.personal_model.value - live).square().sum()


@all_engines
def test_pull_to_the_live_model_gives_another_result(engine):
    """Its second step on v is pulled to w_k = 1, 3 instead of 0: v_k = 3/2, 9/2."""
    client = ditto(PulledToTheLiveModel, personal_steps=2)
    assert solve(client, TWO, rounds=1, engine=engine) == ([2.0], [1.5, 4.5])


@pytest.mark.slow
@all_engines
def test_more_steps_on_w_than_on_v_equal_hand_computed_steps(engine):
    """r = 2, s = 1. Round 0: w_k = 3/4 y = 1.5, 4.5, v_k = y/2. Round 1 from w = 3: w_k = 2.25,
    5.25; v_k = (y + 3) / 2."""
    client = ditto(local_steps=2, personal_steps=1)
    assert solve(client, TWO, rounds=1, engine=engine) == ([3.0], [1.0, 3.0])
    assert solve(client, TWO, rounds=2, engine=engine) == ([3.75], [2.5, 4.5])


@pytest.mark.slow
@all_engines
def test_v_has_a_learning_rate_of_its_own(engine):
    """λ = 2, η_v = 1/8: v_k = y/8; then y/8 + (y − y/8 + 2 (2 − y/8)) / 8."""
    client = ditto(lam=2.0, personal_lr=0.125)
    assert solve(client, TWO, rounds=1, engine=engine) == ([2.0], [0.25, 0.75])
    assert solve(client, TWO, rounds=2, engine=engine) == ([3.0], [0.90625, 1.71875])


@pytest.mark.slow
@all_engines
def test_absent_client_keeps_its_personal_model(engine):
    """The other's w is 0, 3, 4.5, and its v the mean of 6 and that: 3, 4.5, 5.25."""
    client = ditto()
    assert solve(client, TWO, 3, engine=engine, sampler=Only(1)) == ([5.25], [0.0, 5.25])
    started = ditto(kind=lambda net, **kwargs: Ditto(Point(start=5.0), **kwargs))
    assert solve(started, TWO, 3, engine=engine, sampler=Only(1))[1][0] == 5.0


@pytest.mark.slow
@all_engines
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_does_not_survive_the_round(engine, momentum):
    """One step a round: momentum has nothing to carry on, in either model."""
    client = ditto(optimizer=sgd(0.5, momentum=momentum))
    assert solve(client, TWO, 2, engine=engine) == ([3.0], [2.0, 4.0])


@all_engines
def test_momentum_works_within_the_round(engine):
    """λ = 0, η = 1/4, momentum 1/2, y = 2: gradients −2, −3/2; steps 1/2, 1/4 (3/2 + 1) = 5/8."""
    client = ditto(lam=0.0, optimizer=sgd(0.25, momentum=0.5), local_steps=2)
    assert solve(client, TWO, 1, engine=engine) == ([2.25], [1.125, 3.375])


def halve_per_round(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


@pytest.mark.slow
@all_engines
@pytest.mark.parametrize("schedule_in_trainer", [False, True], ids=["rounds", "trainer"])
def test_the_learning_rate_follows_the_rounds(tmp_path, engine, schedule_in_trainer):
    """η = 1/2 in round 0 and 1/4 in round 1, for v from its own 1/4 to 1/8; two steps each.

    The remaining share of the way to y after two steps is (1 − η)².
    """
    client = ditto(lam=0.0, lr_scheduler=halve_per_round, local_steps=2, personal_lr=0.25)
    if schedule_in_trainer:
        federation = Federation(All(), engine=EngineOptions(engine), seed=0)
        trainer = pl_fed.Trainer(federation, max_epochs=2, default_root_dir=tmp_path, **QUIET)
        trainer.fit(client, TWO)
        w = client.row("global").data.tolist()
        v = federation.store.read("personal", torch.arange(2)).flatten().tolist()
    else:
        w, v = solve(client, TWO, 2, engine=engine)
    first = 4 * (1 - 1 / 4)
    assert w == [first + (4 - first) * (1 - 9 / 16)]
    remaining = (3 / 4) ** 2 * (7 / 8) ** 2
    assert v == [2 * (1 - remaining), 6 * (1 - remaining)]


@all_engines
def test_a_partial_last_minibatch_counts_as_a_step(engine):
    """Three points in minibatches of two, unshuffled, η = 1/2: half of the way to the mean of the
    first two, then half of the way to the third; that twice for v."""
    data = shared_out(points([1.0, 3.0, 8.0]), batch_size=2)
    first, second, third = (float(y) for y in data.clients.targets[data.clients.train.samples(0)])
    client = ditto(lam=0.0, local_steps=None, local_epochs=1, personal_epochs=2)
    position, expected = 0.0, []
    for target in [(first + second) / 2, third] * 2:
        position += (target - position) / 2
        expected.append(position)
    w, v = solve(client, data, 1, engine=engine, shuffle=False)
    assert (w, v) == ([expected[1]], [expected[3]])


@pytest.mark.slow
@all_engines
def test_steps_and_epochs_count_the_same_work(engine):
    """Three samples in minibatches of two: an epoch is two steps."""
    data = shared_out(points([1.0, 3.0, 8.0]), batch_size=2)
    epochs = ditto(local_steps=None, local_epochs=3, personal_epochs=2)
    steps = ditto(local_steps=6, personal_steps=4)
    assert solve(epochs, data, 2, engine=engine) == solve(steps, data, 2, engine=engine)


@pytest.mark.slow
def test_default_round_trains_one_epoch_on_both_models():
    data = shared_out(points([1.0, 3.0, 8.0]), batch_size=2)
    default = ditto(local_steps=None)
    assert solve(default, data, 2) == solve(ditto(local_steps=2), data, 2)


def test_v_takes_as_many_steps_as_w_by_default():
    assert solve(ditto(local_steps=3), TWO, 2) == solve(
        ditto(local_steps=3, personal_steps=3), TWO, 2
    )


@pytest.mark.slow
@all_engines
def test_global_model_equals_fedavg(engine):
    """The personal models take nothing from the federation, and give nothing to it."""
    data = shared_out(classes([7, 3, 10]))
    optimizer = sgd(0.1, momentum=0.9)
    plain = FedAvg(seeded(mlp), optimizer=optimizer, local_epochs=2)
    client = Ditto(seeded(mlp), lam=3.0, optimizer=optimizer, local_epochs=2, personal_steps=1)
    result, expected = (
        run_rounds(algorithm, data, 3, engine=engine) for algorithm in (client, plain)
    )
    assert torch.equal(result.w, expected.w)


@pytest.mark.slow
@pytest.mark.parametrize(
    "server",
    [
        {"aggregator": Median()},
        {"server_optimizer": functools.partial(torch.optim.Adam, lr=0.05)},
        {"server_optimizer": functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)},
    ],
    ids=["median", "Adam", "momentum"],
)
def test_global_model_equals_fedavg_under_any_server(server):
    """Section 3.2, "Modularity": w is FedAvg's under the same server, and v is pulled to it."""
    data = shared_out(classes([7, 3, 10]))
    plain = FedAvg(seeded(mlp), optimizer=sgd(0.1), local_epochs=2)
    client = Ditto(seeded(mlp), lam=3.0, optimizer=sgd(0.1), local_epochs=2)
    result, expected, default_server = (
        run_rounds(algorithm, data, 3, **options)
        for algorithm, options in ((client, server), (plain, server), (client, {}))
    )
    assert torch.equal(result.w, expected.w)
    assert (result.v - default_server.v).abs().max() > 1e-3


@pytest.mark.slow
@all_engines
def test_a_huge_pull_follows_the_global_model(engine):
    """λ = 10⁶ with a learning rate of 1/λ: v is w^t, the model that the round began with."""
    data = shared_out(classes([7, 3, 10]))
    client = Ditto(seeded(mlp), lam=1e6, personal_lr=1e-6, optimizer=sgd(0.1), local_epochs=2)
    before, after = (run_rounds(client, data, rounds, engine=engine) for rounds in (2, 3))
    assert (after.v - before.w).abs().max() < 1e-5
    assert (before.w - after.w).abs().max() > 1e-2


def test_first_personal_model_is_the_first_global_model():
    client = Ditto(seeded(mlp))
    assert torch.equal(client.row("global").data, client.row("personal").data)
    assert client.global_model is not client.personal_model


def test_objective_equals_the_formula_of_the_paper():
    """F(w) + F(v) + λ/2 ‖v − w^t‖² at w = 1, v = 3, w^t = 2, y = 7, λ = 4: 18 + 8 + 2."""
    client = ditto(lam=4.0)
    client.row("global").data.fill_(1.0)
    client.row("personal").data.fill_(3.0)
    with client.reading({"broadcast": torch.tensor([2.0])}):
        loss = client.training_step(Batch(torch.zeros(1, 1), torch.tensor([[7.0]])), 0)
    assert loss.item() == 28.0
    loss.backward()
    assert client.global_model.value.grad.tolist() == [-6.0]
    assert client.personal_model.value.grad.tolist() == [-4.0 + 4.0 * 1.0]


@table_test(
    "arguments",
    [
        {"lam": -0.1},
        {"lam": float("nan")},
        {"lam": float("inf")},
        {"personal_lr": -1.0},
        {"personal_steps": 0},
        {"personal_epochs": 0},
        {"personal_steps": 1, "personal_epochs": 1},
        {"local_steps": 0},
        {"local_steps": 1, "local_epochs": 1},
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(arguments):
    name, value = next(iter(arguments.items()))
    with pytest.raises(ValueError, match=f"Expected .*{name}.* but got .*{value}"):
        Ditto(Point(), **arguments)


def test_global_model_is_the_net_of_the_user():
    net = Point(start=2.0)
    client = Ditto(net)
    assert client.global_model is net
    assert copy.deepcopy(client).global_model is not net
