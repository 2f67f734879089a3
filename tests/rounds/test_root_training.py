"""The root update: local training on the server's own samples."""

import copy
import itertools
import math
from functools import partial

import pytest
import torch
from by_hand import row
from equal_trials import trials_skipped
from further_cases import covering
from small_federations import (
    NOTHING_READABLE,
    Given,
    HalfSquares,
    Only,
    Point,
    classes,
    mlp,
    points,
    run_rounds,
    sections,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close

import pl_fed
from pl_fed import Federation
from pl_fed.aggregators import Chain, Clipping, FLTrust, Mean
from pl_fed.attacks import Attack, RandomLabels
from pl_fed.clients import (
    APFL,
    FLAME,
    Ditto,
    FedAvg,
    FedBABU,
    FedPer,
    FedProx,
    FedRep,
    FedTilt,
    LpProj,
    PFedFDA,
    PFedMe,
    Scaffold,
)
from pl_fed.data import FederatedData
from pl_fed.data.source import Arrays
from pl_fed.random import key
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All, Uniform

SIZES = [15, 10, 19, 9]  # less the root's: none leaves a minibatch of one, for BatchNorm
ROOT = 11


class Watched(FLTrust):
    """Keeps the roots that it is given, and the broadcasts."""

    def __init__(self):
        super().__init__()
        self.roots, self.broadcasts = [], []

    def forward(self, uploads, weights, context):
        self.roots.append(context.root.clone())
        self.broadcasts.append(context.broadcast.clone())
        return super().forward(uploads, weights, context)


def linear_net():
    return mlp()


def batch_norm_net():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def dropout_net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 3))


def torch_dropout_net():
    """With a layer that draws from torch's own generator."""

    class Noisy(nn.Module):
        def forward(self, x):
            return x + 0.1 * torch.randn_like(x) if self.training else x

    return nn.Sequential(nn.Linear(4, 8), Noisy(), nn.Tanh(), nn.Linear(8, 3))


def frozen_net():
    net = mlp()
    net[0].requires_grad_(False)
    return net


NETS = [linear_net, batch_norm_net, dropout_net, torch_dropout_net, frozen_net]


def data_with_root(**settings):
    return shared_out(classes(SIZES), root_samples=ROOT, **settings)


def make_federation(client, data, run=RunSettings(), **settings):
    settings = {"seed": 5, "engine": "one_by_one", "aggregator": Watched(), **settings}
    federation = Federation(settings.pop("sampler", All()), **sections(**settings))
    with trials_skipped():
        federation.setup(client, data, "fit", settings=run)
    client.train()
    return federation


def run_roots(client, data, rounds=2, **settings):
    """Return the root update and the broadcast of every round."""
    client = copy.deepcopy(client).double()
    federation = make_federation(client, data, **settings)
    optimizer = client.configure_optimizers()
    for round in range(rounds):
        federation.run_round(round, optimizer)
    return federation.server.aggregator.roots, federation.server.aggregator.broadcasts


def make_root_client_data(data):
    """The root samples, as the data of a federation of one client."""
    x, y, root = data.clients.inputs, data.clients.targets, data.clients.root
    arrays = Arrays(x[root], y[root], torch.zeros_like(root), num_classes=data.clients.num_classes)
    module = shared_out(arrays, batch_size=data.batch_size, drop_last=data.drop_last)
    module.augment = data.augment
    # in the order in which the server has them
    object.__setattr__(module.clients.train, "index", torch.arange(len(root)))
    return module


# Value of the root update


