"""IFCA: Algorithm 1 by hand, aggregators and attacks within clusters, engines and resume."""

import copy
import functools
import math

import pytest
import torch
from exhaustive import exhaustive_but
from small_federations import Cohorts, Only, classes, mlp, run_rounds, seeded, sgd, shared_out
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close

import pl_fed
from pl_fed.aggregators import Krum, Mean, Median
from pl_fed.attacks import Attack
from pl_fed.clients import IFCA
from pl_fed.data import FederatedData
from pl_fed.models import LinearSVM
from pl_fed.rounds.uploads import Uploads

SIZES = [9, 20, 12, 16, 7, 11]
STEPS = 3


def make(clusters=2, **options):
    return seeded(
        lambda: IFCA(
            mlp(), clusters=clusters, **{"local_steps": STEPS, "optimizer": sgd(), **options}
        )
    )


def centers_of(client):
    own = copy.deepcopy(client).double()
    return own.server_state_defaults()["centers"].view(client.num_centers, -1)


def losses_of(client, data, centers, number):
    index = data.clients.train.samples(number)
    return torch.stack([loss_of(client, data, center, index) for center in centers])


def loss_of(client, data, row, index):
    tensors = client.row("global").layout.views(row)
    outputs = functional_call(
        client.global_model.double(), tensors, data.clients.inputs[index].double()
    )
    return F.cross_entropy(outputs, data.clients.targets[index])


def train_by_hand(client, data, center, number, steps=STEPS, lr=0.1):
    """Full passes over a client's minibatches of four, in the order of its samples."""
    row = center.clone().requires_grad_()
    pieces = data.clients.train.samples(number).split(4)
    for step in range(steps):
        loss = loss_of(client, data, row, pieces[step % len(pieces)])
        (gradient,) = torch.autograd.grad(loss, row)
        row = (row - lr * gradient).detach().requires_grad_()
    return row.detach()


def run_by_hand(client, data, rounds, cohort, merge=lambda changes: changes.mean(0)):
    centers, choices = centers_of(client), []
    for _ in range(rounds):
        own = [int(losses_of(client, data, centers, k).argmin()) for k in cohort]
        changes = [
            train_by_hand(client, data, centers[j], k) - centers[j] for j, k in zip(own, cohort)
        ]
        for j in set(own):
            mine = torch.stack([change for change, choice in zip(changes, own) if choice == j])
            centers[j] += merge(mine)
        choices.append(own)
    return centers, choices


@pytest.mark.parametrize(
    ("aggregator", "merge"),
    [(Mean(), lambda c: c.mean(0)), (Median(), lambda c: c.quantile(0.5, dim=0))],
)
@pytest.mark.parametrize("clusters", [2, 3])
def test_rounds_are_algorithm_1_by_hand(clusters, aggregator, merge):
    data = shared_out(classes(SIZES))
    client = make(clusters)
    expected, choices = run_by_hand(make(clusters), data, 3, range(len(SIZES)), merge)
    assert len({choice for own in choices for choice in own}) > 1, "several clusters are chosen"
    got = run_rounds(client, data, rounds=3, shuffle=False, aggregator=aggregator)
    assert_close(got.server_states["centers"].view(clusters, -1), expected)
    for round, own in enumerate(choices):
        for j in range(clusters):
            assert got.reports[round][f"train/clients_of_center_{j}"] == own.count(j)


class ByLosses(Mean):
    """By losses: its copies, one for each center, note the losses that they read."""

    needs_start_losses = True
    read = []

    def forward(self, uploads, weights, context):
        if context.broadcast.numel():  # no trial
            self.read.append((context.clients.tolist(), context.start_losses))
        return super().forward(uploads, weights, context)

    def mass(self, weights):
        return None


@pytest.mark.slow
def test_aggregators_read_the_losses_of_each_clients_center():
    data = shared_out(classes(SIZES))
    first = run_rounds(make(), data, rounds=1, shuffle=False)
    ByLosses.read.clear()
    run_rounds(make(), data, rounds=2, shuffle=False, aggregator=ByLosses())
    centers = first.server_states["centers"].view(2, -1)
    read = ByLosses.read[-2:]
    assert sorted(client for clients, _ in read for client in clients) == [*range(len(SIZES))]
    for clients, losses in read:
        for number, loss in zip(clients, losses, strict=True):
            assert_close(loss, losses_of(make(), data, centers, number).min())


def test_a_center_that_nobody_chose_stays():
    data, client = shared_out(classes(SIZES)), make(3)
    number = 4
    chosen = int(losses_of(make(3), data, centers_of(client), number).argmin())
    got = run_rounds(client, data, rounds=1, sampler=Only(number))
    after = got.server_states["centers"].view(3, -1)
    is_same = [bool(torch.equal(a, b)) for a, b in zip(after, centers_of(client))]
    assert is_same == [j != chosen for j in range(3)]


def test_clients_evaluate_the_center_of_the_smallest_training_loss():
    data, client = shared_out(classes(SIZES)), make(3)
    got = run_rounds(client, data, rounds=2)
    centers = got.server_states["centers"].view(3, -1)
    for number in range(len(SIZES)):
        best = int(losses_of(make(3), data, centers, number).argmin())
        assert_close(got.v[number], centers[best])


