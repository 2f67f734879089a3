"""The round leaves out a client with a broken upload, and keeps all else."""

import copy
import functools
import math
import warnings
from dataclasses import replace
from itertools import product

import pytest
import torch
from contract_suite import find_configurations, one_test_per_class
from equal_trials import trials_skipped
from exhaustive import exhaustive_but, exhaustive_for
from small_federations import (
    Cohorts,
    VariedCohorts,
    classes,
    mlp,
    sections,
    seeded,
    sgd,
    shared_out,
)
from tables import table_test

import pl_fed.aggregators
import pl_fed.attacks
from pl_fed import EngineOptions, Federation
from pl_fed.aggregators import Aggregator, Clipping, Krum, Mean, Median, TrimmedMean
from pl_fed.clients import (
    FLAME,
    L2SGD,
    Ditto,
    FedADMM,
    FedAvg,
    FedDyn,
    Local,
    MeanRegularized,
    Mocha,
    Scaffold,
)
from pl_fed.rounds.broken_clients import NonFiniteLossError
from pl_fed.samplers import Cyclic, Poisson

SIZES = [9, 4, 6, 11, 5, 8]
COHORT = [5, 0, 3, 2, 4]
BROKEN = 3
BREAKS = ("a loss", "NaN", "infinity", "a row", "another length", "nothing")


class BreakingClient:
    """A client with a broken loss or upload in one round.

    Attributes:
        broken_client: The id of the client.
        breakage: The kind of breakage: one of BREAKS.
        now: Whether this is the round.
    """

    broken_client, breakage, now = BROKEN, "", False

    def training_step(self, batch, batch_idx):
        is_broken = self.read("client")[0] == self.broken_client
        factor = math.nan if self.now and self.breakage == "a loss" else 1.0
        return super().training_step(batch, batch_idx) * torch.where(is_broken, factor, 1.0)

    def end_round(self, client):
        upload, is_broken = super().end_round(client), client.ids == self.broken_client
        if not self.now or not is_broken.any() or upload is None or self.breakage == "a loss":
            return upload
        if self.breakage in ("another length", "nothing"):
            return upload[:, :-1] if self.breakage == "another length" else None
        upload = upload.clone()
        if self.breakage == "a row":
            upload[is_broken] = math.nan
        else:
            upload[is_broken, 3] = math.inf if self.breakage == "infinity" else math.nan
        return upload


def breaking_client(kind, breakage="NaN", **options):
    """Return an algorithm with one breaking client."""
    broken_kind = type(f"Breaking{kind.__name__}", (BreakingClient, kind), {"breakage": breakage})
    options = {"optimizer": sgd(0.1), "local_steps": 2, **options}
    return broken_kind(seeded(mlp), **options)


def make_data(**options):
    return shared_out(classes(SIZES), **options)


def make_data_with_groups(**options):
    groups = torch.arange(sum(SIZES)) % 2
    return shared_out(replace(classes(SIZES), groups=groups, group_names=("a", "b")), **options)


class FinalState:
    """The models, reports and states after some rounds."""

    def __init__(self, federation, client, reports):
        all_clients = torch.arange(len(SIZES))
        self.w = client.row("global").data.clone()
        self.reports = reports
        store = federation.store
        self.states = {name: store.read(name, all_clients) for name in store.defaults}
        server_states = federation.server_states
        self.server = {name: row.clone() for name, row in server_states.items()}
        self.memory = federation.server.aggregator.state_dict()


def run(client, cohorts=(COHORT,) * 3, rounds=3, broken=1, data=None, **settings):
    """Run rounds; the client breaks in round ``broken``."""
    client = copy.deepcopy(client).double()
    settings = {"engine": "one_by_one", "chunk_size": 1, **settings}
    varied = VariedCohorts(*(list(cohort) for cohort in cohorts))
    federation = Federation(settings.pop("sampler", varied), seed=0, **sections(**settings))
    with trials_skipped():
        federation.setup(client, data or make_data(), "fit")
    client.train()
    optimizer = client.configure_optimizers()
    reports = []
    for round in range(rounds):
        client.now = round == broken
        reports.append(federation.run_round(round, optimizer))
    return FinalState(federation, client, reports)


WITHOUT = [COHORT, [k for k in COHORT if k != BROKEN], COHORT]
engines = pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
quiet = pytest.mark.filterwarnings("ignore:pl_fed left out the uploads")


