"""The choice of the engine and of its number of clients at a time."""

from functools import partial

import pytest
import torch
from small_federations import Cohorts, classes, mlp, run_rounds, seeded, sgd, shared_out
from tables import table_test
from torch import nn

from pl_fed import EngineOptions, Federation
from pl_fed.clients import Ditto, FedAvg
from pl_fed.clients.contract import ModelRows
from pl_fed.data.batches import Batches
from pl_fed.distributed.work_share import RemoteRows, WorkShare
from pl_fed.engine import EngineChoice, OneByOne, StackedRunner, Workload
from pl_fed.rounds.local_training import CohortWork
from pl_fed.rounds.trained_cohort import CohortResults
from pl_fed.samplers import All


@pytest.fixture
def calls(monkeypatch):
    """Return the sizes of the chunks of each engine."""
    calls = {"OneByOne": [], "StackedRunner": []}
    for engine in (OneByOne, StackedRunner):

        def run(self, client, optimizer, chunk, engine=engine, original=engine.run):
            if isinstance(chunk.batches, Batches):  # no trial before training
                calls[engine.__name__].append(len(chunk.clients))
            return original(self, client, optimizer, chunk)

        monkeypatch.setattr(engine, "run", run)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "used"),
    [("one_by_one", "OneByOne"), ("stacked", "StackedRunner"), ("auto", "OneByOne")],
)
def test_configured_engine_runs_the_clients_and_auto_is_one_by_one_on_a_cpu(calls, name, used):
    client = FedAvg(seeded(mlp), optimizer=sgd())
    run_rounds(client, shared_out(classes([4] * 5)), rounds=1, engine=name, chunk_size=2)
    assert calls.pop(used) == [2, 2, 1]
    assert list(calls.values()) == [[]]


def make_workload(client, cohort, data=None):
    """Return the workload of a cohort of a given size, as the federation makes it."""
    federation = Federation(All(), seed=0)
    federation.setup(client, data or shared_out(classes([4])), "fit")
    optimizer, cohort = client.configure_optimizers(), torch.zeros(cohort)
    training, clients = federation.session.rounds.local_training, torch.zeros(1, dtype=torch.int64)
    broadcast = ModelRows(client.row("global").data, client.statistics("global").data)
    share, own = WorkShare.single_process(clients), CohortResults(1, None)
    work = CohortWork(0, optimizer, share, broadcast, RemoteRows(), own, lambda _: None)
    chunk = training._load_chunk(work, clients)
    steps = partial(training.count_steps, round=0)
    return Workload(client, optimizer, cohort, lambda _: chunk, steps=steps)


@pytest.mark.parametrize("name", ["one_by_one", "stacked", "auto"])
def test_configured_chunk_size_is_used(name):
    assert (
        EngineChoice(EngineOptions(name, 7)).clients_at_a_time(
            name, make_workload(FedAvg(mlp()), 100)
        )
        == 7
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_by_one", "stacked"])
@pytest.mark.parametrize("cohort", [1, 3])
def test_small_clients_run_all_at_a_time(name, cohort):
    assert (
        EngineChoice(EngineOptions(name)).clients_at_a_time(
            name, make_workload(Ditto(mlp()), cohort)
        )
        == cohort
    )


@pytest.mark.slow
def test_large_clients_are_loaded_in_chunks_of_eight_megabytes():
    """These are 38 rows of 220 kB, or one row of 8.8 MB."""
    data = shared_out(classes([1], (1000,), 100))
    for bottleneck, expected in ((50, 38), (2000, 1)):
        net = nn.Sequential(nn.Linear(1000, bottleneck, False), nn.Linear(bottleneck, 100, False))
        work = make_workload(FedAvg(net), 100, data)
        assert EngineChoice().clients_at_a_time("one_by_one", work) == expected


@pytest.mark.slow
def test_clients_that_do_not_stack_use_the_chunk_size_of_one_by_one(monkeypatch):
    client = FedAvg(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), optimizer=sgd())
    data, federation = (
        shared_out(classes([4] * 3)),
        Federation(All(), engine=EngineOptions("stacked"), seed=0),
    )
    federation.setup(client, data, "fit")
    monkeypatch.setattr("pl_fed.engine.choice.total_memory", lambda device: 0)  # allows no stack
    with pytest.warns(UserWarning, match="run one by one"):
        federation.run_round(0, client.configure_optimizers())
    assert (federation.engine_choice.current, federation.engine_choice.size) == ("one_by_one", 3)


def test_a_stack_takes_a_quarter_of_the_memory(monkeypatch):
    monkeypatch.setattr("pl_fed.engine.choice.total_memory", lambda device: 24_000)
    client = FedAvg(nn.Linear(4, 3, bias=False).double())  # six rows of 96 bytes for each client
    wide = shared_out(classes([1], (4,)), batch_size=1)  # 64 times 4 doubles for activations
    choice = EngineChoice(EngineOptions("stacked"))
    assert choice.clients_at_a_time("stacked", make_workload(client, 4, wide)) == 2
    assert choice.clients_at_a_time("stacked", make_workload(client, 100, wide)) == 2
    monkeypatch.setattr("pl_fed.engine.choice.total_memory", lambda device: 200)
    assert choice.clients_at_a_time("stacked", make_workload(client, 100, wide)) == 1


