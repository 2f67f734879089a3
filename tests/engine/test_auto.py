"""``auto``: its choice, the checkpoint of it, and that measuring changes no number."""

import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch
from small_federations import (
    NOTHING_READABLE,
    classes,
    mlp,
    run_rounds,
    sections,
    seeded,
    sgd,
    shared_out,
)
from torch import nn

import pl_fed
from pl_fed import EngineOptions, Federation
from pl_fed.clients import Ditto, FedAvg
from pl_fed.engine import BatchedRunner, EngineChoice, compiled
from pl_fed.engine.choice import COMPILED, EAGER
from pl_fed.engine.one_by_one import OneByOne
from pl_fed.engine.timing import Candidate, Speed
from pl_fed.rounds.local_training import LocalTraining
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All, Uniform

ALL_ENGINES = (*EAGER, *COMPILED)
SIZES = [7, 3, 10, 2]

pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture
def clock(monkeypatch):
    """Exchange the clock: seconds that a step of each engine takes, to be set; what was timed."""

    class Clock:
        seconds = dict.fromkeys(ALL_ENGINES, 1.0)
        timed = []

    made = Clock()
    made.seconds, made.timed, running = dict(Clock.seconds), [], []
    for kind in (OneByOne, BatchedRunner):

        def run(self, client, optimizer, chunk, original=kind.run):
            name = "one_by_one" if getattr(self, "size", None) is None else "stacked"
            running.append(name + "_compiled" * getattr(self, "compiled", False))
            return original(self, client, optimizer, chunk)

        monkeypatch.setattr(kind, "run", run)

    def seconds(self, chunk):
        self.run(chunk)
        made.timed.append(running[-1])
        return made.seconds[running[-1]] * sum(chunk.batches.steps)

    monkeypatch.setattr(Candidate, "seconds", seconds)
    return made


def client_of(kind=Ditto, net=mlp, **options):
    return kind(seeded(net), **{"optimizer": sgd(0.1, momentum=0.5), "local_steps": 3, **options})


def settled(client=None, rounds=1000.0, name="auto", **settings):
    """The choice of a federation that has run its first of so many rounds."""
    client = (client or client_of()).double()
    federation = Federation(All(), seed=0, **sections(engine=name, **settings))
    settings = RunSettings(rounds=rounds)
    federation.setup(client, shared_out(classes(SIZES)), "fit", settings=settings)
    client.train()
    federation.run_round(0, client.configure_optimizers())
    return federation.engine_choice


@pytest.mark.slow
@pytest.mark.parametrize("fastest", ALL_ENGINES)
def test_the_fastest_is_chosen(clock, fastest):
    clock.seconds[fastest] = 0.5
    engine = settled()
    assert engine.current == fastest
    assert {name: speed.step for name, speed in engine.speeds.items()} == clock.seconds


def test_what_takes_long_to_begin_has_to_pay_off():
    slow, quick = Speed(2.0), Speed(1.0, setup=100.0)
    assert slow.total(99) < quick.total(99)
    assert slow.total(101) > quick.total(101)
    assert slow.total(float("inf")) > quick.total(float("inf"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "timed"),
    [
        (1e-9, ["one_by_one"]),  # 4 clients, 3 steps, 1000 rounds: 12,000 steps
        (9.9 / 12_000, ["one_by_one"]),
        (10.1 / 12_000, EAGER),
        (59.0 / 12_000, EAGER),
        (61.0 / 12_000, ALL_ENGINES),
    ],
)
def test_it_measures_as_far_as_it_pays(clock, step, timed):
    clock.seconds = dict.fromkeys(ALL_ENGINES, step)
    settled()
    assert set(clock.timed) == set(timed)


def test_too_little_to_do_is_run_one_by_one(clock):
    clock.seconds = {**dict.fromkeys(ALL_ENGINES, 1e-9), "one_by_one": 1e-6}
    engine = settled()
    assert (engine.current, engine.speeds) == ("one_by_one", {})
    assert clock.timed == ["one_by_one", "one_by_one"]  # to know how little it is


def test_without_an_end_in_sight_nothing_is_timed(clock):
    assert settled(rounds=0.0).current == "one_by_one"
    assert clock.timed == []


@pytest.mark.slow
def test_endless_rounds_are_worth_measuring(clock):
    clock.seconds["stacked_compiled"] = 0.5
    assert settled(rounds=float("inf")).current == "stacked_compiled"


@pytest.mark.slow
def test_what_cannot_be_compiled_is_left_out_and_said_once(clock, monkeypatch):
    def none(*_, **__):
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(compiled, "compile_graph", none)
    with pytest.warns(UserWarning, match="Local steps run eagerly") as caught:
        engine = settled()
    assert len([each for each in caught if "run eagerly" in str(each.message)]) == 1
    assert tuple(engine.speeds) == EAGER


