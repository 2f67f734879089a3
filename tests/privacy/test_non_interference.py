"""Nothing of one client reaches another client but by the released models.

Two federations differ in the data of some clients only. In each round both have the same released
models. Then the uploads, states and metrics of all other clients must be equal bit for bit.
"""

import pytest
import torch
from algorithms import ALGORITHMS, make
from exhaustive import exhaustive_but, exhaustive_for
from observed_rounds import NEIGHBOURS, ObservedRounds, list_differences
from small_federations import classes, seeded, sgd, shared_out
from torch import nn

import pl_fed
from pl_fed import Adversary, DifferentialPrivacy
from pl_fed.attacks import Backdoor, FlippedLabels, Outliers, RandomLabels
from pl_fed.clients import Ditto, FedAvg
from pl_fed.compressors import QSGD, PowerSGD, RandomK, TopK
from pl_fed.data.source import Arrays
from pl_fed.preflight.privacy_rules import describe_unfit_algorithm
from pl_fed.samplers import All, Cyclic, Poisson, Uniform

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("untried"),
    pytest.mark.filterwarnings("ignore:pl_fed left out the uploads"),
    pytest.mark.filterwarnings("ignore:Clients are run one by one"),
    pytest.mark.filterwarnings("ignore:Local steps run eagerly"),
]

CLIENTS, SAMPLES, BATCH = 6, 6, 4
SHAPE = (1, 4, 4)
MINE = 0  # the client whose number of samples differs
CHANGES = [  # clients' changed data: one of each pair in a stack, or of each three
    {MINE: "fewer samples", 2: "large samples", 4: "other samples"},
    {MINE: "more samples", 3: "overflowing samples", 5: "one class"},
]
ENGINES = ["one_by_one", "stacked", "one_by_one_compiled", "stacked_compiled"]