def test_chunks_of_a_stack_have_similar_sizes_and_fit_a_cache():
    """Of rows of a little over 1 MiB, 5 MiB run at a time: 9 clients are chunks of 3, 3 and 3."""
    net = nn.Sequential(nn.Linear(256, 1023, bias=False), nn.Linear(1023, 1, bias=False))
    data = shared_out(classes([1], (256,), 1))
    work = make_workload(FedAvg(net), 9, data)
    assert EngineChoice().clients_at_a_time("stacked", work) == 3


@pytest.mark.slow
def test_engine_trains_in_the_dtype_of_the_client():
    client = FedAvg(seeded(mlp), optimizer=sgd())
    for dtype in (torch.float32, torch.float64):
        for engine in ("one_by_one", "stacked"):
            outcome = run_rounds(client, shared_out(classes([4])), dtype=dtype, engine=engine)
            assert outcome.w.dtype == dtype


@table_test("name", ["stackd", None])
def test_unknown_engine_is_refused(name):
    with pytest.raises(ValueError, match=r"`federation.engine.name` to be 'auto', .* but got"):
        Federation(All(), engine=EngineOptions(name))


def wide_net():
    """Return a net with large activations and few parameters."""
    return nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 1)), nn.Linear(1, 5000), Mean())


class Mean(nn.Module):
    """Mean: three outputs from the mean of all activations."""

    def forward(self, x):
        return x.tanh().mean(-1)[:, :3]


@pytest.mark.slow
def test_a_stack_counts_what_a_step_keeps_for_its_backward_pass(monkeypatch):
    """A sample has 4 inputs and 20,000 activations: tanh and mean keep 80 kB of it."""
    client = FedAvg(seeded(wide_net), optimizer=sgd())
    federation = Federation(All(), engine=EngineOptions("stacked"), seed=0)
    federation.setup(client, shared_out(classes([4] * 9)), "fit")
    client.train()
    monkeypatch.setattr("pl_fed.engine.choice.total_memory", lambda device: 12_000_000)
    federation.run_round(0, client.configure_optimizers())
    choice = federation.engine_choice
    kept = 4 * 20_000 * 4  # bytes of a minibatch of 4 samples
    assert kept <= choice._activation_bytes <= 1.3 * kept
    assert choice.size == 3  # 9 clients in chunks of 3: at most 4 fit into 3 MB


class ShortOfMemory:
    """Short of memory: a device on which no more than some clients can be stacked."""

    def __init__(self, monkeypatch, most):
        self.sizes, run = [], StackedRunner.run

        def run_within(engine, client, optimizer, chunk):
            self.sizes.append(len(chunk.clients))
            if len(chunk.clients) > most:
                chunk.round.models["global"].parameters.isfinite()  # something was done before
                raise torch.OutOfMemoryError("out of memory")
            return run(engine, client, optimizer, chunk)

        monkeypatch.setattr(StackedRunner, "run", run_within)


@pytest.mark.slow
@pytest.mark.parametrize(("most", "sizes"), [(3, [10, 5, 2, 2, 1, 2, 2, 1]), (1, None)])
def test_chunks_are_halved_on_a_device_out_of_memory(monkeypatch, most, sizes):
    client, data = Ditto(seeded(mlp), optimizer=sgd(0.1)), shared_out(classes([4] * 10))
    expected = run_rounds(client, data, rounds=2, engine="stacked", chunk_size=1)
    device = ShortOfMemory(monkeypatch, most)
    outcome = run_rounds(client, data, rounds=2, engine="stacked")
    assert outcome.distance(expected) <= 1e-12
    assert device.sizes[: len(sizes or [])] == (sizes or [])
    assert max(device.sizes[-5:]) <= most


def test_a_client_too_large_for_the_device_is_an_error(monkeypatch):
    ShortOfMemory(monkeypatch, 0)
    client = FedAvg(seeded(mlp), optimizer=sgd(0.1))
    with pytest.raises(torch.OutOfMemoryError):
        run_rounds(client, shared_out(classes([4] * 4)), engine="stacked")


@pytest.mark.parametrize("cohorts", [[(0, 1, 2)], [(0,), (1,)]])
def test_clients_without_a_step_are_no_reason_against_a_stack(calls, recwarn, cohorts):
    """Client 0 leaves its one sample out; the trial takes one client."""
    data = shared_out(classes([1, 4, 4]), min_batch=2)
    client = FedAvg(seeded(mlp), optimizer=sgd())
    sampler = Cohorts(*cohorts)
    run_rounds(client, data, sampler=sampler, engine="stacked", chunk_size=1)
    assert calls["StackedRunner"]
    assert not calls["OneByOne"]
    assert not [entry for entry in recwarn if "run one by one" in str(entry.message)]