def assert_root_equals_upload(client, data):
    """Check that the root update is the upload of a client with the root samples."""
    (root,), (before,) = run_roots(client, data, rounds=1)
    settings = {"seed": key(5, "root"), "aggregator": Mean()}
    outcome = run_rounds(client, make_root_client_data(data), rounds=1, **settings)
    assert root.norm() > 0.01
    assert_close(root, outcome.w - before, rtol=0, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drop_last", "work", "net"),
    covering([False, True], [{"local_epochs": 3}, {"local_steps": 4}], NETS),
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_root_update_equals_the_upload_of_a_fedavg_client(net, work, drop_last):
    data = data_with_root(drop_last=drop_last)
    client = FedAvg(seeded(net), optimizer=sgd(0.3, momentum=0.5), **work)
    assert_root_equals_upload(client, data)


def test_root_update_equals_a_loop_over_the_root_samples():
    data = data_with_root()
    client = FedAvg(seeded(mlp), optimizer=sgd(0.2), local_steps=1)
    data.batch_size = 20
    (root,), _ = run_roots(client, data, rounds=1)
    net, index = seeded(mlp).double(), data.clients.root
    before = row(net)
    F.cross_entropy(
        net(data.clients.inputs[index].double()), data.clients.targets[index]
    ).backward()
    gradient = torch.cat([p.grad.flatten() for p in net.parameters()])
    assert_close(root, -0.2 * gradient, rtol=0, atol=1e-14)
    assert torch.equal(row(net), before)


@pytest.mark.parametrize(("batches_per_step", "moved"), [(1, 7 / 8), (2, 37 / 64)])
def test_root_update_of_a_point_by_hand(batches_per_step, moved):
    """w ← w − η (w − mean), three times from 10: η = 1/2 leaves one eighth of the distance.

    A pass is one minibatch. If two make up a step, one moves the point half as far.
    """
    data = shared_out(points([1.0, 3.0, 5.0], [4.0, 8.0, 6.0]), batch_size=8, root_samples=2)
    mean = float(data.clients.targets[data.clients.root].mean())
    client = FedAvg(Point(start=10.0), criterion=HalfSquares(), optimizer=sgd(0.5), local_steps=3)
    run = RunSettings(pl_fed.engine.LocalSettings(batches_per_step=batches_per_step))
    (root,), _ = run_roots(client, data, rounds=1, run=run)
    assert root.tolist() == pytest.approx([(mean - 10) * moved])


@pytest.mark.slow
def test_root_update_starts_from_the_broadcast_of_its_round():
    data, client = data_with_root(), FedAvg(seeded(mlp), optimizer=sgd(0.3))
    roots, before = run_roots(client, data, rounds=3)
    assert not torch.equal(before[0], before[2])
    moved = copy.deepcopy(client).double()
    moved.row("global").data.copy_(before[2])
    federation = make_federation(moved, data)
    federation.run_round(2, moved.configure_optimizers())
    assert torch.equal(federation.server.aggregator.roots[0], roots[2])


CLIENTS = [
    FedAvg,
    FedProx,
    partial(Ditto, lam=0.5),
    FLAME,
    FedTilt,
    FedRep,
    Scaffold,
    PFedMe,
    APFL,
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: getattr(kind, "func", kind).__name__)
def test_root_update_of_every_algorithm_equals_that_of_fedavg(kind):
    """Length and options of the local work are those of the algorithm."""
    data = data_with_root()
    client = kind(seeded(mlp), optimizer=sgd(0.1))
    (root,), (before,) = run_roots(client, data, rounds=1)
    trained = "global" if "global" in client.trained else client.trained[0]
    group = client.configure_optimizers()
    (group,) = (options for options in group.param_groups if options["name"] == trained)
    options = {name: group[name] for name in ("lr", "momentum", "weight_decay")}
    work = client.objective.work(trained)
    reference = FedAvg(
        seeded(mlp),
        optimizer=lambda params: torch.optim.SGD(params, **options),
        local_steps=work.steps,
        local_epochs=None if work.steps else work.epochs,
    )
    (expected,), (start,) = run_roots(reference, data, rounds=1)
    assert torch.equal(before, start)
    expected[client.unsent_positions] = 0  # FedRep's head
    assert_close(root, expected, rtol=0, atol=1e-14)


@pytest.mark.slow
def test_root_update_of_fedrep_has_the_steps_of_the_body():
    """And the body's optimizer: the head's steps would make the server's step as long as theirs."""
    data = data_with_root()
    work = {"optimizer": sgd(0.3), "local_epochs": 2}
    (expected,), _ = run_roots(FedPer(seeded(mlp), **work), data, rounds=1)
    (root,), _ = run_roots(FedRep(seeded(mlp), head_epochs=7, **work), data, rounds=1)
    assert root.norm() > 0.01
    assert_close(root, expected, rtol=0, atol=1e-14)


def test_root_update_of_fedbabu_trains_the_body_under_the_frozen_head():
    data, client = data_with_root(), FedBABU(seeded(mlp), optimizer=sgd(0.3), local_epochs=3)
    assert_root_equals_upload(client, data)


def test_root_update_of_pfedfda_trains_the_body_under_the_head_of_its_classes():
    data, client = data_with_root(), PFedFDA(seeded(mlp), optimizer=sgd(0.3), local_epochs=3)
    assert_root_equals_upload(client, data)


def test_root_update_of_lp_proj_is_a_projection():
    data, client = data_with_root(), LpProj(seeded(mlp), dimensions=5, optimizer=sgd(0.3)).double()
    (root,), _ = run_roots(client, data, rounds=1)
    assert_close(client.projection.lift(client.projection(root)), root, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", [FedPer, FedBABU], ids=lambda kind: kind.__name__)
def test_fltrust_scales_bodies_to_the_length_of_the_body_of_the_root(kind):
    """With one client, the update is as long as the root."""
    arrays = classes([9, 10])
    one_class = torch.zeros_like(arrays.targets)
    arrays = Arrays(arrays.inputs, one_class, arrays.client, num_classes=3)
    data = shared_out(arrays, root_samples=10)
    client = kind(seeded(mlp), optimizer=sgd(0.1)).double()
    federation = make_federation(client, data, sampler=Only(1))
    before = client.row("global").data.clone()
    federation.run_round(0, client.configure_optimizers())
    update, (root,) = client.row("global").data - before, federation.server.aggregator.roots
    assert not root[client.unsent_positions].any()
    assert float(update.norm()) == pytest.approx(float(root.norm()))


def test_root_update_uses_the_learning_rate_of_the_round():
    data = data_with_root()
    halves = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    client = FedAvg(seeded(mlp), optimizer=sgd(0.2), lr_scheduler=halves, local_steps=1)
    federation = make_federation(client.double(), data)
    optimizer = client.configure_optimizers()["optimizer"]
    lengths = []
    for rate in (0.2, 0.1):
        for group in optimizer.param_groups:
            group["lr"] = rate
        before = client.row("global").data.clone()
        federation.run_round(0, optimizer)
        client.row("global").data.copy_(before)
        lengths.append(float(federation.server.aggregator.roots[-1].norm()))
    assert lengths[0] == pytest.approx(2 * lengths[1])


def test_minibatches_of_root_samples_are_augmented():
    class Away(nn.Module):
        def forward(self, x):
            return torch.zeros_like(x)

    client = FedAvg(seeded(partial(nn.Linear, 4, 3)), optimizer=sgd(0.2))
    (root,), _ = run_roots(client, data_with_root(augment=[Away()]), rounds=1)
    assert not root[:12].any(), "no weight has a gradient if all inputs are 0"
    assert root[12:].any()


def test_root_update_limits_steps_and_clips_gradients():
    data, client = data_with_root(), FedAvg(seeded(mlp), optimizer=sgd(0.5), local_epochs=4)
    client = client.double()
    local = pl_fed.engine.LocalSettings(clipping=pl_fed.engine.Clipping(0.01))
    federation = make_federation(client, data, run=RunSettings(local, limit_local_steps=1))
    federation.run_round(0, client.configure_optimizers())
    (root,) = federation.server.aggregator.roots
    assert float(root.norm()) == pytest.approx(0.5 * 0.01, rel=1e-5)


# Side effects


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "net"), covering([FedAvg, Ditto, FLAME], NETS))
def test_root_update_changes_nothing_else(net, kind):
    """An aggregator that ignores the root update gives the rounds without it."""

    class IgnoresRoot(Mean):
        needs_root = True

        def mass(self, weights):
            return None

    data, client = data_with_root(), kind(seeded(net), optimizer=sgd(0.3, momentum=0.5))
    settings = {"rounds": 3, "sampler": Uniform(3), "seed": 5}
    expected = run_rounds(client, data, aggregator=Mean(), **settings)
    state = torch.get_rng_state()
    actual = run_rounds(client, data, aggregator=IgnoresRoot(), **settings)
    assert actual.distance(expected) == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.parametrize("net", [batch_norm_net, dropout_net])
