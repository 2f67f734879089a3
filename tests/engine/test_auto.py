"""The engines ``auto`` and ``fastest``: rule, stopwatch, checkpoint; neither changes a number."""

import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch
from further_cases import mark_further
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
from pl_fed.engine import EngineChoice, StackedRunner, TurnRunner, compiled
from pl_fed.engine.choice import COMPILED, EAGER
from pl_fed.engine.one_by_one import OneByOne
from pl_fed.engine.rule import WorkFacts
from pl_fed.engine.rule import choose_engine as choose_engine_by_rule
from pl_fed.engine.timing import Candidate, Speed
from pl_fed.rounds.local_training import LocalTraining
from pl_fed.rounds.settings import RunSettings
from pl_fed.samplers import All, Uniform

ALL_ENGINES = (*EAGER, *COMPILED)
SIZES = [7, 3, 10, 2]

pytestmark = pytest.mark.usefixtures("uncompiled")


class Clock:
    """Clock: replaces the measured times of the engines.

    Attributes:
        seconds: Seconds that a step of each engine takes.
        timed: The engines that have been timed, in order.
    """

    def __init__(self):
        self.seconds = dict.fromkeys(ALL_ENGINES, 1.0)
        self.timed = []


@pytest.fixture
def clock(monkeypatch):
    """Exchange the clock of the measurements."""
    clock, engines = Clock(), []
    for kind in (OneByOne, StackedRunner, TurnRunner):

        def run(self, client, optimizer, chunk, original=kind.run):
            name = "one_by_one" if getattr(self, "size", None) is None else "stacked"
            engines.append(name + "_compiled" * getattr(self, "compiled", False))
            return original(self, client, optimizer, chunk)

        monkeypatch.setattr(kind, "run", run)

    def seconds(self, chunk):
        self.run(chunk)
        clock.timed.append(engines[-1])
        return clock.seconds[engines[-1]] * sum(chunk.batches.steps)

    monkeypatch.setattr(Candidate, "seconds", seconds)
    return clock


def make_client(kind=Ditto, net=mlp, **options):
    return kind(seeded(net), **{"optimizer": sgd(0.1, momentum=0.5), "local_steps": 3, **options})


def choose_engine(client=None, rounds=1000.0, name="fastest", **settings):
    """Return the choice of a federation after the first of a number of rounds."""
    client = (client or make_client()).double()
    federation = Federation(All(), seed=0, **sections(engine=name, **settings))
    settings = RunSettings(rounds=rounds)
    federation.setup(client, shared_out(classes(SIZES)), "fit", settings=settings)
    client.train()
    federation.run_round(0, client.configure_optimizers())
    return federation.engine_choice


@pytest.mark.slow
@pytest.mark.parametrize("fastest", mark_further(ALL_ENGINES, {*ALL_ENGINES} - {"stacked"}))
def test_fastest_engine_is_chosen(clock, fastest):
    clock.seconds[fastest] = 0.5
    choice = choose_engine()
    assert choice.current == fastest
    assert {name: speed.step for name, speed in choice.speeds.items()} == clock.seconds


def test_setup_time_counts_in_total_time():
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
def test_engines_are_timed_if_the_run_is_long_enough(clock, step, timed):
    clock.seconds = dict.fromkeys(ALL_ENGINES, step)
    choose_engine()
    assert set(clock.timed) == set(timed)


def test_short_run_uses_one_by_one_without_speeds(clock):
    clock.seconds = {**dict.fromkeys(ALL_ENGINES, 1e-9), "one_by_one": 1e-6}
    choice = choose_engine()
    assert (choice.current, choice.speeds) == ("one_by_one", {})
    assert clock.timed == ["one_by_one", "one_by_one"]  # to estimate the length of the run


def test_run_with_an_unknown_number_of_rounds_is_not_timed(clock):
    assert choose_engine(rounds=0.0).current == "one_by_one"
    assert clock.timed == []


