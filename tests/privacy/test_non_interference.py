"""Nothing of one client reaches another client but by the released models.

Two federations differ in the data of client 0 only. In each round both have the same released
models. Then the uploads, states and metrics of all other clients must be equal bit for bit.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from algorithms import ALGORITHMS, make
from small_federations import classes, seeded, sgd, shared_out
from torch import nn

import pl_fed
from pl_fed import Adversary, DifferentialPrivacy, EngineOptions, Federation
from pl_fed.attacks import Backdoor, FlippedLabels, Outliers, RandomLabels
from pl_fed.clients import Ditto, FedAvg
from pl_fed.data.source import Arrays
from pl_fed.engine import LocalSettings
from pl_fed.rounds.privacy_checks import refuse_algorithm
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All, Cyclic, Poisson, Uniform

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:pl_fed left out the uploads"),
    pytest.mark.filterwarnings("ignore:Clients are run one by one"),
    pytest.mark.filterwarnings("ignore:Local steps run eagerly"),
]

CLIENTS, SAMPLES, BATCH = 6, 6, 4
SHAPE = (1, 4, 4)
MINE = 0  # the client whose data differ
ENGINES = ["one_by_one", "stacked", "one_by_one_compiled", "stacked_compiled"]


def net():
    """Return a net whose outputs are not finite for samples of 1e30 in float32."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    )


NEIGHBOURS = {
    "other samples": lambda x, y: (x.flip(0) * 3 - 1, (y + 1) % 3),
    "fewer samples": lambda x, y: (x[:1], y[:1]),
    "more samples": lambda x, y: (torch.cat([x + 0.5] * 3), y.repeat(3)),
    "one class": lambda x, y: (x, y * 0),
    "large samples": lambda x, y: (x * 1e30, y),
    "overflowing samples": lambda x, y: (x.sign() * 3e38, y),
}


def make_data(change=None, shape=SHAPE, position=MINE, comes_first=False):
    """Return data in which one client has changed samples, the last of all or the first."""
    arrays = classes([SAMPLES] * CLIENTS, shape)
    x, y = arrays.inputs[:-SAMPLES], arrays.targets[:-SAMPLES]
    own_x, own_y = arrays.inputs[-SAMPLES:], arrays.targets[-SAMPLES:]
    if change is not None:
        own_x, own_y = change(own_x, own_y)
    others = [client for client in range(CLIENTS) if client != position]
    owners = torch.tensor(others).repeat_interleave(SAMPLES)
    owners = torch.cat([owners, torch.full((len(own_y),), position)])
    x, y = torch.cat([x, own_x]), torch.cat([y, own_y])
    if comes_first:
        x, y, owners = (each.roll(len(own_y), 0) for each in (x, y, owners))
    joined = Arrays(x, y, owners, num_classes=3)
    return shared_out(joined, BATCH)


class Rounds:
    """Rounds of a federation that note what each client gives: upload, metrics and states."""

    def __init__(self, client, data, engine="one_by_one", chunk_size=None, **settings):
        self.client = copy.deepcopy(client)
        self.federation = Federation(
            **{
                "sampler": All(),
                "engine": EngineOptions(engine, chunk_size),
                "seed": 0,
                "max_rejected": 1.0,
                "model_selection": None,
                **settings,
            }
        )
        local = LocalSettings(nullcontext)
        self.federation.setup(self.client, data, "fit", settings=RunSettings(local, rounds=4))
        self.client.train()
        self.optimizer = self.client.configure_optimizers()
        self.seen = {}
        rounds = self.federation.session.rounds
        train = rounds.local_training.run

        def note(plan):
            trained = train(plan)
            self.seen = self._results(trained)
            return trained

        rounds.local_training.run = note

    def _results(self, trained):
        """Return tensors by client and name."""
        results = {int(client): {} for client in trained.clients}
        for position, client in enumerate(trained.clients.tolist()):
            for name, values in trained.metrics.items():
                results[client][f"metric {name}"] = values[position].clone()
            results[client]["status"] = trained.status[position].clone()
            if trained.own.uploads is not None:
                results[client]["upload"] = trained.own.uploads[position].clone()
        for clients, states in trained.own.states:
            for position, client in enumerate(clients.tolist()):
                for name, rows in states.items():
                    results[client][f"state {name}"] = rows[position].clone()
        return results

    def run(self, round):
        self.federation.run_round(round, self.optimizer)
        return self.seen

    @property
    def released(self):
        """The released tensors: those of the global model and of the server's states."""
        client = self.client
        rows = [client.row("global").data, client.statistics("global").data]
        return [*rows, *self.federation.server_states.values()]

    @property
    def clip_norm(self):
        privacy = self.federation.session.rounds.privacy
        return None if privacy is None else privacy.clip_norm

    def take(self, released, clip_norm):
        """Take over the released models, and the released clipping norm, of another federation."""
        for own, tensor in zip(self.released, released, strict=True):
            own.copy_(tensor)
        if clip_norm is not None:
            self.federation.session.rounds.privacy.clip_norm = clip_norm