def net():
    """Return a net whose outputs are not finite for samples of 1e30 in float32."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    )


def make_data(changes=None, shape=SHAPE, last=MINE, comes_first=False):
    """Return data in which some clients have changed samples, by the names of the changes.

    The samples of one client are the last of all, or the first. Its changes may change their
    number, without a move of the others' samples.
    """
    arrays = classes([SAMPLES] * CLIENTS, shape)
    others = [client for client in range(CLIENTS) if client != last]
    xs, ys = (list(rows.split(SAMPLES)) for rows in (arrays.inputs, arrays.targets))
    owners = [*others, last]
    for client, name in (changes or {}).items():
        place = owners.index(client)
        xs[place], ys[place] = NEIGHBOURS[name](xs[place], ys[place])
    owner = torch.cat([torch.full((len(y),), client) for client, y in zip(owners, ys)])
    x, y = torch.cat(xs), torch.cat(ys)
    if comes_first:
        x, y, owner = (rows.roll(len(ys[-1]), 0) for rows in (x, y, owner))
    joined = Arrays(x, y, owner, num_classes=3)
    return shared_out(joined, BATCH)


def interference(
    make_client, neighbours=CHANGES, shape=SHAPE, last=MINE, comes_first=False, **settings
):
    """Return the values of unchanged clients that depend on changed data, in two rounds."""
    settings = {"sampler": All(), **settings}
    data = make_data(None, shape, last, comes_first)
    plain, expected = ObservedRounds(make_client(), data, **settings), []
    for round in range(2):
        seen = plain.observe(round)
        expected.append((seen, [row.clone() for row in plain.released], plain.clip_norm))
    differences = []
    for changes in neighbours:
        data = make_data(changes, shape, last, comes_first)
        other = ObservedRounds(make_client(), data, **settings)
        for round, (values, *released) in enumerate(expected):
            found = list_differences(values, other.observe(round), changes)
            differences += [f"{changes}, round {round}, {difference}" for difference in found]
            other.take(*released)
    return differences


def kind_of(instance):
    return type(instance).__name__


def fed_avg():
    return FedAvg(seeded(net), optimizer=sgd(0.3), local_epochs=2)


def ditto():
    return Ditto(seeded(net), optimizer=sgd(0.3), local_epochs=2)


@exhaustive_for(
    "Mapper",
    "PFedMe",
    "PerFedAvg",
    "DittoChoice",
    "DittoGreedy",
    "Moon",
    "PFedMeEpochs",
    "PropFair",
    "SimpleTuning",
    "FedProx",
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm(name):
    """Stacks of two clients show what passes within a stack, and from one stack to the next.

    The tests below run two algorithms with every engine.
    """
    if describe_unfit_algorithm(make(name)) is not None:
        pytest.skip("its clients read other clients' states, and privacy refuses it")
    assert not interference(lambda: make(name), shape=(4,), engine="stacked", chunk_size=2)


@exhaustive_but(
    "ditto-stacked", "fed_avg-one_by_one", "ditto-one_by_one_compiled", "fed_avg-stacked_compiled"
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make_client", [fed_avg, ditto])
def test_every_position_in_a_stack(uncompiled, engine, make_client):
    """The samples of a client overflow, in float32, in each position of a stack.

    A client of the same stack or of another has fewer samples.
    """
    # three of one stack, and one of the next stack; a trace is the same for all positions
    places = {0: 4, 1: 0, 2: 1, CLIENTS - 1: 3}  # of the large samples, and of the fewer ones
    neighbours = [
        {position: "large samples", fewer: "fewer samples"} for position, fewer in places.items()
    ]
    if "compiled" in engine:
        neighbours = neighbours[1::2]
    assert not interference(make_client, neighbours, engine=engine, chunk_size=3)


@exhaustive_for("one_by_one-Poisson", "stacked-Uniform", "stacked-Cyclic")
@pytest.mark.parametrize("sampler", [Uniform(4), Poisson(0.7), Cyclic(2)], ids=kind_of)
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_every_sampler(sampler, engine):
    assert not interference(ditto, sampler=sampler, engine=engine)


@exhaustive_for(
    "stacked-RandomLabels", "one_by_one-FlippedLabels", "stacked-Outliers", "one_by_one-Backdoor"
)
@pytest.mark.parametrize(
    "attack", [RandomLabels(), FlippedLabels(), Outliers(), Backdoor(0, size=1)], ids=kind_of
)
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_every_attack_on_data(attack, engine):
    """Each engine has each attack, and each attack each of the ids, by turns."""
    has_labels = isinstance(attack, (RandomLabels, FlippedLabels))
    ids = [MINE] if has_labels == (engine == "one_by_one") else [1, 2]
    assert not interference(fed_avg, adversary=Adversary(attack, ids=ids), engine=engine)


@exhaustive_for("Outliers")
@pytest.mark.parametrize("attack", [RandomLabels(), Outliers(), Backdoor(0, size=1)], ids=kind_of)
def test_samples_of_an_earlier_client_key_no_draw_with_privacy(attack):
    """Other numbers of samples of the first client move the places of all others' samples."""
    pytest.importorskip("dp_accounting", reason="the extra pl_fed[privacy] is not installed")
    privacy = DifferentialPrivacy(0.05, 0.01, noise_multiplier=1.0, noise_seed=0)
    settings = {"privacy": privacy, "sampler": Poisson(0.7)}
    for engine in ("one_by_one", "stacked"):
        assert not interference(
            ditto, [{MINE: "fewer samples"}, {MINE: "more samples"}], engine=engine,
            comes_first=True,
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


@exhaustive_for("TopK", "RandomK")
@pytest.mark.parametrize("codec", [TopK(5), RandomK(5), QSGD(3), PowerSGD(1)], ids=kind_of)
def test_every_kind_of_codec(codec):
    for engine in ("one_by_one", "stacked"):
        assert not interference(ditto, engine=engine, compression=codec, sampler=Uniform(4))


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
    assert interference(make_client, [{MINE: "more samples"}], chunk_size=1)
