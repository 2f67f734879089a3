"""One client's exception: it ends the run, or the client is left out and harms only itself."""

from dataclasses import replace

import pytest
import torch
from equal_trials import trials_skipped
from further_cases import mark_if
from small_federations import classes, mlp, run_rounds, seeded, sgd, shared_out
from torch import nn
from torch.nn.utils import parameters_to_vector

from pl_fed import DifferentialPrivacy, EngineOptions, Federation
from pl_fed.aggregators import QFFL, FairFed
from pl_fed.clients import IFCA, Ditto, FedAvg, FedBN, Finetuning
from pl_fed.engine.batched import StackedRunner
from pl_fed.rounds.broken_clients import NonFiniteLossError
from pl_fed.samplers import All, Poisson

SIZES = [8, 8, 12, 5]
FAILING = 2


class Fails:
    """An algorithm with a client whose work fails in one place."""

    fails_in = "begin"

    def _fail(self, client, place):
        if self.fails_in == place and FAILING in client.ids.tolist() and client.steps:
            raise OSError("a broken file")

    def begin(self, client):
        super().begin(client)
        self._fail(client, "begin")

    def end_round(self, client):
        self._fail(client, "end_round")
        return super().end_round(client)

    def training_step(self, batch, batch_idx):
        if self.fails_in == "training_step" and bool((self.read("client") == FAILING).any()):
            raise OSError("a broken file")
        return super().training_step(batch, batch_idx)