def test_what_does_not_fit_into_memory_is_left_out(clock, monkeypatch):
    run = BatchedRunner.run

    def full(self, *args):
        if self.compiled and self.size:
            raise torch.OutOfMemoryError("no room")
        return run(self, *args)

    monkeypatch.setattr(BatchedRunner, "run", full)
    engine = settled()
    assert "stacked_compiled" not in engine.speeds
    assert engine.current in engine.speeds


def net_with_batch_norm():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def test_what_cannot_be_stacked_is_left_out(clock, recwarn):
    clock.seconds["stacked"] = clock.seconds["stacked_compiled"] = 0.1
    clock.seconds["one_by_one_compiled"] = 0.5
    engine = settled(client_of(FedAvg, net_with_batch_norm))
    assert engine.current == "one_by_one_compiled"
    assert tuple(engine.speeds) == ("one_by_one", "one_by_one_compiled")
    assert not [each for each in recwarn if "Clients are run" in str(each.message)]


@pytest.mark.slow
def test_a_second_run_measures_afresh(clock):
    """Nothing outside a run decides its last digits."""
    clock.seconds["stacked"] = 0.5
    assert settled().current == "stacked"
    timed = len(clock.timed)
    clock.seconds["one_by_one"] = 0.1
    assert settled().current == "one_by_one"
    assert len(clock.timed) == 2 * timed


@pytest.mark.slow
def test_a_run_writes_nothing_outside_its_folder(clock, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settled()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "speed",
    [
        1,
        {},
        {"step": 1.0},
        {"step": "fast", "setup": 0},
        *({"step": step, "setup": 0.0} for step in (math.nan, 0.0, -1.0, math.inf)),
        {"step": 1e-3, "setup": -1.0},
    ],
)
def test_speeds_of_a_damaged_checkpoint_are_forgotten(speed):
    state = {"asked": "auto", "engine": "stacked", "size": 7, "speeds": {"stacked": speed}}
    choice = EngineChoice()
    choice.load_state_dict(state)
    assert (choice.current, choice.size, choice.speeds) == ("stacked", 7, {})


# No number changes


def run_auto(monkeypatch, client, data, **settings):
    """Rounds as the federation runs them when there is much to do."""
    original = Federation.setup

    def setup(self, *args, settings):
        original(self, *args, settings=replace(settings, rounds=1e9))

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "setup", setup)
        return run_rounds(client, data, engine="auto", **settings)


def dropout_net():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 3))


@pytest.mark.slow
@pytest.mark.parametrize("fastest", ALL_ENGINES)
def test_results_are_equal_whatever_is_chosen(clock, monkeypatch, fastest):
    clock.seconds[fastest] = 0.5
    client, data = client_of(net=dropout_net), shared_out(classes(SIZES))
    torch.manual_seed(3)
    expected = run_rounds(client, data, rounds=3, sampler=Uniform(3))
    drawn = torch.random.get_rng_state()
    torch.manual_seed(3)
    outcome = run_auto(monkeypatch, client, data, rounds=3, sampler=Uniform(3))
    assert outcome.distance(expected) <= (0 if fastest == "one_by_one" else 1e-10)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert set(clock.timed) == set(ALL_ENGINES)


@pytest.mark.slow
@pytest.mark.parametrize("net", [net_with_batch_norm, dropout_net])
def test_measuring_changes_nothing(clock, net):
    client = client_of(net=net).double().train()
    federation = Federation(All(), seed=0)
    settings = RunSettings(rounds=1e9)
    federation.setup(client, shared_out(classes([7, 3, 10])), "fit", settings=settings)
    federation.store.write(*a_state(federation))
    state, draws = copy.deepcopy(client.state_dict()), torch.random.get_rng_state()
    stored = copy.deepcopy(federation.store.state_dict())
    settle = federation.engine_choice.choose
    seen = []

    def settle_and_look(task):
        settle(task)
        seen.extend([copy.deepcopy(client.state_dict()), torch.random.get_rng_state()])
        seen.append(copy.deepcopy(federation.store.state_dict()))
        raise KeyboardInterrupt

    federation.engine_choice.choose = settle_and_look
    with pytest.raises(KeyboardInterrupt):
        federation.run_round(0, client.configure_optimizers())
    assert clock.timed
    assert all(torch.equal(value, client.state_dict()[name]) for name, value in state.items())
    assert torch.equal(draws, seen[1])
    assert str(stored) == str(seen[2])
    assert client.draws.key == 0
    with pytest.raises(ValueError, match=NOTHING_READABLE):
        client.read("broadcast")
    assert all(parameter.grad is None for parameter in client.parameters())