@pytest.mark.slow
def test_endless_run_is_timed(clock):
    clock.seconds["stacked_compiled"] = 0.5
    assert choose_engine(rounds=float("inf")).current == "stacked_compiled"


@pytest.mark.slow
def test_compiled_engines_without_a_compiler_are_excluded_with_one_warning(clock, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(compiled, "compile_graph", fail)
    with pytest.warns(UserWarning, match="Local steps run eagerly") as caught:
        choice = choose_engine()
    assert sum("run eagerly" in str(warning.message) for warning in caught) == 1
    assert tuple(choice.speeds) == EAGER


@pytest.mark.slow
def test_engine_out_of_memory_is_excluded(clock, monkeypatch):
    run = StackedRunner.run

    def run_out_of_memory(self, *args):
        if self.compiled:
            raise torch.OutOfMemoryError("no room")
        return run(self, *args)

    monkeypatch.setattr(StackedRunner, "run", run_out_of_memory)
    choice = choose_engine()
    assert "stacked_compiled" not in choice.speeds
    assert choice.current in choice.speeds


def batch_norm_net():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.mark.slow
def test_stacked_engines_are_excluded_for_a_net_that_does_not_stack(clock, recwarn):
    clock.seconds["stacked"] = clock.seconds["stacked_compiled"] = 0.1
    clock.seconds["one_by_one_compiled"] = 0.5
    choice = choose_engine(make_client(FedAvg, batch_norm_net))
    assert choice.current == "one_by_one_compiled"
    assert tuple(choice.speeds) == ("one_by_one", "one_by_one_compiled")
    assert not any("Clients are run" in str(warning.message) for warning in recwarn)


@pytest.mark.slow
def test_second_run_measures_again(clock):
    """The numbers of a run depend on nothing outside of it."""
    clock.seconds["stacked"] = 0.5
    assert choose_engine().current == "stacked"
    timed = len(clock.timed)
    clock.seconds["one_by_one"] = 0.1
    assert choose_engine().current == "one_by_one"
    assert len(clock.timed) == 2 * timed


@pytest.mark.slow
def test_measurement_writes_no_file_into_the_cache_folder(clock, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choose_engine()
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
def test_damaged_speeds_of_a_checkpoint_are_ignored(speed):
    state = {"asked": "auto", "engine": "stacked", "size": 7, "speeds": {"stacked": speed}}
    choice = EngineChoice()
    choice.load_state_dict(state)
    assert (choice.current, choice.size, choice.speeds) == ("stacked", 7, {})


# The rule of ``auto``


def facts(**changes):
    """Return the facts of a long run of small clients on a CPU, with changes."""
    small = {"device": "cpu", "stack": 10, "numbers": 7850, "layers": 2, "convolves": False}
    return WorkFacts(**{**small, "steps": 1e4, **changes})


@pytest.mark.parametrize(
    ("changes", "engine"),
    [
        ({}, "stacked"),
        ({"stack": 7}, "one_by_one"),
        ({"numbers": 131_073}, "one_by_one"),
        ({"steps": 1999}, "one_by_one"),
        ({"steps": 0.0}, "one_by_one"),
        ({"steps": math.inf}, "stacked_compiled"),
        ({"steps": 1e6, "numbers": 500_000}, "stacked_compiled"),
        ({"steps": 1e6, "numbers": 600_000}, "one_by_one_compiled"),
        ({"steps": 1e6, "stack": 5}, "stacked_compiled"),
        ({"steps": 1e6, "stack": 4}, "one_by_one_compiled"),
        ({"steps": 1e6, "layers": 17}, "stacked"),
        ({"steps": 1e6, "convolves": True}, "one_by_one_compiled"),
        ({"steps": 1e6, "convolves": True, "layers": 9}, "one_by_one"),
        ({"steps": 29_999, "convolves": True}, "one_by_one"),
        ({"device": "cuda", "stack": 2, "numbers": 10**8, "convolves": True}, "stacked"),
        ({"device": "cuda", "stack": 1}, "one_by_one"),
    ],
    ids=str,
)
def test_rule(changes, engine):
    assert choose_engine_by_rule(facts(**changes)) == engine


def test_facts_of_an_algorithm():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    client = Ditto(net)
    expected = WorkFacts("cpu", 5, numbers=2 * 47, layers=4, convolves=True, steps=30.0)
    assert WorkFacts.collect(client, client.objective, 5, 30.0) == expected


def test_auto_reads_no_clock(clock):
    clock.seconds = {**dict.fromkeys(ALL_ENGINES, 100.0), "one_by_one_compiled": 1e-9}
    choice = choose_engine(rounds=100.0, name="auto")
    assert (choice.current, choice.speeds, clock.timed) == ("one_by_one", {}, [])


def test_auto_stacks_no_net_that_does_not_stack(recwarn):
    client = FedAvg(seeded(batch_norm_net), optimizer=sgd(0.1)).double()
    federation = Federation(All(), seed=0)
    data, settings = shared_out(classes([8] * 9)), RunSettings(rounds=1000.0)
    federation.setup(client, data, "fit", settings=settings)
    client.train()
    federation.run_round(0, client.configure_optimizers())
    assert federation.engine_choice.current == "one_by_one"
    assert not any("Clients are run" in str(warning.message) for warning in recwarn)


# Measurements change no number


def run_fastest(monkeypatch, client, data, **settings):
    """Run rounds with ``fastest`` as at the beginning of a long run."""
    original = Federation.setup

    def setup(self, *args, settings):
        original(self, *args, settings=replace(settings, rounds=1e9))

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "setup", setup)
        return run_rounds(client, data, engine="fastest", **settings)


def dropout_net():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 3))