def interference(
    make_client, names=NEIGHBOURS, shape=SHAPE, position=MINE, comes_first=False, **settings
):
    """Return the values of other clients that depend on the data of one client, in two rounds."""
    data = make_data(None, shape, position, comes_first)
    plain, expected = Rounds(make_client(), data, **settings), []
    for round in range(2):
        seen = plain.run(round)
        expected.append((seen, [row.clone() for row in plain.released], plain.clip_norm))
    differences = []
    for name in names:
        data = make_data(NEIGHBOURS[name], shape, position, comes_first)
        other = Rounds(make_client(), data, **settings)
        for round, (values, *released) in enumerate(expected):
            got = other.run(round)
            differences += [
                f"{name}, round {round}, client {client}, {value}"
                for client in values.keys() & got.keys() - {position}
                for value, tensor in values[client].items()
                if not torch.equal(tensor, got[client][value])
            ]
            other.take(*released)
    return differences


def kind_of(instance):
    return type(instance).__name__


def fed_avg():
    return FedAvg(seeded(net), optimizer=sgd(0.3), local_epochs=2)


def ditto():
    return Ditto(seeded(net), optimizer=sgd(0.3), local_epochs=2)


@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm(engine, name):
    if refuse_algorithm(make(name)) is not None:
        pytest.skip("its clients read other clients' states, and privacy refuses it")
    assert not interference(lambda: make(name), shape=(4,), engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make_client", [fed_avg, ditto])
def test_every_position_in_a_stack(uncompiled, engine, make_client):
    """The samples of a client overflow, in float32, in each position of a stack."""
    names = ("large samples", "fewer samples")
    for position in (0, 1, 2, CLIENTS - 1):  # three of one stack, and one of the next stack
        settings = {"engine": engine, "chunk_size": 3, "position": position}
        assert not interference(make_client, names, **settings)


@pytest.mark.parametrize("sampler", [Uniform(4), Poisson(0.7), Cyclic(2)], ids=kind_of)
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_every_sampler(sampler, engine):
    assert not interference(ditto, sampler=sampler, engine=engine)


@pytest.mark.parametrize(
    "attack", [RandomLabels(), FlippedLabels(), Outliers(), Backdoor(0, size=1)], ids=kind_of
)
@pytest.mark.parametrize("ids", [[MINE], [1, 2]], ids=str)
def test_every_attack_on_data(attack, ids):
    for engine in ("one_by_one", "stacked"):
        assert not interference(fed_avg, adversary=Adversary(attack, ids=ids), engine=engine)


@pytest.mark.parametrize("attack", [RandomLabels(), Outliers(), Backdoor(0, size=1)], ids=kind_of)
def test_samples_of_an_earlier_client_key_no_draw_with_privacy(attack):
    """Other numbers of samples of the first client move the places of all others' samples."""
    pytest.importorskip("dp_accounting", reason="the extra pl_fed[privacy] is not installed")
    privacy = DifferentialPrivacy(0.05, 0.01, noise_multiplier=1.0, noise_seed=0)
    settings = {"privacy": privacy, "sampler": Poisson(0.7)}
    for engine in ("one_by_one", "stacked"):
        assert not interference(
            ditto, ("fewer samples", "more samples"), engine=engine, comes_first=True,
            adversary=Adversary(attack, ids=[1, 2]), **settings,
        )  # fmt: skip


@pytest.mark.parametrize("options", [{"target_quantile": 0.5}, {"buckets": 3}], ids=str)
def test_private_rounds(options):
    pytest.importorskip("dp_accounting", reason="the extra pl_fed[privacy] is not installed")
    privacy = DifferentialPrivacy(0.05, 0.01, noise_multiplier=1.0, noise_seed=0, **options)
    settings = {"privacy": privacy, "sampler": Poisson(0.7)}
    if "buckets" in options:
        settings["aggregator"] = pl_fed.aggregators.Median()
    for engine in ("one_by_one", "stacked"):
        assert not interference(ditto, engine=engine, **settings)


class Remembering(FedAvg):
    """Remembering: an algorithm that carries the samples of one client to the next one."""

    previous = 0.0

    def end_round(self, client):
        uploads = super().end_round(client) + Remembering.previous
        Remembering.previous = 1e-6 * float(client.samples.sum())
        return uploads


def test_a_client_that_remembers_another_one_is_found():
    Remembering.previous = 0.0
    make_client = lambda: Remembering(seeded(net), optimizer=sgd(0.3))  # noqa: E731
    assert interference(make_client, ["more samples"], chunk_size=1)