def a_state(federation):
    row = torch.linspace(-1, 1, federation.client.row("personal").layout.numel).double()
    return "personal", torch.tensor([1]), row[None]


# Stop and resume


def test_a_choice_is_saved_and_taken_up():
    choice = EngineChoice()
    choice.current, choice.size = "stacked_compiled", 7
    choice.speeds = {"stacked_compiled": Speed(2e-5, setup=4.0)}
    other = EngineChoice()
    other.load_state_dict(choice.state_dict())
    assert (other.current, other.size, other.stacks) == ("stacked_compiled", 7, True)
    assert other.state_dict() == choice.state_dict()
    assert other.speeds == choice.speeds


def test_what_is_asked_for_wins_over_what_was_saved():
    state = {"asked": "auto", "engine": "stacked", "size": 7, "speeds": {}}
    for name, chunk_size, expected in (
        ("auto", None, ("stacked", 7)),
        ("auto", 3, ("stacked", 3)),
        ("stacked", None, ("stacked", 7)),
        ("one_by_one", None, ("one_by_one", None)),
        ("stacked_compiled", 5, ("stacked_compiled", 5)),
    ):
        choice = EngineChoice(EngineOptions(name, chunk_size))
        choice.load_state_dict(state)
        assert (choice.current, choice.size) == expected


def test_an_engine_that_was_given_up_is_not_tried_again():
    """The numbers of a run that was stopped would be others."""
    state = {"asked": "stacked_compiled", "engine": "stacked", "size": 7, "speeds": {}}
    choice = EngineChoice(EngineOptions("stacked_compiled"))
    choice.load_state_dict(state)
    assert (choice.current, choice.size) == ("stacked", 7)


def fit(folder, rounds, engine="auto", resume=False, chunk_size=None):
    """Fit, from the checkpoint there; return what the run led to."""
    client = client_of(net=dropout_net)
    trainer = pl_fed.Trainer(
        Federation(Uniform(3), engine=EngineOptions(engine, chunk_size=chunk_size), seed=0),
        max_epochs=rounds,
        default_root_dir=folder,
        run_dir=folder / "run",
        precision="64-true",
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(
            client,
            shared_out(classes(SIZES)),
            ckpt_path=folder / "checkpoint.ckpt" if resume else None,
        )
    trainer.save_checkpoint(folder / "checkpoint.ckpt")
    rows = trainer.federation.store.read("personal", torch.arange(len(SIZES)))
    return trainer.federation.engine_choice, client.row("global").data.clone(), rows


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_engine_bit_for_bit(clock, tmp_path):
    clock.seconds = {**dict.fromkeys(ALL_ENGINES, 100.0), "stacked_compiled": 50.0}
    engine, *whole = fit(tmp_path / "whole", 4)
    assert engine.current == "stacked_compiled"
    fit(tmp_path / "stopped", 2)
    clock.seconds["one_by_one"] = 1.0
    clock.timed.clear()
    engine, *resumed = fit(tmp_path / "stopped", 4, resume=True)
    assert (engine.current, clock.timed) == ("stacked_compiled", [])
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed))
    other, *_ = fit(tmp_path / "stopped", 5, engine="one_by_one", resume=True)
    assert other.current == "one_by_one"


@pytest.mark.slow
def test_a_run_that_is_resumed_at_its_end_keeps_its_engine(clock, tmp_path):
    clock.seconds = {**dict.fromkeys(ALL_ENGINES, 100.0), "stacked": 50.0}
    fit(tmp_path, 2)
    engine, *_ = fit(tmp_path, 2, resume=True)
    assert (engine.current, engine.size) == ("stacked", 3)
    saved = torch.load(tmp_path / "checkpoint.ckpt")["federation"]["engine"]
    assert saved.pop("speeds")["stacked"] == {"step": 50.0, "setup": 150.0}
    assert saved == {"asked": "auto", "engine": "stacked", "size": 3}


@pytest.mark.slow
def test_the_cohorts_rows_are_not_loaded_to_count_its_steps(clock, monkeypatch):
    """A cohort may be larger than memory; a chunk is not."""
    read = []
    original = LocalTraining._load_chunk

    def load(self, plan, clients, *args, **kwargs):
        read.append(len(clients))
        return original(self, plan, clients, *args, **kwargs)

    monkeypatch.setattr(LocalTraining, "_load_chunk", load)
    settled(chunk_size=2)
    assert max(read) == 2