class Embeds(nn.Module):
    """A net that looks its inputs up in a table."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(4, 3), nn.Linear(12, 3)

    def look_up(self, x):
        return self.table(x)

    def forward(self, x):
        return self.last(self.look_up(x).flatten(-2))


class Indexes(Embeds):
    """A net that fails on an index out of range: also in a stack."""

    def look_up(self, x):
        return self.table.weight[x]


def failing(place, kind=Ditto, **settings):
    client = kind(seeded(mlp), optimizer=sgd(0.1), **settings)
    client.__class__ = type(f"Failing{kind.__name__}", (Fails, kind), {"fails_in": place})
    return client


def healthy(kind=Ditto):
    """The same federation in which the client has no upload: its loss is infinite."""
    client = kind(seeded(mlp), optimizer=sgd(0.1))

    def training_step(self, batch, batch_idx):
        is_failing = (self.read("client") == FAILING).any()
        loss = kind.training_step(self, batch, batch_idx)
        return torch.where(is_failing, torch.inf, 0.0) + loss

    client.__class__ = type(f"Healthy{kind.__name__}", (kind,), {"training_step": training_step})
    return client


def data():
    return shared_out(classes(SIZES))


PLACES = ["begin", "training_step", "end_round"]


def failures():
    """Return places, engines and chunk sizes; a third of them is not marked exhaustive."""
    engines, chunk_sizes = ["one_by_one", "stacked"], [None, 1, 3]
    return [
        mark_if((p + 2 * e + c) % 3 > 0, place, engine, chunk_size)
        for p, place in enumerate(PLACES)
        for e, engine in enumerate(engines)
        for c, chunk_size in enumerate(chunk_sizes)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_exception_ends_the_run_with_client_and_round(place):
    with pytest.raises(OSError, match="a broken file") as caught:
        run_rounds(failing(place), data(), chunk_size=1)
    assert any("round 0, client 2" in note for note in caught.value.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "engine", "chunk_size"), failures())
def test_failing_client_harms_only_itself(place, engine, chunk_size):
    if place == "training_step" and engine == "stacked":
        pytest.skip("a branch on data does not stack: see the test of embeddings")
    settings = {"engine": engine, "chunk_size": chunk_size}
    with pytest.warns(UserWarning, match=r"clients \[2\] in round 0.*OSError: a broken file"):
        outcome = run_rounds(failing(place), data(), on_client_error="leave_out", **settings)
    with pytest.warns(UserWarning, match="NaN"):
        expected = run_rounds(healthy(), data(), **settings)
    assert outcome.distance(expected) == 0
    assert [report["train/rejected"] for report in outcome.reports] == [1, 1]


def make_ids(ids):
    """Return data of a federation whose client 2 has some ids as inputs."""
    inputs = torch.randint(0, 4, (sum(SIZES), 4), generator=torch.Generator().manual_seed(1))
    inputs[sum(SIZES[:FAILING]) :][: SIZES[FAILING]] = ids
    arrays = classes(SIZES)
    groups = torch.arange(len(arrays)) % 2
    return shared_out(replace(arrays, inputs=inputs, groups=groups))


def run_with_ids(net, ids, engine, **settings):
    """Run a federation whose client 2 has some ids as inputs."""
    client = FedAvg(seeded(net), optimizer=sgd(0.1))
    return run_rounds(client, make_ids(ids), engine=engine, **settings)


@pytest.mark.slow
def test_failure_in_a_stack_leaves_the_numbers_of_the_others():
    """The failing client's place in the stack is taken, so that the others' rounding stays."""
    settings = {"engine": "stacked", "on_client_error": "leave_out"}
    with pytest.warns(UserWarning, match=r"clients \[2\] .* because of an exception"):
        one, other = (run_with_ids(Indexes, ids, **settings) for ids in (4, 7))
    assert one.distance(other) == 0
    alone = run_with_ids(Indexes, 4, "one_by_one", on_client_error="leave_out")
    assert one.distance(alone) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ids", "engine"),
    [(4, "stacked"), (9, "stacked"), (-1, "stacked"), mark_if(True, 9, "stacked_compiled")],
)
def test_id_beyond_an_embedding_reaches_no_other_clients_table(ids, engine):
    """``torch.vmap`` joins the tables: such an id would be a row of another client."""
    with pytest.warns(UserWarning, match=r"clients \[2\] .* because of an exception"):
        alone = run_with_ids(Embeds, ids, "one_by_one", on_client_error="leave_out")
    with pytest.warns(UserWarning, match=r"clients \[2\] in round 0"):
        stacked = run_with_ids(Embeds, ids, engine)
    assert [report["train/rejected"] for report in stacked.reports] == [1, 1]
    assert stacked.distance(alone) < 1e-12


def adapt_with_ids(ids, engine, **settings):
    """Return the personal models after the adaptation without a round, [4, d], and w."""
    client = Finetuning(seeded(Indexes), optimizer=sgd(0.1))
    federation = Federation(All(), engine=EngineOptions(engine), seed=0, **settings)
    with trials_skipped():
        federation.setup(client, make_ids(ids), "test")
    models = federation.models_of(torch.arange(len(SIZES)), "personal")
    rows = [parameters_to_vector(net.parameters()).detach() for net in models]
    return torch.stack(rows), client.row("global").data


@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_client_that_fails_in_the_adaptation_is_evaluated_without_it(engine):
    expected, w = adapt_with_ids(1, engine)
    with pytest.warns(UserWarning, match=r"clients \[2\] keep the models .* of an exception \("):
        adapted, _ = adapt_with_ids(9, engine, on_client_error="leave_out")
    assert torch.equal(adapted[FAILING], w)
    others = torch.arange(len(SIZES)) != FAILING
    torch.testing.assert_close(adapted[others], expected[others])
    assert not torch.equal(expected[FAILING], w)
    with pytest.raises((IndexError, RuntimeError)):
        adapt_with_ids(9, engine)


def test_too_many_failures_end_the_run_with_the_exception():
    class AllFail(FedAvg):
        def end_round(self, client):
            if len(client) and client.steps and bool(client.samples.sum() > 2):
                raise LookupError("no such file")
            return super().end_round(client)

    client = AllFail(seeded(mlp), optimizer=sgd(0.1))
    message = "work without an exception but in round 0 client 0 got one, as did 3 more of 4: .*no"
    with pytest.raises(NonFiniteLossError, match=message):
        run_rounds(client, data(), on_client_error="leave_out")


@pytest.mark.parametrize("aggregator", [QFFL(1.0), FairFed()], ids=["loss", "group counts"])
def test_failing_measure_of_the_broadcast_leaves_the_client_out(aggregator):
    """q-FFL reads the loss of w^t on the data of each client, and FairFed counts by group."""
    with pytest.warns(UserWarning, match=r"clients \[2\]"):
        outcome = run_with_ids(
            Indexes, 4, "one_by_one", on_client_error="leave_out", aggregator=aggregator
        )
    assert outcome.w.isfinite().all()
    assert [report["train/rejected"] for report in outcome.reports] == [1, 1]


def batch_norm():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.slow
def test_private_run_goes_on_with_a_warning_before_and_in_the_round():
    """Client 3 has 5 samples, so a minibatch of one, on which BatchNorm fails."""
    privacy = DifferentialPrivacy(clip_norm=0.1, noise_multiplier=1.0, delta=0.01)
    with pytest.warns(UserWarning, match="because of an exception") as warned:
        outcome = run_rounds(
            FedBN(seeded(batch_norm), optimizer=sgd(0.1)), data(), rounds=4,
            sampler=Poisson(0.9), privacy=privacy, model_selection=None, tries=True,
        )  # fmt: skip
    texts = [str(warning.message) for warning in warned]
    assert any("one sample, which 1 of 4 clients have" in text for text in texts)
    assert outcome.w.isfinite().all()
    assert sum(float(report["train/rejected"]) for report in outcome.reports) > 0


class Averages(nn.Module):
    """A net that replaces its moving average of inputs in each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(4))
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.last(x - self.average)