def assert_same(first, second, tolerance):
    pairs = [(first.w, second.w), *((first.server[n], second.server[n]) for n in first.server)]
    pairs += [(first.states[name], second.states[name]) for name in first.states]
    for value, expected in pairs:
        if tolerance:
            torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(value, expected)


@exhaustive_but("FedAvg-stacked", "Ditto-one_by_one")
@pytest.mark.slow
@quiet
@engines
@pytest.mark.parametrize("kind", [FedAvg, Ditto])
def test_round_with_a_broken_upload_equals_the_round_without_that_client(kind, engine):
    """Bit for bit: the others' states are kept, and its own stay those of before the round."""
    client = breaking_client(kind)
    without = run(client, WITHOUT, 2, broken=None, engine=engine)
    intact = run(client, rounds=2, broken=None, engine=engine)
    assert not torch.equal(without.w, intact.w)
    for breakage in BREAKS:
        broken = run(breaking_client(kind, breakage), rounds=2, engine=engine)
        assert_same(broken, without, 0)
        assert [report["train/rejected"] for report in broken.reports] == [0, 1], breakage
        assert [report["train/cohort"] for report in broken.reports] == [5, 5], breakage
        for number in ("train/loss", "train/update_norm"):
            assert broken.reports[1][number] == without.reports[1][number], breakage


TERMS_OF_THE_MEAN = {
    L2SGD: lambda end: end.states["personal"],
    MeanRegularized: lambda end: end.states["personal"],
    FLAME: lambda end: end.states["local"] + end.states["dual"] / 0.1,
    FedADMM: lambda end: end.states["sent"],
    Mocha: lambda end: end.server["models"].view(len(SIZES), -1),
    Scaffold: lambda end: end.states["own_control"],
    FedDyn: lambda end: end.states["drift"],
}
SERVER_MEANS = {Scaffold: "control", FedDyn: "mean_drift"}


@exhaustive_for("MeanRegularized")
@pytest.mark.slow
@quiet
@pytest.mark.parametrize("kind", TERMS_OF_THE_MEAN)
def test_mean_over_all_clients_includes_those_that_are_left_out(kind):
    """They keep the states that they had: no term of the mean is missing, or counts twice."""
    intact = run(breaking_client(kind), broken=None)
    for breakage in ("a loss", "NaN"):
        end = run(breaking_client(kind, breakage))
        mean = end.server[SERVER_MEANS[kind]] if kind in SERVER_MEANS else end.w
        expected = TERMS_OF_THE_MEAN[kind](end).mean(0)
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
        assert (end.w - intact.w).abs().max() > 1e-4


@exhaustive_for(
    "sampler1-L2SGD",
    "sampler0-MeanRegularized",
    "sampler2-MeanRegularized",
    "sampler1-FLAME",
    "sampler2-FLAME",
    "sampler0-FedADMM",
    "sampler1-FedADMM",
    "sampler0-Mocha",
    "sampler2-Mocha",
    "sampler1-Scaffold",
    "sampler0-FedDyn",
    "sampler2-FedDyn",
)
@pytest.mark.slow
@quiet
@pytest.mark.parametrize("kind", TERMS_OF_THE_MEAN)
@pytest.mark.parametrize("sampler", [Cyclic(4), Poisson(0.4), Poisson(0.95)])
def test_mean_over_all_clients_is_exact_with_cohorts_of_several_sizes(kind, sampler):
    """The cohorts: in turn, of random clients, and of nearly all clients."""
    end = run(breaking_client(kind), broken=None, rounds=4, sampler=copy.deepcopy(sampler))
    assert len({report["train/cohort"] for report in end.reports}) > 1
    mean = end.server[SERVER_MEANS[kind]] if kind in SERVER_MEANS else end.w
    expected = TERMS_OF_THE_MEAN[kind](end).mean(0)
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)