@pytest.mark.slow
def test_run_with_any_chosen_engine_equals_run_one_by_one(clock, monkeypatch):
    client, data = make_client(net=dropout_net), shared_out(classes(SIZES))
    torch.manual_seed(3)
    expected = run_rounds(client, data, rounds=3, sampler=Uniform(3))
    generator_state = torch.random.get_rng_state()
    for fastest in ALL_ENGINES:
        clock.seconds = {**dict.fromkeys(ALL_ENGINES, 1.0), fastest: 0.5}
        clock.timed.clear()
        torch.manual_seed(3)
        outcome = run_fastest(monkeypatch, client, data, rounds=3, sampler=Uniform(3))
        assert outcome.distance(expected) <= (0 if fastest == "one_by_one" else 1e-10), fastest
        assert torch.equal(torch.random.get_rng_state(), generator_state)
        assert set(clock.timed) == set(ALL_ENGINES)


@pytest.mark.slow
@pytest.mark.parametrize("net", mark_further([batch_norm_net, dropout_net], [batch_norm_net]))
def test_measurement_changes_no_state(clock, net):
    client = make_client(net=net).double().train()
    federation = Federation(All(), seed=0, engine=EngineOptions("fastest"))
    settings = RunSettings(rounds=1e9)
    federation.setup(client, shared_out(classes([7, 3, 10])), "fit", settings=settings)
    federation.store.write(*personal_state(federation))
    state, draws = copy.deepcopy(client.state_dict()), torch.random.get_rng_state()
    stored = copy.deepcopy(federation.store.state_dict())
    settle = federation.engine_choice.choose
    after = []

    def settle_and_stop(task):
        settle(task)
        after.extend([copy.deepcopy(client.state_dict()), torch.random.get_rng_state()])
        after.append(copy.deepcopy(federation.store.state_dict()))
        raise KeyboardInterrupt

    federation.engine_choice.choose = settle_and_stop
    with pytest.raises(KeyboardInterrupt):
        federation.run_round(0, client.configure_optimizers())
    assert clock.timed
    assert all(torch.equal(value, client.state_dict()[name]) for name, value in state.items())
    assert torch.equal(draws, after[1])
    assert str(stored) == str(after[2])
    assert client.draws.key == 0
    with pytest.raises(ValueError, match=NOTHING_READABLE):
        client.read("broadcast")
    assert all(parameter.grad is None for parameter in client.parameters())