class AveragesInPlace(Averages):
    """A net that changes its moving average of inputs in place."""

    def forward(self, x):
        if self.training:
            self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.last(x - self.average)


@pytest.mark.slow
def test_buffer_that_a_failing_client_replaced_reaches_no_other_client():
    class FailsLate(FedAvg):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if bool((self.read("client") == FAILING).any()):
                raise OSError("a broken file")
            return loss

    outcomes = []
    for net, chunk_size in ((AveragesInPlace, None), (Averages, None), (Averages, 1)):
        client = FailsLate(seeded(net), optimizer=sgd(0.1))
        settings = {"on_client_error": "leave_out", "chunk_size": chunk_size}
        with pytest.warns(UserWarning, match=r"clients \[2\] in round 0"):
            outcome = run_rounds(client, data(), engine="one_by_one", **settings)
        outcomes.append(outcome)
    in_place, *replaced = outcomes
    assert in_place.w_statistics.any()
    assert all(outcome.distance(in_place) == 0 for outcome in replaced)


@pytest.mark.slow
def test_lack_of_memory_after_a_failure_halves_the_chunks(monkeypatch):
    """The failing client fails early; the others, who take its place, do not fit together."""
    run = StackedRunner.run

    def run_within(engine, client, optimizer, chunk):
        if len(chunk.clients) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return run(engine, client, optimizer, chunk)

    expected = run_rounds(
        failing("begin"), data(), engine="stacked", chunk_size=1, on_client_error="leave_out"
    )
    monkeypatch.setattr(StackedRunner, "run", run_within)
    outcome = run_rounds(failing("begin"), data(), engine="stacked", on_client_error="leave_out")
    assert outcome.distance(expected) < 1e-12


def test_warning_tells_an_exception_from_numbers_that_are_not_finite():
    class FailsAndDiverges(FedAvg):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            number = int(self.read("client"))
            if number == 1:
                raise OSError("a broken file")
            return loss * torch.nan if number == 3 else loss

    client = FailsAndDiverges(seeded(mlp), optimizer=sgd(0.1))
    with pytest.warns(UserWarning, match=r"clients \[1, 3\].*OSError.*or because they contain NaN"):
        run_rounds(client, data(), engine="one_by_one", on_client_error="leave_out")


def test_client_that_fails_counts_for_no_center():
    client = failing("training_step", IFCA, clusters=2)
    with pytest.warns(UserWarning, match=r"clients \[2\] in round 0"):
        outcome = run_rounds(client, data(), engine="one_by_one", on_client_error="leave_out")
    for report in outcome.reports:
        counts = [float(report[f"train/clients_of_center_{number}"]) for number in range(2)]
        assert sum(counts) == 3
        assert float(report["train/rejected"]) == 1