@quiet
def test_mean_of_the_servers_models_stays_exact_with_full_participation():
    all_clients = list(range(len(SIZES)))
    end = run(breaking_client(Mocha), cohorts=[all_clients] * 3)
    models = end.server["models"].view(len(SIZES), -1)
    torch.testing.assert_close(end.w, models.mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@quiet
@engines
def test_broken_upload_does_not_change_the_others_of_its_chunk(engine):
    settings = {"engine": engine, "chunk_size": None}
    without = run(breaking_client(Ditto), WITHOUT, broken=None, **settings)
    for breakage in ("a loss", "NaN", "a row"):
        assert_same(run(breaking_client(Ditto, breakage), **settings), without, 1e-12)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("order", [[3, 0, 5, 2, 4], [0, 5, 2, 4, 3]], ids=["first", "last"])
def test_chunk_with_uploads_of_another_length_is_left_out(order):
    """With all its clients, wherever in the round it is."""
    place = order.index(3) // 2 * 2
    intact_clients = order[:place] + order[place + 2 :]
    expected = run(
        breaking_client(FedAvg), [order, intact_clients, order], broken=None, chunk_size=2
    )
    for breakage in ("another length", "nothing"):
        broken = run(breaking_client(FedAvg, breakage), [order] * 3, chunk_size=2)
        assert_same(broken, expected, 1e-12)
        assert broken.reports[1]["train/rejected"] == len(order) - len(intact_clients)


OTHER_KINDS = {
    "bool": lambda rows: rows > 0,
    "int64": lambda rows: (1e6 * rows).long(),
    "uint8": lambda rows: rows.to(torch.uint8),
    "complex": lambda rows: rows * 1j,
    "sparse": lambda rows: rows.to_sparse(),
    "nested": lambda rows: torch.nested.nested_tensor(list(rows)),
    "meta": lambda rows: rows.to("meta"),
    "numpy": lambda rows: rows.numpy(),
    "list": lambda rows: rows.tolist(),
    "dict": lambda rows: {"upload": rows},
    "string": lambda rows: "upload",
    "number": lambda rows: 0.5,
}


class OtherKind:
    """A client with rows of another kind in one round: an upload, or the state named ``of``."""

    broken_client, change, of, now = BROKEN, staticmethod(lambda rows: rows), "upload", False

    def end_round(self, client):
        upload = super().end_round(client)
        if self.now and (client.ids == self.broken_client).any():
            if self.of == "upload":
                return self.change(upload)
            if self.of in client.states:
                client.states[self.of] = self.change(client.states[self.of])
            else:
                proposal = client.server_states[self.of].repeat(len(client), 1)
                client.proposals[self.of] = self.change(proposal)
        return upload


def client_of_another_kind(kind, change, of="upload"):
    members = {"change": staticmethod(change), "of": of}
    odd_kind = type(f"Odd{kind.__name__}", (OtherKind, kind), members)
    return odd_kind(seeded(mlp), optimizer=sgd(0.1), local_steps=2)


@exhaustive_but("third")
@pytest.mark.slow
@quiet
@pytest.mark.parametrize("place", [0, 2, 4], ids=["first", "third", "last"])
def test_upload_of_another_kind_changes_no_other_upload(place):
    """The place in the cohort does not matter. All uploads share a tensor with one dtype."""
    intact_clients = [client for client in COHORT if client != BROKEN]
    cohort = [*intact_clients[:place], BROKEN, *intact_clients[place:]]
    without = run(breaking_client(Ditto), [cohort, intact_clients], 2, broken=None)
    for name, change in OTHER_KINDS.items():
        end = run(client_of_another_kind(Ditto, change), [cohort] * 2, 2)
        assert_same(end, without, 1e-12)
        assert [report["train/rejected"] for report in end.reports] == [0, 1], name


@exhaustive_but("stacked")
@pytest.mark.slow
@quiet
@engines
def test_chunk_with_uploads_of_another_kind_is_left_out(engine):
    cohort, intact_clients = [3, 0, 5, 2, 4, 1], [5, 2, 4, 1]
    settings = {"engine": engine, "chunk_size": 2, "data": shared_out(classes([4] * 6))}
    without = run(breaking_client(FedAvg), [cohort, intact_clients], 2, broken=None, **settings)
    for name, change in OTHER_KINDS.items():
        end = run(client_of_another_kind(FedAvg, change), [cohort] * 2, 2, **settings)
        assert_same(end, without, 1e-12)
        assert end.reports[1]["train/rejected"] == 2, name


@functools.cache
def scaffold_without_the_broken_client():
    return run(breaking_client(Scaffold), [[3, 0, 5, 2, 4], [0, 5, 2, 4]], 2, broken=None)


@exhaustive_but(
    "own_control-bool",
    "own_control-uint8",
    "own_control-sparse",
    "own_control-meta",
    "own_control-list",
    "own_control-string",
    "own_control-length",
    "own_control-None",
    "control-int64",
    "control-complex",
    "control-nested",
    "control-numpy",
    "control-dict",
    "control-number",
    "control-length",
)
@pytest.mark.slow
@quiet
@pytest.mark.parametrize(
    ("state", "change"),
    [
        *product(("own_control", "control"), (*OTHER_KINDS, "length")),
        ("own_control", "None"),  # a client that proposes nothing is not broken
    ],
)
def test_state_of_another_kind_is_neither_kept_nor_proposed(change, state):
    """The client's control variate is its own state; it proposes the other to the server."""
    change = {"length": lambda rows: rows[:, :-1], "None": lambda rows: None, **OTHER_KINDS}[change]
    end = run(client_of_another_kind(Scaffold, change, state), [[3, 0, 5, 2, 4]] * 3)
    assert [report["train/rejected"] for report in end.reports] == [0, 1, 0]
    assert all(row.isfinite().all() for row in (*end.states.values(), *end.server.values()))
    torch.testing.assert_close(end.server["control"], end.states["own_control"].mean(0))
    assert not torch.equal(end.w, scaffold_without_the_broken_client().w)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_uploads_of_another_float_dtype_are_valid(dtype):
    client = client_of_another_kind(FedAvg, lambda rows: rows.to(dtype))
    end, plain = run(client), run(client, broken=None)
    assert end.w.dtype == torch.float64
    torch.testing.assert_close(end.w, plain.w, rtol=0, atol=1e-2)
    assert not torch.equal(end.w, plain.w)
    assert [report["train/rejected"] for report in end.reports] == [0, 0, 0]


class ProposesBySome(FedAvg):
    """Clients 0 and 4 propose that the server's number grows by 10; the others propose nothing."""

    def __init__(self, net, **kwargs):
        super().__init__(net, **kwargs)
        self.add_server_state("number", 1.0)

    def end_round(self, client):
        if client.ids.item() in (0, 4):
            client.proposals["number"] = client.server_states["number"][None] + 10
        return super().end_round(client)


def test_client_without_a_proposal_keeps_the_servers_state():
    end = run(ProposesBySome(seeded(mlp), optimizer=sgd(0.1), local_steps=1), rounds=1)
    assert end.server["number"].item() == pytest.approx(1 + 10 * 2 / len(COHORT))


@exhaustive_but("stacked")
@pytest.mark.slow
@quiet
@engines
def test_broken_local_models_are_not_kept(engine):
    client = breaking_client(Local, "a loss")
    broken = run(client, engine=engine)
    assert_same(broken, run(client, WITHOUT, broken=None, engine=engine), 0)
    assert broken.reports[1]["train/rejected"] == 1
    assert broken.states["personal"].isfinite().all()


@exhaustive_but("one_by_one")
@pytest.mark.slow
@engines
def test_federation_warns_once_of_broken_uploads(engine):
    client = breaking_client(FedAvg)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(client, rounds=1, broken=None, engine=engine)
        assert not [warning for warning in caught if "left out" in str(warning.message)]
        for _ in range(2):
            client.__class__.now = True  # in every round
            try:
                many = copy.deepcopy(client)
                federation_rounds(many, 4, engine)
            finally:
                client.__class__.now = False
            message = [
                str(warning.message) for warning in caught if "left out" in str(warning.message)
            ]
            assert len(message) == 1, "by each federation"
            assert "left out the uploads of clients [3] in round 0" in message[0]
            caught.clear()


def federation_rounds(client, rounds, engine):
    client = client.double()
    federation = Federation(Cohorts(COHORT), seed=0, engine=EngineOptions(engine))
    federation.setup(client, make_data(), "fit")
    optimizer = client.configure_optimizers()
    for round in range(rounds):
        assert federation.run_round(round, optimizer)["train/rejected"] == 1


# The largest share of broken uploads


class BreakingClients(BreakingClient):
    """Several clients with broken losses in every round."""

    broken_clients = ()

    def training_step(self, batch, batch_idx):
        is_broken = (self.read("client") == torch.tensor(self.broken_clients)).any()
        return super(BreakingClient, self).training_step(batch, batch_idx) * torch.where(
            is_broken, math.nan, 1.0
        )

    def end_round(self, client):
        return super(BreakingClient, self).end_round(client)


def breaking_clients(*broken_clients):
    """Return an algorithm with broken losses of these clients."""
    broken_kind = type(
        "SeveralBreak", (BreakingClients, FedAvg), {"broken_clients": broken_clients}
    )
    return broken_kind(seeded(mlp), optimizer=sgd(0.1), local_steps=2)


@exhaustive_but(
    "0.0-*-one_by_one",
    "0.2-broken_clients1-*-stacked",
    "0.2-broken_clients2-*-one_by_one",
    "0.5-broken_clients3-*-one_by_one",
    "0.5-broken_clients4-*-stacked",
    "1.0-*-one_by_one",
)
@pytest.mark.slow
@engines
@pytest.mark.parametrize(
    ("most", "broken_clients", "stops"),
    [
        (0.0, [2], True),
        (0.2, [2], False),
        (0.2, [2, 4], True),
        (0.5, [2, 4], False),
        (0.5, [0, 2, 4], True),
        (1.0, [5, 0, 3, 2, 4], False),
    ],
)
@pytest.mark.filterwarnings("ignore:pl_fed left out the uploads")
def test_run_stops_above_the_largest_share_of_broken_uploads(engine, most, broken_clients, stops):
    settings = {"engine": engine, "max_rejected": most, "rounds": 1}
    if not stops:
        end = run(breaking_clients(*broken_clients), **settings)
        assert end.reports[0]["train/rejected"] == len(broken_clients)
        assert end.w.isfinite().all()
        return
    first = next(client for client in COHORT if client in broken_clients)
    more = f", as did {len(broken_clients) - 1} more of 5" if len(broken_clients) > 1 else ""
    match = f"in round 0 client {first} got a loss of nan{more}: .* learning rate"
    with pytest.raises(NonFiniteLossError, match=match):
        run(breaking_clients(*broken_clients), **settings)


class Forgets(FedAvg):
    """Trains the global model, and sends nothing of it after the trial before training."""

    def end_round(self, client):
        upload = super().end_round(client)
        return None if self.training else upload


@engines
def test_algorithm_without_uploads_is_stopped(engine):
    client = Forgets(seeded(mlp), optimizer=sgd(0.1), local_steps=2)
    match = (
        "^Expected uploads and states of real numbers, as long .* in round 0 client 5 got rows of"
        " another kind or length, or no upload, .*"
    )
    with pytest.raises(NonFiniteLossError, match=match + "from `end_round`, a floating"):
        run(client, broken=None, engine=engine, rounds=1)


def test_global_model_stays_without_any_valid_upload():
    client = breaking_clients(*COHORT)
    with pytest.warns(UserWarning, match="left out"):
        end = run(client, rounds=2, max_rejected=1.0)
    assert torch.equal(end.w, client.double().row("global").data)
    assert end.reports[1]["train/update_norm"] == 0
    assert "train/loss" not in end.reports[1]


@pytest.mark.slow
@pytest.mark.parametrize("breakage", BREAKS)
def test_run_without_a_share_stops_at_the_first_broken_upload(breakage):
    description = {
        "a loss": "a loss of nan",
        "another length": "rows of another kind or length, or no upload",
        "nothing": "rows of another kind or length, or no upload",
    }.get(breakage, "a model with NaN or infinity")
    match = f"in round 1 client 3 got {description}"
    with pytest.raises(NonFiniteLossError, match=match) as failed:
        run(breaking_client(FedAvg, breakage), max_rejected=0.0)
    assert "\n" not in str(failed.value)


def test_broken_uploads_of_byzantine_clients_are_counted_without_a_limit():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="VariedCohorts keeps values")
        end = run(
            breaking_client(FedAvg), max_rejected=0.0, attack=pl_fed.attacks.RandomLabels(), ids=[3]
        )
    assert [report["train/rejected"] for report in end.reports] == [0, 1, 0]


