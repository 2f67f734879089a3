"""Graphics cards of a study: workers take them in turn. No card is needed."""

import os
import time

import pytest
import torch
from tables import table_test

from pl_fed.studies.cards import VISIBLE_CARDS, list_cards, may_use_card
from pl_fed.studies.changes import read_change
from pl_fed.studies.pool import ONE_THREAD, WorkerPool, count_cores
from pl_fed.studies.readers import StudyError
from pl_fed.studies.study import Study

GPU = {"trainer.accelerator": "gpu"}


def make_study(change, **options):
    return Study(
        "cards", ["quickstart", change], {"model.lam": [0.1, 1.0, 2.0]}, 3, options=options
    )


@pytest.fixture
def cards(monkeypatch):
    """Two cards, as the driver would count them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv(VISIBLE_CARDS, raising=False)


def environments(pool):
    """Return the environment variables of the processes of a pool."""
    return [read_environment(worker._process.pid) for worker in pool.workers]


def read_environment(pid, seconds=20):
    """Return the environment of a process, as soon as its program has started."""
    until = time.monotonic() + seconds
    while True:
        with open(f"/proc/{pid}/environ", "rb") as file:
            text = file.read().decode()
        if "PYTHONPATH=" in text or time.monotonic() > until:
            return dict(item.split("=", 1) for item in text.split("\0")[:-1])
        time.sleep(0.01)


def test_cards_are_those_that_this_process_may_use(cards, monkeypatch):
    assert list_cards() == ("0", "1")
    monkeypatch.setenv(VISIBLE_CARDS, "5, GPU-7f,-1")  # CUDA ignores all from the first wrong one
    assert list_cards() == ("5", "GPU-7f")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert list_cards() == ()


@table_test(
    "change, expected",
    [
        ("quickstart", False),  # it sets the CPU
        (["quickstart", GPU], True),
        ([{"trainer": {"accelerator": "cpu"}}], False),
        (["quickstart", "gpu.yaml"], True),
        (["gpu.yaml", "quickstart"], False),
        (["gpu.yaml", {"trainer.accelerator": "cpu"}], False),
        ({"model.lam": 1.0}, True),
    ],
)
def test_the_last_accelerator_of_a_config_decides(tmp_path, monkeypatch, change, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpu.yaml").write_text("trainer: {accelerator: cuda}")
    assert may_use_card(read_change("base", change)) is expected


def test_number_of_workers(cards):
    assert make_study(GPU).count_workers() == 2
    assert make_study(GPU, runs_per_gpu=3).count_workers() == 6
    assert make_study(GPU, runs_per_gpu=3, workers=5).count_workers() == 5
    assert make_study(GPU, workers=5).count_workers(4) == 4
    assert make_study({}, runs_per_gpu=3).count_workers() == count_cores()


def test_without_a_card_there_is_a_worker_for_each_core(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert make_study(GPU, runs_per_gpu=3).count_workers() == count_cores()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="environments are read in /proc")
def test_workers_take_cards_in_turn(cards, monkeypatch):
    monkeypatch.setenv(VISIBLE_CARDS, "4,7")
    with make_study(GPU, runs_per_gpu=2).open_pool(3) as pool:
        found = environments(pool)
    assert [variables[VISIBLE_CARDS] for variables in found] == ["4", "7", "4"]
    assert all(ONE_THREAD.items() <= variables.items() for variables in found)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="environments are read in /proc")
def test_on_the_cpu_workers_keep_the_environment(cards, monkeypatch):
    monkeypatch.setenv(VISIBLE_CARDS, "4,7")
    with make_study({}).open_pool(1) as pool:
        assert environments(pool)[0][VISIBLE_CARDS] == "4,7"
    monkeypatch.delenv(VISIBLE_CARDS)
    with WorkerPool(1, 1) as pool:
        assert VISIBLE_CARDS not in environments(pool)[0]


@table_test(
    "options, match",
    [
        ({"runs_per_gpu": 0}, r"`options\.runs_per_gpu` to be an integer of at least 1 but got 0"),
        ({"runs_per_gpu": 0.5}, r"`options\.runs_per_gpu` to be an integer of at least 1"),
        (
            {"runs_per_gpu": 2, "on": "ray"},
            r"`options\.runs_per_gpu` to be left out beside `options\.on` but got 2: set the number"
            r" of cards of a run for the engine, such as options\.on\.ray\.gpus\.",
        ),
    ],
)
def test_wrong_numbers_are_one_sentence(options, match):
    with pytest.raises(StudyError, match=match):
        make_study(GPU, **options)