def test_root_update_restores_models_statistics_and_counters(net):
    data, client = data_with_root(), Ditto(seeded(net), optimizer=sgd(0.3)).double()
    federation = make_federation(client, data)
    optimizer = client.configure_optimizers()
    federation.run_round(0, optimizer)
    before = copy.deepcopy(client.state_dict())
    objective, gradients = client.objective, [p.grad for p in client.parameters()]
    root = federation.session.rounds.root_training.run(1, optimizer)
    for name, tensor in client.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert client.objective is objective
    with pytest.raises(ValueError, match=NOTHING_READABLE):
        client.read("broadcast")
    assert [p.grad for p in client.parameters()] == gradients
    assert client.trained == ("global", "personal")
    assert root.norm() > 0
    assert not root.requires_grad


@pytest.mark.slow
def test_root_update_does_not_depend_on_the_engine(uncompiled):
    data, client = data_with_root(), Ditto(seeded(dropout_net), optimizer=sgd(0.3), local_epochs=2)
    expected, _ = run_roots(client, data)
    engines = ("stacked", "one_by_one", "stacked_compiled")
    for engine, chunk_size in itertools.product(engines, (None, 1)):
        actual, _ = run_roots(client, data, engine=engine, chunk_size=chunk_size)
        for root, reference in zip(actual, expected, strict=True):
            assert_close(root, reference, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [Only(2), Only(3, 0), All()], ids=["one", "two", "all"])
