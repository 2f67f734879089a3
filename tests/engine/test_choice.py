"""Which engine runs the clients, and how many at a time."""

import ctypes

import pytest
import torch
from small_federations import classes, mlp, run_rounds, seeded, sgd, shared_out
from torch import nn

from pl_fed import Federation
from pl_fed.clients import Ditto, FedAvg
from pl_fed.engine import EngineChoice, OneByOne, Stacked
from pl_fed.engine.choice import keep_freed_memory
from pl_fed.samplers import All


@pytest.fixture
def calls(monkeypatch):
    """The sizes of the chunks that each engine was given."""
    given = {"OneByOne": [], "Stacked": []}
    for engine in (OneByOne, Stacked):

        def run(self, client, optimizer, chunk, engine=engine, original=engine.run):
            given[engine.__name__].append(len(chunk.clients))
            return original(self, client, optimizer, chunk)

        monkeypatch.setattr(engine, "run", run)
    return given


@pytest.mark.parametrize(
    ("name", "used"), [("one_by_one", "OneByOne"), ("stacked", "Stacked"), ("auto", "OneByOne")]
)
def test_the_engine_asked_for_runs_them_and_auto_is_one_by_one_on_a_cpu(calls, name, used):
    client = FedAvg(seeded(mlp), optimizer=sgd())
    run_rounds(client, shared_out(classes([4] * 5)), rounds=1, engine=name, chunk_size=2)
    assert calls.pop(used) == [2, 2, 1]
    assert list(calls.values()) == [[]]


@pytest.mark.parametrize("name", ["one_by_one", "stacked", "auto"])
def test_the_chunk_size_asked_for_holds(name):
    assert EngineChoice(name, 7).clients_at_a_time(FedAvg(mlp()), 100, 0) == 7


@pytest.mark.parametrize("name", ["one_by_one", "stacked"])
@pytest.mark.parametrize("cohort", [1, 3])
def test_small_clients_are_run_all_at_a_time(name, cohort):
    assert EngineChoice(name).clients_at_a_time(Ditto(mlp()), cohort, 100) == cohort


def test_large_clients_are_loaded_in_turn_where_they_are_run_in_turn():
    """Rows of 400 kB, twenty of which are the 8 MB that are loaded; rows of 40 MB, one by one."""
    choice = EngineChoice("one_by_one")
    assert choice.clients_at_a_time(FedAvg(nn.Linear(1000, 100)), 100, 0) == 20
    assert choice.clients_at_a_time(FedAvg(nn.Linear(1000, 10_000)), 100, 0) == 1


def test_clients_that_do_not_stack_are_loaded_like_others_that_run_in_turn():
    client = FedAvg(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), optimizer=sgd())
    data, federation = shared_out(classes([4] * 3)), Federation(All(), engine="stacked", seed=0)
    federation.setup(client, data, "fit")
    huge = 1 << 40  # bytes of a minibatch: a stack of them does not fit
    assert federation.engine.clients_at_a_time(client, 3, huge) == 1
    with pytest.warns(UserWarning, match="run one by one"):
        federation.run_round(0, client.configure_optimizers())
    assert federation.engine.clients_at_a_time(client, 3, huge) == 3


def test_a_stack_takes_half_of_the_free_memory(monkeypatch):
    monkeypatch.setattr("pl_fed.engine.choice.free_memory", lambda device: 12_000)
    client = FedAvg(nn.Linear(9, 2, bias=False).double())  # rows of 144 bytes, six of each
    choice = EngineChoice("stacked")
    assert choice.clients_at_a_time(client, 100, 0) == 6
    assert choice.clients_at_a_time(client, 100, 1000) == 1


def test_keeping_freed_memory_is_left_out_without_glibc(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    keep_freed_memory.__wrapped__()


def test_it_sets_glibc_once(monkeypatch):
    settings = []

    class Library:
        @staticmethod
        def mallopt(option, value):
            settings.append((option, value))

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    keep_freed_memory.cache_clear()
    keep_freed_memory()
    keep_freed_memory()
    assert settings == [(-3, 2**25), (-1, 2**28)]


def test_an_engine_trains_in_the_dtype_of_the_client():
    client = FedAvg(seeded(mlp), optimizer=sgd())
    for dtype in (torch.float32, torch.float64):
        for engine in ("one_by_one", "stacked"):
            outcome = run_rounds(client, shared_out(classes([4])), dtype=dtype, engine=engine)
            assert outcome.w.dtype == dtype
