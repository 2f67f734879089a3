"""The bar of rounds: its lines and times, and its lines of text without a terminal."""

import csv
import io
import logging
import math
import sys
from types import SimpleNamespace

import pytest
import rich
from lightning.pytorch.callbacks import LambdaCallback, TQDMProgressBar
from lit_federations import images, shared_out
from rich.console import Console
from small_federations import seeded
from torch import nn

import pl_fed
from pl_fed.callbacks import RoundProgress
from pl_fed.callbacks.round_display import RoundDisplay, Work, slow_work
from pl_fed.clients import Ditto
from pl_fed.command.start_status import StartStatus
from pl_fed.samplers import All


@pytest.fixture
def clock(monkeypatch):
    """The time of the bars, in seconds, as the only entry of a list."""
    time = [100.0]
    monkeypatch.setattr("pl_fed.callbacks.round_display.time.monotonic", lambda: time[0])
    return time


def lines(renderable, width=80):
    screen = io.StringIO()
    Console(file=screen, width=width).print(renderable)
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def fit(folder, rounds=2, callbacks=(), **settings):
    trainer = pl_fed.Trainer(
        pl_fed.Federation(All(), seed=0), run_dir=folder, max_epochs=rounds, accelerator="cpu",
        enable_model_summary=False, num_sanity_val_steps=0, callbacks=list(callbacks), **settings,
    )  # fmt: skip
    net = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    trainer.fit(Ditto(net.float()), shared_out(images(), val_fraction=0.25, test_fraction=0.25))
    return trainer


def test_time_left_is_that_of_the_later_rounds(clock):
    """The first of ten rounds takes 5 s, the others 2 s each."""
    display = RoundDisplay(10)
    assert display.seconds_left() is None
    clock[0] += 5
    display.finish_round(1)
    assert display.seconds_left() is None, "the first round has preparations"
    for finished in (2, 3):
        clock[0] += 2
        display.finish_round(finished)
    assert display.seconds_left() == 7 * 2
    clock[0] += 1.5
    assert display.seconds_left() == 7 * 2 - 1.5
    clock[0] += 100
    assert display.seconds_left() == 0, "a slow round leaves no negative time"
    assert display.seconds() == 5 + 4 + 101.5


def test_resumed_run_counts_from_its_round(clock):
    display = RoundDisplay(100, finished=40)
    for finished in (41, 43):
        clock[0] += 4
        display.finish_round(finished)
    assert display.seconds_left() == pytest.approx((100 - 43) * 2)


@pytest.mark.parametrize("width", [80, 110])
def test_lines_fit_into_the_terminal(clock, width):
    display = RoundDisplay(100, results="accuracy: personal 0.928", loss=0.35849)
    clock[0] += 12
    display.finish_round(40)
    clock[0] += 3723
    display.finish_round(41)
    first, second = lines(display, width)
    assert first.startswith("Round 42/100 ━")
    assert first.endswith("1:02:15, 61:00:57 left  loss 0.3585")
    assert len(first) == width
    assert second == "accuracy: personal 0.928"
    display.results = "x" * 200
    assert lines(display, width)[1] == "x" * (width - 1) + "…"


def test_clients_get_a_bar_after_two_seconds(clock):
    display = RoundDisplay(10, work=Work("Clients", 8, 3))
    clock[0] += 2
    assert len(lines(display)) == 1
    clock[0] += 0.1
    assert lines(display)[1].startswith("Clients 3/8 ━")
    assert lines(display)[1].endswith(" 0:02")
    display.activity = lambda: "Timing the engine stacked"
    assert lines(display)[1:] == ["Timing the engine stacked"]
    assert list(slow_work(None)) == []


def test_last_round_and_unlimited_runs_have_a_title(clock):
    assert lines(RoundDisplay(5, finished=5))[0].startswith("Round 5/5 ")
    unlimited = RoundDisplay(math.inf, finished=5)
    unlimited.finish_round(6)
    unlimited.finish_round(7)
    assert lines(unlimited)[0].startswith("Round 8 ")
    assert "left" not in lines(unlimited)[0]