def personal_state(federation):
    """Return a personal model of client 1, as the arguments of ``store.write``."""
    row = torch.linspace(-1, 1, federation.client.row("personal").layout.numel).double()
    return "personal", torch.tensor([1]), row[None]


# Stop and resume


def test_choice_is_restored_from_its_state_dict():
    choice = EngineChoice()
    choice.current, choice.size = "stacked_compiled", 7
    choice.speeds = {"stacked_compiled": Speed(2e-5, setup=4.0)}
    restored = EngineChoice()
    restored.load_state_dict(choice.state_dict())
    assert (restored.current, restored.size, restored.stacks) == ("stacked_compiled", 7, True)
    assert restored.state_dict() == choice.state_dict()
    assert restored.speeds == choice.speeds


def test_config_overrides_the_choice_of_a_checkpoint():
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


def test_resumed_run_does_not_retry_an_engine_that_failed():
    """Its numbers would differ from those of the uninterrupted run."""
    state = {"asked": "stacked_compiled", "engine": "stacked", "size": 7, "speeds": {}}
    choice = EngineChoice(EngineOptions("stacked_compiled"))
    choice.load_state_dict(state)
    assert (choice.current, choice.size) == ("stacked", 7)


def fit(folder, rounds, engine="fastest", resume=False, chunk_size=None):
    """Fit, if asked from the folder's checkpoint; return the choice, w and all v."""
    client = make_client(net=dropout_net)
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
def test_resumed_run_keeps_its_engine_and_equals_the_uninterrupted_run(clock, tmp_path):
    clock.seconds = {**dict.fromkeys(ALL_ENGINES, 100.0), "stacked_compiled": 50.0}
    choice, *uninterrupted = fit(tmp_path / "uninterrupted", 4)
    assert choice.current == "stacked_compiled"
    fit(tmp_path / "stopped", 2)
    clock.seconds["one_by_one"] = 1.0
    clock.timed.clear()
    choice, *resumed = fit(tmp_path / "stopped", 4, resume=True)
    assert (choice.current, clock.timed) == ("stacked_compiled", [])
    assert all(map(torch.equal, uninterrupted, resumed))
    choice, *_ = fit(tmp_path / "stopped", 5, engine="one_by_one", resume=True)
    assert choice.current == "one_by_one"


@pytest.mark.slow
def test_run_that_is_resumed_at_its_end_keeps_its_engine(clock, tmp_path):
    clock.seconds = {**dict.fromkeys(ALL_ENGINES, 100.0), "stacked": 50.0}
    fit(tmp_path, 2)
    choice, *_ = fit(tmp_path, 2, resume=True)
    assert (choice.current, choice.size) == ("stacked", 3)
    saved = torch.load(tmp_path / "checkpoint.ckpt")["federation"]["engine"]
    assert saved.pop("speeds")["stacked"] == {"step": 50.0, "setup": 150.0}
    assert saved == {"asked": "fastest", "engine": "stacked", "size": 3}


@pytest.mark.slow
def test_measurement_loads_no_more_rows_than_a_chunk(clock, monkeypatch):
    """A cohort may be larger than memory; a chunk is not."""
    sizes = []
    original = LocalTraining._load_chunk

    def load(self, work, clients, **kwargs):
        sizes.append(len(clients))
        return original(self, work, clients, **kwargs)

    monkeypatch.setattr(LocalTraining, "_load_chunk", load)
    choose_engine(chunk_size=2)
    assert max(sizes) == 2