# Aggregators


@pytest.mark.slow
@quiet
@table_test(
    ("aggregator", "words"),
    [
        (
            Krum(num_byzantine=2),
            "at least 5 rows for Krum, which uses n − f − 2 neighbours with f = 2, but got 4",
        ),
        (
            TrimmedMean(2),
            "more than 4 rows, because TrimmedMean leaves out 2 values at each end, but got 4",
        ),
    ],
    ids=["Krum", "TrimmedMean"],
)
def test_error_explains_too_few_valid_uploads(aggregator, words):
    """Five would do, and one of them breaks."""
    run(breaking_client(FedAvg), broken=None, aggregator=copy.deepcopy(aggregator))
    skipped = run(breaking_client(FedAvg), aggregator=copy.deepcopy(aggregator))
    assert [report.get("train/small_cohort") for report in skipped.reports] == [None, 1.0, None]
    with pytest.raises(ValueError, match="1 of 5 uploads of round 1 were left out") as failed:
        run(breaking_client(FedAvg), aggregator=aggregator, small_cohort="raise")
    message = str(failed.value)
    assert message.startswith("Expected argument `uploads`")
    assert message.count(".") == message.endswith("."), "one sentence"
    assert "\n" not in message
    assert words in message


ARGUMENTS = {
    "Chain": [{"first": [Clipping()], "then": Mean()}],
    "DeepSight": [{"num_inputs": 100}],
}
AGGREGATORS = find_configurations(pl_fed.aggregators, Aggregator, ARGUMENTS)