ENGINES = ["stacked", "one_by_one_compiled", "stacked_compiled"]


@exhaustive_but("stacked_compiled")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree(uncompiled, engine):
    data = shared_out(classes(SIZES))
    expected = run_rounds(make(3), data, rounds=3)
    got = run_rounds(make(3), data, rounds=3, engine=engine, chunk_size=4)
    assert bool(uncompiled) == engine.endswith("compiled")
    assert got.distance(expected) < 1e-10


class Opposite(Attack):
    """Forges the opposite of the mean of the honest uploads that it sees."""

    def forge(self, honest, own, context):
        self.seen = getattr(self, "seen", [])
        self.seen.append((len(honest), len(own), context.broadcast.clone()))
        return -honest.mean(0).expand_as(own)


def test_attackers_forge_within_their_cluster():
    data, client, attack = shared_out(classes(SIZES)), make(2), Opposite()
    centers, attackers = centers_of(client), [1, 2]
    run_rounds(client, data, rounds=1, shuffle=False, attack=attack, ids=attackers)
    own = [int(losses_of(make(2), data, centers, k).argmin()) for k in range(len(SIZES))]
    expected = []
    for j in range(2):
        members = [k for k in range(len(SIZES)) if own[k] == j]
        bad = [k for k in members if k in attackers]
        if bad:
            expected.append((len(members) - len(bad), len(bad), centers[j]))
    assert len(attack.seen) == len(expected)
    for (h, b, broadcast), (honest, forged, center) in zip(attack.seen, expected):
        assert (h, b) == (honest, forged)
        assert_close(broadcast, center)


def test_a_cluster_that_is_too_small_for_the_aggregator_stays():
    data, client = shared_out(classes(SIZES)), make(2)
    own = [int(losses_of(make(2), data, centers_of(client), k).argmin()) for k in range(len(SIZES))]
    first = [k for k in range(len(SIZES)) if own[k] == own[0]][:1]
    others = [k for k in range(len(SIZES)) if own[k] != own[0]]
    got = run_rounds(
        client, data, rounds=1, sampler=Cohorts([*first, *others]), aggregator=Krum(), fraction=0.0
    )
    after, before = got.server_states["centers"].view(2, -1), centers_of(client)
    assert torch.equal(after[own[0]], before[own[0]])


@pytest.mark.exhaustive
def test_stop_and_resume_is_bit_equal(tmp_path):
    def fit(name, rounds, ckpt_path=None):
        adam = functools.partial(torch.optim.Adam, lr=0.01)
        trainer = pl_fed.Trainer(
            pl_fed.Federation(server_optimizer=adam, seed=0),
            run_dir=tmp_path / name,
            accelerator="cpu",
            max_epochs=rounds,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        from small_federations import Given

        data = FederatedData(Given(classes(SIZES)), batch_size=4, seed=0)
        trainer.fit(make(2), data, ckpt_path=ckpt_path)
        return trainer

    straight, first = fit("a", 4), fit("b", 2)
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed = fit("c", 4, tmp_path / "first.ckpt")
    centers = [t.federation.server_states["centers"] for t in (straight, resumed)]
    assert torch.equal(*centers)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="clusters"):
        IFCA(nn.Linear(4, 2), clusters=1)
    with pytest.raises(ValueError, match="spread"):
        IFCA(nn.Linear(4, 2), spread=0.0)
    with pytest.raises(ValueError, match=r"got 1\.running_mean, .* the models of IFCA would"):
        IFCA(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))


def test_equal_weights_are_refused_since_all_first_models_would_be_equal():
    with pytest.raises(ValueError, match=r"of different numbers, .* but got LinearSVM with equal"):
        run_rounds(IFCA(LinearSVM(4)), shared_out(classes(SIZES, num_classes=2)))


def test_centers_begin_at_the_initial_model_of_the_federation(tmp_path):
    path, other = tmp_path / "weights.pt", seeded(mlp, 9)
    torch.save(other.state_dict(), path)
    got = run_rounds(make(3), shared_out(classes(SIZES)), rounds=0, initial_model=path)
    expected = torch.cat([p.detach().flatten() for p in other.double().parameters()])
    assert_close(got.server_states["centers"].view(3, -1)[0], expected)


def test_first_centers_do_not_depend_on_the_default_dtype():
    client, draws = make(3), []
    for dtype in (torch.float32, torch.float64):  # of Lightning's steps in precision 64-true
        torch.set_default_dtype(dtype)
        try:
            draws.append(centers_of(client))
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*draws)


@pytest.mark.parametrize(("distances", "expected"), [((3.0, 4.0), 5.0), ((math.nan, 4.0), 4.0)])
def test_distance_from_the_benign_mean_is_that_of_all_centers_together(
    monkeypatch, distances, expected
):
    values = iter(distances)
    monkeypatch.setattr(Uploads, "distance_to_benign_mean", lambda *_: next(values))
    client = IFCA(seeded(mlp), optimizer=sgd(0.1))
    monkeypatch.setattr(IFCA, "choose_centers", lambda self, client: client.ids % 2)
    outcome = run_rounds(client, shared_out(classes([4, 4, 4, 4])), rounds=1)
    assert float(outcome.reports[0]["train/benign_distance"]) == expected