def test_root_update_does_not_depend_on_the_cohort(sampler):
    data, client = data_with_root(), FedAvg(seeded(dropout_net), optimizer=sgd(0.3))
    (expected,), _ = run_roots(client, data, rounds=1)
    (actual,), _ = run_roots(client, data, rounds=1, sampler=sampler)
    assert torch.equal(actual, expected)


def test_root_update_is_drawn_by_round_and_seed():
    data, client = data_with_root(), FedAvg(seeded(dropout_net), optimizer=sgd(0.3))
    client = client.double()
    federation = make_federation(client, data)
    optimizer = client.configure_optimizers()
    first, repeated, next_round = (
        federation.session.rounds.root_training.run(r, optimizer) for r in (0, 0, 1)
    )
    assert torch.equal(first, repeated)
    assert not torch.equal(first, next_round)
    other = make_federation(copy.deepcopy(client), data, seed=6)
    assert not torch.equal(other.session.rounds.root_training.run(0, optimizer), first)


def test_root_samples_are_not_poisoned():
    """Every client is byzantine, or all their data is corrupted: the server's is not."""
    data, client = data_with_root(), FedAvg(seeded(mlp), optimizer=sgd(0.3))
    (expected,), _ = run_roots(client, data, rounds=1)
    (root,), _ = run_roots(client, data, rounds=1, attack=RandomLabels(), fraction=1.0)
    assert torch.equal(root, expected)
    (root,), _ = run_roots(client, data, rounds=1, corruption=RandomLabels())
    assert torch.equal(root, expected)


# FLTrust in rounds


class Opposite(Attack):
    def forge(self, honest, own, context):
        return -100 * honest.mean(0).expand_as(own)


@pytest.mark.slow
def test_fltrust_learns_under_an_attack_that_breaks_the_mean():
    arrays = classes([60] * 6, num_classes=2)
    arrays.targets[:] = (arrays.inputs[:, 0] > 0).long()
    data = shared_out(arrays, root_samples=60, batch_size=10)
    client = FedAvg(seeded(partial(mlp, num_classes=2)), optimizer=sgd(0.2))
    adversary = {"attack": Opposite(), "ids": [0, 1, 3, 4]}

    def loss(aggregator, **settings):
        outcome = run_rounds(client, data, 8, aggregator=aggregator, **settings)
        net = seeded(partial(mlp, num_classes=2)).double()
        torch.nn.utils.vector_to_parameters(outcome.w, net.parameters())
        return float(F.cross_entropy(net(arrays.inputs.double()), arrays.targets).detach()), outcome

    fltrust_loss, outcome = loss(FLTrust(), **adversary)
    assert fltrust_loss < 0.3
    assert [float(r["train/dropped"]) for r in outcome.reports] == [4.0] * 8
    assert math.log(2) < loss(Mean(), **adversary)[0]
    clipped_loss, _ = loss(FLTrust(), pre_aggregators=[Clipping()], **adversary)
    assert clipped_loss == pytest.approx(fltrust_loss), "how long uploads are does not matter"


@table_test("aggregator", [FLTrust(), Chain([Clipping()], FLTrust())])
def test_fltrust_without_root_samples_is_refused(aggregator):
    client = FedAvg(seeded(mlp))
    with pytest.raises(ValueError, match=r"^Expected argument `root_samples` .* but got 0\.$"):
        make_federation(client, shared_out(classes(SIZES)), aggregator=aggregator)


@pytest.mark.slow
def test_resumed_fit_with_fltrust_equals_uninterrupted_fit(tmp_path):
    def fit(folder, *epochs):
        for rounds in epochs:
            client = Ditto(seeded(dropout_net), optimizer=sgd(0.1))
            federation = Federation(Uniform(3), FLTrust(), seed=0)
            trainer = pl_fed.Trainer(
                federation, run_dir=folder, max_epochs=rounds, precision="64-true",
                accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            data = FederatedData(Given(classes(SIZES)), batch_size=4, root_samples=ROOT, seed=0)
            trainer.fit(client, data, ckpt_path=None if rounds == epochs[0] else "last")
        return client.row("global").data.clone()

    assert torch.equal(fit(tmp_path / "a", 2, 4), fit(tmp_path / "b", 4))