@exhaustive_for(
    "AdaFed",
    "AlignIns",
    "Bulyan",
    "CAF",
    "Chain",
    "CRFL",
    "DeepSight",
    "DnC",
    "FedMGDA",
    "FreqFed",
    "GeometricMedian",
    "KLoss",
    "KNorm",
    "LASA",
    "MDA",
    "MeaMed",
    "NguyenFlame",
    "QFFL",
    "RFLBAT",
    "RobustLearningRate",
    "SMEA",
    "SignGuard",
    "TiltedMean",
    "TorchJD",
    "WeakDP",
    "AAggFF",
    "FoolsGold",
    "FedFV",
    "CenteredClipping",
    "TrimmedMean",
    "Term",
    "AFL",
)
@pytest.mark.slow
@quiet
@one_test_per_class(AGGREGATORS)
def test_every_aggregator_merges_the_valid_uploads(kind, arguments):
    cohort, intact_clients = [5, 0, 3, 2, 4, 1], [5, 0, 2, 4, 1]

    def end(breakage, cohorts, broken):
        aggregator = kind(**copy.deepcopy(arguments))
        data = make_data_with_groups(root_samples=6)  # groups for FairFed
        settings = {"expected": 0, "data": data, "aggregator": aggregator}
        client = breaking_client(FedAvg, breakage, local_steps=1)
        return run(client, cohorts, 2, broken=broken, **settings)

    without = end("NaN", [cohort, intact_clients], None)
    for breakage in ("infinity", "another length"):  # a row, and no row that reaches the round
        broken = end(breakage, [cohort] * 2, 1)
        assert_same(broken, without, 0)
        assert broken.w.isfinite().all()
        assert broken.memory.keys() == without.memory.keys()
        assert all(torch.equal(row, without.memory[name]) for name, row in broken.memory.items())