def test_round_with_an_empty_cohort_counts():
    progress = RoundProgress(federation=None)
    trainer = SimpleNamespace(current_epoch=0)
    progress.on_train_batch_start(trainer, None, [], 0)
    progress.on_train_batch_end(trainer, None, {}, [], 0)
    assert progress.display.finished == 1


@pytest.mark.slow
def test_fit_without_a_terminal_prints_a_line_per_validation(tmp_path, capsys):
    fit(tmp_path, rounds=4, check_val_every_n_epoch=2)
    printed = capsys.readouterr().out.splitlines()
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["val/personal/accuracy"]]
    assert len(printed) == len(rows) == 2
    for line, row, number in zip(printed, rows, (2, 4)):
        assert line.startswith(f"Round {number}/4  0:")
        assert f"loss {float(row['train/loss']):.4g}" in line
        personal, worst = row["val/personal/accuracy"], row["val/personal/accuracy_worst10"]
        assert f"personal {float(personal):.3f}, worst 10 % {float(worst):.3f}; " in line
        assert line.endswith(f"global {float(row['val/global/accuracy']):.3f}")


@pytest.fixture
def terminal(monkeypatch):
    """Make rich write bars to the captured output, as to a terminal of 80 columns."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.usefixtures("terminal")
def test_fit_in_a_terminal_leaves_one_bar_and_prints_above_it(tmp_path, capsys):
    handler = logging.StreamHandler(sys.__stderr__)
    logger = logging.getLogger("test of the bar")
    logger.addHandler(handler)
    streams = []

    def report(trainer, *_):
        print("printed by a callback")
        streams.append(handler.stream)

    try:
        fit(tmp_path, callbacks=[LambdaCallback(on_validation_end=report)])
    finally:
        logger.removeHandler(handler)
    out = capsys.readouterr().out
    assert out.count("printed by a callback\n") == 2
    assert "Round 2/2 ━" in out.split("printed by a callback")[-1]
    assert "accuracy on validation data: personal" in out
    assert streams[0] is not sys.__stderr__, "logs of the terminal go through the bar"
    assert handler.stream is sys.__stderr__, "and later to the terminal again"


@pytest.mark.usefixtures("terminal")
def test_error_ends_the_bar(tmp_path, capsys):
    def fail(*_):
        raise KeyError("mine")

    before = sys.stdout
    with pytest.raises(KeyError, match="mine"):
        fit(tmp_path, callbacks=[LambdaCallback(on_train_epoch_end=fail)])
    assert sys.stdout is before
    assert "\x1b[?25h" in capsys.readouterr().out, "the cursor is visible again"


@pytest.mark.slow
def test_users_bar_and_no_bar_replace_it(tmp_path):
    bar = TQDMProgressBar()
    trainer = fit(tmp_path / "users", rounds=1, callbacks=[bar])
    assert trainer.progress_bar_callback is bar
    assert not any(isinstance(callback, RoundProgress) for callback in trainer.callbacks)
    trainer = fit(tmp_path / "none", rounds=1, enable_progress_bar=False)
    assert trainer.progress_bar_callback is None
    trainer = fit(tmp_path / "default", rounds=1)
    assert isinstance(trainer.progress_bar_callback, RoundProgress)


@pytest.mark.usefixtures("terminal")
@pytest.mark.slow
def test_bar_of_a_test_vanishes_and_a_disabled_bar_shows_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pl_fed.callbacks.round_progress._PATIENCE", -1.0)
    trainer = fit(tmp_path, rounds=1)
    capsys.readouterr()
    for evaluate in (trainer.test, trainer.validate):
        evaluate(trainer.lightning_module, trainer.datamodule, verbose=False)
    out = capsys.readouterr().out
    assert "Testing " in out
    assert "Validating " in out
    assert out.endswith("\x1b[2K"), "the line is erased"
    trainer.progress_bar_callback.disable()
    trainer.test(trainer.lightning_module, trainer.datamodule, verbose=False)
    assert capsys.readouterr().out == ""


def test_status_before_a_run_is_for_terminals_only(capsys, monkeypatch):
    StartStatus("Reading the data …").stop()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    status = StartStatus("Reading the data …")
    status.on_fit_start(None, None)
    err = capsys.readouterr().err
    assert "Reading the data …" in err
    assert err.endswith("\x1b[2K")
    rich.reconfigure()