@quiet
@pytest.mark.slow
def test_attackers_do_not_see_broken_uploads():
    """And the round equals the one without the client that breaks."""

    class Mirror(pl_fed.attacks.Attack):
        def forge(self, honest, own, context):
            upload_counts.append(len(honest))
            return -honest.mean(0).expand_as(own)

    def end(breakage, *args, **kwargs):
        settings = {"attack": Mirror(), "ids": [0], "aggregator": Median()}
        return run(breaking_client(FedAvg, breakage), *args, **kwargs, **settings)

    upload_counts = []
    without = end("a row", WITHOUT, broken=None)
    for breakage in ("a row", "another length", "nothing"):
        upload_counts.clear()
        broken = end(breakage)
        assert upload_counts == [4, 3, 4], breakage
        assert_same(broken, without, 0)


class OneIsNaN(pl_fed.attacks.Attack):
    """The first attacker uploads NaN."""

    def forge(self, honest, own, context):
        sent = own.clone()
        sent[0] = math.nan
        return sent


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:pl_fed left out the uploads")
@pytest.mark.parametrize("aggregator", [TrimmedMean(), Krum()], ids=["TrimmedMean", "Krum"])
@pytest.mark.parametrize("expected", [None, 2])
def test_broken_uploads_of_byzantine_clients_lower_the_expected_number(aggregator, expected):
    """The server expects one Byzantine upload of four, not two."""
    seen = []

    class Seen(type(aggregator)):
        def forward(self, uploads, weights, context):
            seen.append((len(uploads), context.num_byzantine))
            return super().forward(uploads, weights, context)

    settings = {"attack": OneIsNaN(), "ids": [0, 5], "expected": expected}
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1), local_steps=2)
    merges = Seen()
    ended = run(client, broken=None, aggregator=merges, max_rejected=0.0, **settings)
    assert [report["train/rejected"] for report in ended.reports] == [1, 1, 1]
    assert seen[-3:] == [(4, 1)] * 3, "after a trial of what a cohort sends"
    assert ended.w.isfinite().all()
