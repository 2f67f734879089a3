"""What Lightning's Trainer offers, and what becomes of it: honoured, or refused before training."""

import csv
import functools
import inspect
import io
import re
from datetime import timedelta
from pathlib import Path

import lightning
import pytest
import rich
import torch
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import Profiler
from lit_modules import LitAutoencoder
from small_federations import sections

import pl_fed
from pl_fed.callbacks import LastCheckpoint
from pl_fed.clients import Ditto, FedAvg
from pl_fed.clients.client_rounds import ClientRounds
from pl_fed.clients.host import FederationModule
from pl_fed.command.main import main
from pl_fed.data import Digits, FederatedData
from pl_fed.lightning.checkpoints import AtomicCheckpointIO
from pl_fed.lightning.compatibility import CALLBACKS, HOOKS, METHODS, REQUIRED_HOOKS
from pl_fed.loggers import RunCSV
from pl_fed.models import MLP
from pl_fed.partitioners import IID, Shards
from pl_fed.samplers import Sampler, Uniform

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*infer the batch indices"),
]
QUIET = {"enable_progress_bar": False, "enable_model_summary": False}
SGD = functools.partial(torch.optim.SGD, lr=0.1)


@functools.cache
def digits(data_class=FederatedData, partitioner=None, **options):
    """Six clients, which are evaluated two at a time."""
    settings = {"num_clients": 6, "clients_per_eval_batch": 2, "seed": 0, **options}
    return data_class(Digits(), partitioner or Shards(3), **settings)


class OnlyOne(Sampler):
    """Takes the same client in every round."""

    def size_of_cohort(self, num_clients):
        return 1

    def sample(self, num_clients, sizes, generator):
        return torch.tensor([4])


def client_of(kind=Ditto, **options):
    torch.manual_seed(0)
    return kind(MLP(64, [8], 10), **{"optimizer": SGD, "local_steps": 2, **options})


def make(folder, federation=None, **arguments):
    """Make a trainer of three rounds, with cohorts of three that are trained one at a time."""
    options = {"sampler": Uniform(3), "chunk_size": 1, "seed": 0, **(federation or {})}
    return pl_fed.Trainer(
        pl_fed.Federation(**sections(**options)),
        run_dir=folder / "run",
        **{"accelerator": "cpu", "max_epochs": 3, **QUIET, **arguments},
    )


def fit(folder, client=None, data=None, federation=None, **arguments):
    trainer = make(folder, federation, **arguments)
    trainer.fit(client or client_of(), data or digits())
    return trainer


def rows(folder):
    with (folder / "run" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def column(folder, name):
    return [float(row[name]) for row in rows(folder) if row.get(name)]


# The rounds


class Recorder(Callback):
    """Notes every hook that is called, in order."""

    def __init__(self):
        self.seen = []
        for name in hooks_of(Callback):
            setattr(self, name, functools.partial(self._note, name))

    def _note(self, name, *args, **kwargs):
        self.seen.append(name)
        return {"noted": 1} if name == "state_dict" else None


def hooks_of(parent):
    names = [name for name, member in vars(parent).items() if inspect.isfunction(member)]
    return [name for name in names if not name.startswith("_") and name not in HOOKS]


VALIDATION = [
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
]
TRAINING = [
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
]
END = ["on_train_epoch_end", "state_dict", "on_save_checkpoint"]


def test_the_hooks_of_a_callback(tmp_path):
    recorder = Recorder()
    fit(
        tmp_path,
        callbacks=[recorder, LastCheckpoint(share=1)],
        max_epochs=2,
        check_val_every_n_epoch=2,
        limit_val_batches=1,
    )
    assert recorder.seen == [
        "setup",
        "on_fit_start",
        *("on_sanity_check_start", *VALIDATION, "on_sanity_check_end"),
        "on_train_start",
        *(*TRAINING, *END),
        *(*TRAINING, *VALIDATION, *END),
        "on_train_end",
        "on_fit_end",
        "teardown",
    ]


def test_the_hooks_of_a_resumed_run(tmp_path):
    fit(tmp_path, callbacks=[Recorder(), LastCheckpoint(share=1)], max_epochs=1)
    recorder = Recorder()
    keep = [recorder, LastCheckpoint(share=1)]
    trainer = make(tmp_path, callbacks=keep, max_epochs=2, limit_val_batches=0)
    trainer.fit(client_of(), digits(), ckpt_path="last")
    assert recorder.seen == [
        *("setup", "on_load_checkpoint", "load_state_dict", "on_fit_start", "on_train_start"),
        *(*TRAINING, *END),
        *("on_train_end", "on_fit_end", "teardown"),
    ]


def test_the_hooks_of_a_client(tmp_path):
    """They come after those of the callbacks, which see what they log."""
    seen = []

    class Noting(Ditto):
        pass

    def note(name, self, *args, **kwargs):
        seen.append(name)
        return getattr(Ditto, name)(self, *args, **kwargs)

    for name in [*TRAINING, *VALIDATION, "on_train_start", "on_train_epoch_end", "on_train_end"]:
        setattr(Noting, name, functools.partialmethod(functools.partial(note, name)))
    fit(tmp_path, client_of(Noting), max_epochs=1, num_sanity_val_steps=0, limit_val_batches=1)
    expected = ["on_train_start", *TRAINING, *VALIDATION, "on_train_epoch_end", "on_train_end"]
    assert seen == expected


def test_a_round_calls_no_empty_hooks(tmp_path):
    """A round calls the hooks that a callback, or the client, overrides: also on the instance."""
    called = []

    class Profiling(Profiler):
        def start(self, action_name):
            called.append(action_name)

        def stop(self, action_name):
            pass

    one, other, client = Callback(), Callback(), client_of()
    one.on_train_batch_start = lambda *_: None
    client.on_train_epoch_start = lambda: None
    options = {"limit_val_batches": 0, "enable_checkpointing": False, "max_epochs": 1}
    fit(tmp_path, client, callbacks=[one, other], profiler=Profiling(), **options)
    hooks = (*TRAINING, "on_train_epoch_end")
    assert [action for action in called if action.endswith(hooks)] == [
        "[LightningModule]Ditto.on_train_epoch_start",
        "[Callback]Callback.on_train_batch_start",
        "[Callback]RoundMetrics.on_train_batch_end",
        "[Callback]EngineReport.on_train_batch_end",
    ]


def test_an_exception_is_told_to_callbacks(tmp_path):
    recorder = Recorder()

    def fail(*_):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fit(tmp_path, callbacks=[recorder, LambdaCallback(on_train_batch_start=fail)])
    assert recorder.seen[-2:] == ["on_train_batch_start", "on_exception"]


def test_what_the_hooks_are_given(tmp_path):
    """A round is a batch, the ids of the cohort; the server's step is the optimizer's."""
    given = []

    class Given(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            given.append((trainer.current_epoch, trainer.global_step, batch_idx))

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            (row,) = optimizer.param_groups[0]["params"]
            self.expected = row.detach() - 0.5 * row.grad

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert torch.equal(batch, trainer.federation.draw_cohort(trainer.current_epoch))
            assert torch.equal(pl_module.row("global").data, self.expected)
            assert outputs["loss"] == outputs["train/loss"]
            given.append((trainer.global_step, batch_idx, trainer.num_training_batches))
            assert trainer.is_last_batch

    halved = {"server_optimizer": functools.partial(torch.optim.SGD, lr=0.5)}
    fit(tmp_path, callbacks=[Given()], federation=halved, max_epochs=2)
    assert given == [(0, 0, 0), (1, 2, 3), (1, 1, 0), (2, 2, 3)]


def test_a_round_has_one_row_with_the_names_of_the_design(tmp_path):
    fit(tmp_path, max_epochs=2)
    assert [row["round"] for row in rows(tmp_path)] == ["0", "1"]
    numbers = "accuracy accuracy_std accuracy_var accuracy_worst10 accuracy_best10 accuracy_jain"
    numbers += " accuracy_weighted loss loss_var class_std_mean class_std_std"
    models = ("global", "personal", "hybrid")
    evaluated = {f"val/{model}/{name}" for model in models for name in numbers.split()}
    counts = ("cohort", "byzantine", "forged", "clipped", "dropped", "rejected")
    trained = {f"train/{n}" for n in (*counts, "loss", "update_norm", "benign_distance")}
    for row in rows(tmp_path):
        assert set(row) == {"round", "time/round"} | trained | evaluated
        assert all(row.values())


def test_log_every_n_steps_counts_rounds(tmp_path):
    """It says when rows are written, of all rounds: tests/test_logging.py."""
    fit(tmp_path, max_epochs=6, log_every_n_steps=3, check_val_every_n_epoch=2)
    logged = {row["round"]: (row["train/loss"], row["val/global/loss"]) for row in rows(tmp_path)}
    assert {round: [bool(v) for v in values] for round, values in logged.items()} == {
        "0": [True, False],
        "1": [True, True],
        "2": [True, False],
        "3": [True, True],
        "4": [True, False],
        "5": [True, True],
    }


def test_log_every_n_steps_0_logs_no_training(tmp_path):
    fit(tmp_path, log_every_n_steps=0)
    assert not column(tmp_path, "train/loss")
    assert len(column(tmp_path, "val/global/loss")) == 3


def test_a_round_is_not_left_out(tmp_path):
    class Skips(FedAvg):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

    with pytest.raises(ValueError, match="Expected `on_train_batch_start` not to return -1"):
        fit(tmp_path, client_of(Skips))


def test_a_log_in_training_step_is_refused(tmp_path):
    class Logs(FedAvg):
        def training_step(self, batch, batch_idx):
            self.log("mine", 1.0)

    with pytest.raises(ValueError, match="Expected `training_step` to return the values to log"):
        fit(tmp_path, client_of(Logs))


# How long


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "rounds"),
    [
        ({"max_epochs": 2}, 2),
        ({"max_epochs": None, "max_steps": 2}, 2),
        ({"max_epochs": -1, "max_steps": 2}, 2),
        ({"max_epochs": 4, "max_steps": 2}, 2),
        ({"max_epochs": 2, "max_steps": 4}, 2),
        ({"max_epochs": 0}, 0),
    ],
)
def test_max_epochs_and_max_steps_count_rounds(tmp_path, arguments, rounds):
    trainer = fit(tmp_path, **arguments)
    assert trainer.global_step == trainer.current_epoch == rounds
    assert rounds == 0 or len(column(tmp_path, "train/loss")) == rounds
    assert trainer.estimated_stepping_batches == rounds


def test_max_time(tmp_path, monkeypatch):
    """Ten seconds a round: the limit is reached in the third, which is brought to its end."""
    trainer = make(tmp_path, max_epochs=None, max_time={"seconds": 25})
    monkeypatch.setattr(Timer, "time_elapsed", lambda self, *_: 10.0 * trainer.global_step)
    trainer.fit(client_of(), digits())
    assert len(column(tmp_path, "val/global/loss")) == trainer.current_epoch == 3


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_timer(tmp_path, monkeypatch, interval):
    timer = Timer(timedelta(seconds=15), interval=interval)
    trainer = make(tmp_path, max_epochs=9, min_epochs=4, callbacks=timer)
    elapsed = functools.partial(lambda *_: 10.0 * trainer.global_step)
    monkeypatch.setattr(Timer, "time_elapsed", elapsed)
    trainer.fit(client_of(), digits())
    assert trainer.current_epoch == 4, "min_epochs is honoured too"


@pytest.mark.slow
def test_timer_by_the_command_line(tmp_path):
    """Its default is an enum, which the saved config must hold all the same."""
    config = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
    timer = ["--trainer.callbacks+=Timer", "--trainer.callbacks.duration=00:01:00:00"]
    short = ["--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
    here = ["--trainer.default_root_dir", str(tmp_path)]
    main(["fit", "--config", str(config), *timer, *short, *here])
    (saved,) = tmp_path.glob("*/config.yaml")
    assert "interval: step" in saved.read_text()
    main(["fit", "--config", str(saved)])
    assert len(list(tmp_path.glob("*/per_client.csv"))) == 2


def says(*values):
    """Log the metric ``mine``: one value for each round that is validated."""
    left = list(values)
    return LambdaCallback(
        on_validation_epoch_end=lambda trainer, pl_module: (
            None if trainer.sanity_checking else pl_module.log("mine", left.pop(0))
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "rounds"),
    [
        ({}, 4),
        ({"min_epochs": 5}, 5),
        ({"min_steps": 5}, 5),
        ({"check_val_every_n_epoch": 2}, 8),
        ({"check_val_every_n_epoch": None, "val_check_interval": 1}, 4),
    ],
)
def test_early_stopping(tmp_path, arguments, rounds):
    """The best value comes second, and two are waited for."""
    watch = [says(1.0, 3.0, 2.0, 2.0, 2.0, 2.0), EarlyStopping("mine", patience=2, mode="max")]
    trainer = fit(tmp_path, max_epochs=9, callbacks=watch, **arguments)
    assert trainer.current_epoch == trainer.global_step == rounds


# Checkpoints


def names(folder):
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "arguments", "kept"),
    [
        ({"save_top_k": 1}, {}, [5]),
        ({"save_top_k": -1}, {}, [0, 1, 2, 3, 4, 5]),
        ({"save_top_k": -1, "every_n_epochs": 2}, {}, [1, 3, 5]),
        ({"save_top_k": -1, "every_n_train_steps": 4}, {}, [3]),
        ({"save_top_k": -1, "train_time_interval": timedelta(0)}, {}, [0, 1, 2, 3, 4, 5]),
        ({"save_top_k": -1}, {"check_val_every_n_epoch": 3}, [2, 5]),
        ({"save_top_k": -1, "save_on_train_epoch_end": True}, {"limit_val_batches": 0}, range(6)),
        ({"save_top_k": 2, "monitor": "mine"}, {}, [0, 4]),
        ({"save_top_k": 1, "monitor": "mine", "mode": "max"}, {}, [2]),
        ({"save_top_k": 2, "monitor": "mine"}, {"check_val_every_n_epoch": 2}, [1, 3]),
        ({"save_top_k": 1, "monitor": "round", "mode": "max"}, {}, [5]),
    ],
)
def test_model_checkpoint(tmp_path, how, arguments, kept):
    saver = ModelCheckpoint(filename="{epoch}", **how)
    fit(tmp_path, max_epochs=6, callbacks=[says(1.0, 2, 6, 5, 0, 4), saver], **arguments)
    assert names(tmp_path) == [f"epoch={epoch}.ckpt" for epoch in kept]


def test_the_last_checkpoint_is_there_by_default(tmp_path):
    seen = []

    def look(trainer, *_):
        seen.append(torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["epoch"])

    look_twice = LambdaCallback(on_train_batch_start=look, on_fit_end=look)
    client = client_of()
    with pytest.raises(FileNotFoundError):
        fit(tmp_path, callbacks=look_twice)
    look_twice.on_train_batch_start = lambda *_: None
    trainer = fit(tmp_path, client, callbacks=look_twice, check_val_every_n_epoch=9)
    assert seen[0] in (2, 3), "in or after the last round"
    assert names(tmp_path) == ["last.ckpt"]
    assert isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO)
    assert make(tmp_path, enable_checkpointing=False).checkpoint_callback is None
    untrained = client_of()
    trainer.test(untrained, digits(), ckpt_path="last", verbose=False)
    assert torch.equal(untrained.row("global").data, client.row("global").data)


def test_the_last_checkpoint_takes_a_share_of_the_time(tmp_path, monkeypatch):
    """A round takes a second, saving two: with a fifth of the time, they are ten apart."""
    now, saves = [0.0], []
    monkeypatch.setattr("pl_fed.callbacks.last_checkpoint.time.monotonic", lambda: now[0])
    trainer = make(
        tmp_path,
        callbacks=[
            LastCheckpoint(share=0.2),
            LambdaCallback(on_train_batch_end=lambda *_: tick(1)),
        ],
        max_epochs=18,
        limit_val_batches=0,
    )

    def tick(seconds):
        now[0] += seconds

    def save(*_):
        saves.append(trainer.global_step)
        tick(2)

    monkeypatch.setattr(trainer, "save_checkpoint", save)
    trainer.fit(client_of(), digits())
    assert saves == [1, 9, 17, 18]


def test_the_share_is_checked():
    for share, expected in (
        (0.0, "above 0, and finite, but got 0.0"),
        (1.5, "at most 1 but got 1.5"),
    ):
        with pytest.raises(ValueError, match=f"^Expected argument `share` to be {expected}"):
            LastCheckpoint(share)


def test_the_best_checkpoint_is_tested(tmp_path):
    saver = ModelCheckpoint(monitor="mine", filename="{epoch}")
    client = client_of()
    trainer = make(tmp_path, callbacks=[says(3.0, 1.0, 2.0), saver])
    trainer.fit(client, digits())
    trainer.test(client, digits(), ckpt_path="best", verbose=False)
    assert rows(tmp_path)[-1]["round"] == "2", "the best was saved after two rounds"
    again = make(tmp_path / "other")
    again.test(client_of(), digits(), ckpt_path=saver.best_model_path, verbose=False)
    assert {**rows(tmp_path / "other")[-1]}.items() <= rows(tmp_path)[-1].items()


# Progress bars and summaries


def shown(output):
    """Return what a TQDM bar of the training showed: (epoch, done, total, the rest)."""
    found = re.findall(r"Epoch (\d+):.*?(\d+)/(\d+) \[(.*?)\]", output)
    return [(int(epoch), int(n), int(total), rest) for epoch, n, total, rest in found]


@pytest.fixture
def every_move(monkeypatch):
    """Let the progress bar move with every client."""
    monkeypatch.setattr("pl_fed.lightning.loop._BAR_SECONDS", 0.0)


@pytest.mark.usefixtures("every_move")
@pytest.mark.parametrize("rounds", [{"max_epochs": 2}, {"max_epochs": None, "max_steps": 2}])
def test_tqdm_shows_rounds_clients_and_accuracy(tmp_path, capsys, rounds):
    bar = TQDMProgressBar()
    fit(tmp_path, callbacks=[bar], **{**rounds, "enable_progress_bar": True})
    out = capsys.readouterr().out
    seen = shown(out)
    steps = dict.fromkeys(each[:3] for each in seen)
    assert list(steps) == [(epoch, n, 3) for epoch in range(2) for n in range(4)]
    assert re.search(r"train/loss=[\d.]+", seen[-1][-1])
    for model in ("global", "personal"):
        (accuracy,) = column(tmp_path, f"val/{model}/accuracy")[-1:]
        assert f"val/{model}/accuracy={accuracy:.3g}" in seen[-1][-1]
    assert re.search(r"Validation DataLoader 0:.*?3/3", out)


@pytest.fixture
def console():
    """Give rich's console back to the others: the progress bar takes it over."""
    screen = io.StringIO()
    yield {"file": screen, "width": 300}
    rich.reconfigure()


@pytest.mark.usefixtures("every_move")
def test_rich_shows_rounds_clients_and_accuracy(tmp_path, console):
    seen = []

    class Recording(RichProgressBar):
        def _update(self, progress_bar_id, *args, **kwargs):
            super()._update(progress_bar_id, *args, **kwargs)
            if progress_bar_id == self.train_progress_bar_id:
                task = self.train_progress_bar
                seen.append((task.description.strip(), task.completed, task.total))

    bar = Recording(leave=True, console_kwargs=console)
    fit(tmp_path, callbacks=[bar], max_epochs=2, enable_progress_bar=True)
    expected = [(f"Epoch {epoch}/1", n, 3) for epoch in range(2) for n in (1, 2, 3)]
    assert list(dict.fromkeys(seen)) == expected
    lines = [line for line in console["file"].getvalue().splitlines() if line.startswith("Epoch")]
    assert len(lines) == 2
    for line, accuracy in zip(lines, column(tmp_path, "val/personal/accuracy")):
        assert " 3/3 " in line
        assert f"val/personal/accuracy: {accuracy:.3f}" in line


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_a_bar_of_a_round_that_is_taken_up_again(tmp_path, capsys, console, bar):
    """The round's training is in the checkpoint, its validation is still to come."""

    def fail(*_):
        raise KeyError

    save = ModelCheckpoint(every_n_train_steps=1, save_last=True)
    both = [save, LambdaCallback(on_validation_start=fail)]
    with pytest.raises(KeyError):
        fit(tmp_path, callbacks=both, num_sanity_val_steps=0)
    trainer = make(tmp_path, callbacks=[bar()], max_epochs=2, enable_progress_bar=True)
    trainer.fit(client_of(), digits(), ckpt_path="last")
    assert "3/3" in capsys.readouterr().out + console["file"].getvalue()
    assert len(column(tmp_path, "val/global/loss")) == trainer.current_epoch == 2


@pytest.mark.parametrize(("seconds", "moves"), [(0.0, [1, 2, 3] * 2), (1e9, [1, 3, 3])])
def test_a_bar_of_ones_own(tmp_path, monkeypatch, seconds, moves):
    """As in Lightning's documentation: it need not have more than the hooks."""
    monkeypatch.setattr("pl_fed.lightning.loop._BAR_SECONDS", seconds)
    seen = []

    class Bar(ProgressBar):
        def disable(self):
            self.enable = False

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            seen.append((batch_idx + 1, self.total_train_batches))

    fit(tmp_path, callbacks=[Bar()], max_epochs=2, enable_progress_bar=True)
    assert seen == [(move, 3) for move in moves]


@pytest.mark.parametrize("summary", [ModelSummary, RichModelSummary])
def test_model_summary(tmp_path, capfd, caplog, summary):
    with caplog.at_level("INFO"):
        fit(tmp_path, max_epochs=1, callbacks=summary(max_depth=1), enable_model_summary=True)
    text = capfd.readouterr().out + caplog.text
    assert "global_model" in text
    assert "1.2 K" in text, "610 parameters, twice"


# The local steps


class Watched(Ditto):
    """Ditto that notes what its local steps see, and how far they move the models."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dtypes, self.batches, self.moves = set(), [], {}
        with torch.no_grad():
            for parameter in self.personal_model.parameters():
                parameter.mul_(2)

    def training_step(self, batch, batch_idx):
        self.batches.append(batch.targets.tolist() if batch.mask is None else [])
        self.dtypes |= {self.global_model(batch.inputs).dtype, torch.zeros(1).dtype}
        return super().training_step(batch, batch_idx)

    def on_train_epoch_start(self):
        self.began = {name: self.row(name).data.clone() for name in self.trained}

    def end_round(self, client):
        """Note the moves in a client's first round."""
        ends = {name: client.models[name].parameters for name in self.began}
        self.moves = {name: ends[name] - began for name, began in self.began.items()}
        return super().end_round(client)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({}, 4),
        ({"limit_train_batches": 3}, 3),
        ({"limit_train_batches": 9}, 4),
        ({"limit_train_batches": 0.5}, 2),
        ({"limit_train_batches": 0.1}, 1),
        ({"overfit_batches": 2}, 2),
        ({"fast_dev_run": True}, 1),
        ({"fast_dev_run": 3}, 3),
        ({"limit_train_batches": 0}, 0),
    ],
)
def test_limits_of_the_local_steps(tmp_path, limits, steps):
    client = client_of(Watched, local_steps=4)
    fit(tmp_path, client, federation={"engine": "one_by_one"}, max_epochs=1, **limits)
    assert len(client.batches) == 3 * steps


@pytest.mark.parametrize(("overfit", "same"), [(0.0, False), (2, True), (1.0, True)])
def test_overfit_batches_takes_the_same_batches_in_each_round(tmp_path, overfit, same):
    client = client_of(Watched)
    only = {"sampler": OnlyOne(), "engine": "one_by_one"}  # "auto" looks at the first ones, too
    fit(tmp_path, client, federation=only, overfit_batches=overfit)
    rounds = [client.batches[begin : begin + 2] for begin in (0, 2, 4)]
    assert (rounds[0] == rounds[1] == rounds[2]) is same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "dtypes"),
    [
        ("32-true", {torch.float32}),
        ("64-true", {torch.float64}),
        ("bf16-mixed", {torch.bfloat16, torch.float32}),
    ],
)
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_precision_of_the_local_steps(tmp_path, precision, dtypes, engine):
    client = client_of(Watched)
    trainer = fit(tmp_path, client, precision=precision, federation={"engine": engine})
    assert client.dtypes == dtypes
    row = torch.float64 if precision == "64-true" else torch.float32
    assert client.row("global").data.dtype == row
    assert trainer.federation.store.read("personal", torch.tensor([0])).dtype == row


def moved(folder, engine, **arguments):
    client = client_of(Watched, optimizer=functools.partial(torch.optim.SGD, lr=1.0), local_steps=1)
    everyone = {"sampler": Uniform(6), "engine": engine, "chunk_size": 6}
    fit(folder, client, federation=everyone, max_epochs=1, **arguments)
    return client.moves


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_clipping_is_by_client_and_by_model(tmp_path, engine):
    """One step with learning rate 1 moves a model by its gradient."""
    free = moved(tmp_path / "free", engine)
    norms = torch.stack([move.norm(dim=1) for move in free.values()])
    limit = float(norms.median())
    clipped = moved(tmp_path / "norm", engine, gradient_clip_val=limit)
    for model, move in free.items():
        expected = move * (limit / move.norm(dim=1, keepdim=True)).clamp(max=1.0)
        torch.testing.assert_close(clipped[model], expected)
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    clipped = moved(tmp_path / "value", engine, **by_value)
    for model, move in free.items():
        torch.testing.assert_close(clipped[model], move.clamp(-0.01, 0.01))
        assert (move.abs() > 0.01).any()
    for none in (0, -1.0):
        same = moved(tmp_path / str(none), engine, gradient_clip_val=none)
        assert all(torch.equal(same[model], move) for model, move in free.items())


@pytest.mark.filterwarnings("ignore:Error detected in MulBackward0")
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_detect_anomaly(tmp_path, engine):
    class Broken(FedAvg):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss + (0 * loss).sqrt()

    with pytest.raises(RuntimeError, match="returned nan values"):
        fit(tmp_path, client_of(Broken), federation={"engine": engine}, detect_anomaly=True)


# Learning rates


SCHEDULES = {
    "cosine": (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 2), [1.0, 0.5, 0.0, 0.5]),
    "warmup": (lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.25, 1.0, 3), [0.25, 0.5, 0.75, 1]),
    "sequence": (
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.ConstantLR(o, 0.5, 9),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.1),
            ],
            milestones=[2],
        ),
        [0.5, 0.5, 1.0, 0.1],
    ),
    "plateau": (lambda o: ReduceLROnPlateau(o, "mine", patience=0), [1.0, 1.0, 0.1, 0.1]),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_a_schedule_steps_once_a_round_for_each_model(tmp_path, name, engine):
    schedule, factors = SCHEDULES[name]
    client = client_of(Watched, lr_scheduler=schedule, personal_lr=0.3, local_steps=1)
    moves = {"global": [], "personal": []}

    def note(trainer, pl_module, *_):
        for model, move in pl_module.moves.items():
            moves[model].append(float(move.norm()))

    watch = [
        says(2.0, 3.0, 1.0, 1.0),
        LearningRateMonitor(),
        LambdaCallback(on_train_batch_end=note),
    ]
    where = {"engine": engine, "sampler": OnlyOne()}
    fit(tmp_path, client, federation=where, max_epochs=4, callbacks=watch)
    for model, base in (("global", 0.1), ("personal", 0.3)):
        logged = column(tmp_path, f"lr-SGD/{model}")
        assert logged == pytest.approx([base * factor for factor in factors])
    assert [move > 0 for move in moves["global"]] == [factor > 0 for factor in factors]


def test_a_schedule_that_watches_validation_waits_for_it(tmp_path):
    """It steps after each validation, and not in the rounds between."""
    client = client_of(
        lr_scheduler=lambda o: ReduceLROnPlateau(o, "val/global/loss", threshold=0.9, patience=0)
    )
    watch = LearningRateMonitor()
    fit(tmp_path, client, max_epochs=7, check_val_every_n_epoch=2, callbacks=watch)
    assert column(tmp_path, "lr-SGD/global") == pytest.approx(
        [0.1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.001]
    )


def test_a_schedule_by_step_is_one_by_round(tmp_path):
    class Stepwise(FedAvg):
        def configure_optimizers(self):
            configured = super().configure_optimizers()
            configured["lr_scheduler"]["interval"] = "step"
            return configured

    halves = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    client = client_of(Stepwise, lr_scheduler=halves)
    fit(tmp_path, client, callbacks=LearningRateMonitor())
    assert column(tmp_path, "lr-SGD/global") == pytest.approx([0.1, 0.05, 0.025])


# Evaluation


@pytest.mark.parametrize(("limit", "clients"), [(1, 2), (2, 4), (9, 6), (0.34, 2), (0, 0)])
def test_limit_val_batches_counts_batches_of_clients(tmp_path, limit, clients):
    trainer = fit(tmp_path, limit_val_batches=limit, max_epochs=1)
    samples = trainer.federation.metrics("val")["global"].per_client()["samples"]
    assert (samples > 0).tolist() == [k < clients for k in range(6)]
    assert bool(column(tmp_path, "val/global/accuracy")) is (clients > 0)


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_limits_of_testing_and_predicting(tmp_path, stage):
    trainer = make(tmp_path, **{f"limit_{stage}_batches": 2})
    seen = LambdaCallback(**{f"on_{stage}_batch_end": lambda *args: batches.append(args[3])})
    batches = []
    trainer.callbacks.append(seen)
    getattr(trainer, stage)(client_of(), datamodule=digits())
    assert torch.cat(batches).tolist() == [0, 1, 2, 3]


def test_too_small_a_share_of_validation_is_refused_before_training(tmp_path):
    few = {"limit_val_batches": 0.1, "num_sanity_val_steps": 0, "check_val_every_n_epoch": 3}
    with pytest.raises(Exception, match=r"0.1 \* 3 < 1. Please increase"):
        fit(tmp_path, **few)
    assert rows(tmp_path) == [] if (tmp_path / "run/metrics.csv").exists() else True


def ends_with(folder, **arguments):
    client = client_of()
    trainer = fit(folder, client, **arguments)
    kept = [{k: v for k, v in row.items() if k != "time/round"} for row in rows(folder)]
    personal = trainer.federation.store.read("personal", torch.arange(6))
    return client.state_dict(), personal, kept


def test_a_sanity_check_changes_nothing(tmp_path):
    weights, personal, kept = ends_with(tmp_path / "none", num_sanity_val_steps=0)
    for steps in (2, -1):
        checked = ends_with(tmp_path / str(steps), num_sanity_val_steps=steps)
        assert all(torch.equal(weights[name], each) for name, each in checked[0].items())
        assert torch.equal(personal, checked[1])
        assert kept == checked[2]


def test_check_val_every_n_epoch(tmp_path):
    fit(tmp_path, max_epochs=5, check_val_every_n_epoch=2)
    assert [bool(row["val/global/loss"]) for row in rows(tmp_path)] == [False, True] * 2 + [False]


def test_fast_dev_run(tmp_path):
    seen = Recorder()
    trainer = fit(tmp_path, fast_dev_run=True, max_epochs=9, callbacks=[seen])
    assert trainer.global_step == 1
    assert seen.seen.count("on_validation_batch_end") == 1
    assert not list((tmp_path / "run").iterdir()), "nothing is written"


def test_inference_mode(tmp_path):
    inferred = make(tmp_path / "a").validate(client_of(), digits(), verbose=False)
    assert make(tmp_path / "b", inference_mode=False).validate(
        client_of(), datamodule=digits(), verbose=False
    ) == (inferred)


# Loggers, profilers, and other company


def test_other_loggers_beside_metrics_csv(tmp_path):
    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "tb")]
    fit(tmp_path, logger=loggers)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(loggers[1].log_dir).Reload()
    with (Path(loggers[0].log_dir) / "metrics.csv").open(newline="") as file:
        other = list(csv.DictReader(file))
    for name in ("train/loss", "val/personal/accuracy", "time/round"):
        values = column(tmp_path, name)
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == [0, 1, 2]
        assert [scalar.value for scalar in scalars] == pytest.approx(values)
        assert [float(row[name]) for row in other if row[name]] == pytest.approx(values)


@pytest.mark.slow
@pytest.mark.parametrize("logger", [None, False, True, []])
def test_metrics_csv_is_always_written(tmp_path, logger):
    trainer = fit(tmp_path, logger=logger, max_epochs=1)
    assert [type(each) for each in trainer.loggers] == [RunCSV]
    assert len(rows(tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule")
@pytest.mark.parametrize(
    ("profiler", "rounds"), [("simple", 6), ("advanced", 6), ("pytorch", 1), ("pytorch", 6)]
)
def test_profilers_see_the_rounds(tmp_path, profiler, rounds, capfd, caplog):
    with caplog.at_level("INFO"):
        how = {"max_epochs": rounds, "check_val_every_n_epoch": 9}
        fit(tmp_path, profiler=profiler, enable_checkpointing=False, **how)
    assert "run_federated_round" in capfd.readouterr().out + caplog.text


@pytest.mark.parametrize(
    ("averaging", "weights"),
    [
        (WeightAveraging, [1 / 3, 1 / 3, 1 / 3]),
        (functools.partial(EMAWeightAveraging, decay=0.5), [0.25, 0.25, 0.5]),
    ],
)
def test_weight_averaging_averages_the_models_of_the_rounds(tmp_path, averaging, weights):
    client, ended, validated = client_of(), [], []

    def keep(where):
        return lambda trainer, pl_module, *_: where.append(pl_module.row("global").data.clone())

    watch = LambdaCallback(on_train_batch_end=keep(ended), on_validation_batch_end=keep(validated))
    fit(tmp_path, client, callbacks=[watch, averaging()], num_sanity_val_steps=0)
    expected = sum(weight * row for weight, row in zip(weights, ended, strict=True))
    torch.testing.assert_close(client.row("global").data, expected)
    torch.testing.assert_close(validated[-1], expected)


def test_device_stats_monitor(tmp_path, monkeypatch):
    """Without psutil Lightning refuses it before training; here the numbers are made up."""
    module = "lightning.pytorch.callbacks.device_stats_monitor._PSUTIL_AVAILABLE"
    monkeypatch.setattr(module, True)
    stats = lambda self, device: {"cpu": 7.0}  # noqa: E731
    monkeypatch.setattr("lightning.pytorch.accelerators.CPUAccelerator.get_device_stats", stats)
    fit(tmp_path, callbacks=DeviceStatsMonitor())
    assert len(rows(tmp_path)) == 3
    for moment in ("on_train_batch_start", "on_train_batch_end", "on_validation_batch_end"):
        assert column(tmp_path, f"DeviceStatsMonitor.{moment}/cpu") == [7.0] * 3


def test_prediction_writer(tmp_path):
    written = {}

    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer, module, prediction, indices, batch, *_):
            written.update({table["client"]: len(table["prediction"]) for table in prediction})

        def write_on_epoch_end(self, trainer, module, predictions, indices):
            written["batches"] = len(predictions)

    make(tmp_path, callbacks=Writer("batch_and_epoch")).predict(client_of(), digits())
    sizes = digits().clients.test.sizes.tolist()
    assert written == {**dict(enumerate(sizes)), "batches": 3}


# All of it: a new argument, hook or callback of Lightning's fails here until someone decides


HONOURED = {
    "callbacks": "test_the_hooks_of_a_callback",
    "check_val_every_n_epoch": "test_check_val_every_n_epoch",
    "default_root_dir": "test_a_run_has_a_folder_of_its_own",
    "detect_anomaly": "test_detect_anomaly",
    "enable_checkpointing": "test_the_last_checkpoint_is_there_by_default",
    "enable_model_summary": "test_model_summary",
    "enable_progress_bar": "test_tqdm_shows_rounds_clients_and_accuracy",
    "fast_dev_run": "test_fast_dev_run",
    "gradient_clip_algorithm": "test_clipping_is_by_client_and_by_model",
    "gradient_clip_val": "test_clipping_is_by_client_and_by_model",
    "inference_mode": "test_inference_mode",
    "limit_predict_batches": "test_limits_of_testing_and_predicting",
    "limit_test_batches": "test_limits_of_testing_and_predicting",
    "limit_train_batches": "test_limits_of_the_local_steps",
    "limit_val_batches": "test_limit_val_batches_counts_batches_of_clients",
    "log_every_n_steps": "test_log_every_n_steps_counts_rounds",
    "logger": "test_other_loggers_beside_metrics_csv",
    "max_epochs": "test_max_epochs_and_max_steps_count_rounds",
    "max_steps": "test_max_epochs_and_max_steps_count_rounds",
    "max_time": "test_max_time",
    "min_epochs": "test_early_stopping",
    "min_steps": "test_early_stopping",
    "num_sanity_val_steps": "test_a_sanity_check_changes_nothing",
    "overfit_batches": "test_overfit_batches_takes_the_same_batches_in_each_round",
    "plugins": "test_a_checkpoint_io_of_ones_own",
    "precision": "test_precision_of_the_local_steps",
    "profiler": "test_profilers_see_the_rounds",
}
REFUSED = {
    "accumulate_grad_batches": 2,
    "barebones": True,
    "precision": "bf16-true",
    "reload_dataloaders_every_n_epochs": 1,
    "strategy": "ddp_spawn",
    "val_check_interval": 0.5,
}
ELSEWHERE = {"devices", "num_nodes"}  # in test_processes.py
PASSED = {
    "accelerator": "cpu",
    "benchmark": True,
    "deterministic": True,
    "enable_autolog_hparams": False,
    "model_registry": "mine",
    "sync_batchnorm": True,
    "use_distributed_sampler": False,
}


def test_every_argument_of_the_trainer_is_decided_on():
    arguments = set(inspect.signature(lightning.Trainer.__init__).parameters) - {"self"}
    assert arguments == set(HONOURED) | set(REFUSED) | set(PASSED) | ELSEWHERE
    assert [name for name in HONOURED.values() if name not in globals()] == []


@pytest.mark.parametrize(
    ("name", "value"), [*REFUSED.items(), ("val_check_interval", "00:00:00:01")]
)
def test_an_argument_is_refused_before_anything_is_done(tmp_path, name, value):
    quiet = dict.fromkeys(QUIET) if name == "barebones" else {}
    with Untouched() as (data, seen), pytest.raises(ValueError, match=f"^Expected .*{name}"):
        fit(tmp_path, data=data, callbacks=[seen], **{name: value, **quiet})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), PASSED.items())
def test_an_argument_that_is_passed_on_changes_no_number(tmp_path, name, value):
    usual, passed = ends_with(tmp_path / "a"), ends_with(tmp_path / "b", **{name: value})
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    assert all(torch.equal(usual[0][key], each) for key, each in passed[0].items())
    assert usual[2] == passed[2]


class Untouched:
    """Data that is not loaded, and a callback whose hooks are not called."""

    def __enter__(self):
        self.data = FederatedData(Digits(), IID(), num_clients=6)
        self.seen = Recorder()
        return self.data, self.seen

    def __exit__(self, *_):
        assert self.data._clients is None
        assert self.seen.seen == []


MADE = {
    "BackboneFinetuning": lambda: callbacks.BackboneFinetuning(),
    "BaseFinetuning": lambda: type("Mine", (callbacks.BaseFinetuning,), {})(),
    "BatchSizeFinder": lambda: callbacks.BatchSizeFinder(),
    "GradientAccumulationScheduler": lambda: callbacks.GradientAccumulationScheduler({0: 1}),
    "LearningRateFinder": lambda: callbacks.LearningRateFinder(),
    "ModelPruning": lambda: callbacks.ModelPruning("l1_unstructured"),
    "SpikeDetection": lambda: callbacks.SpikeDetection(),
    "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.1),
    "ThroughputMonitor": lambda: callbacks.ThroughputMonitor(len),
}
WELCOME = {
    "BasePredictionWriter": "test_prediction_writer",
    "Callback": "test_the_hooks_of_a_callback",
    "Checkpoint": "test_model_checkpoint",
    "DeviceStatsMonitor": "test_device_stats_monitor",
    "EMAWeightAveraging": "test_weight_averaging_averages_the_models_of_the_rounds",
    "EarlyStopping": "test_early_stopping",
    "LambdaCallback": "test_an_exception_is_told_to_callbacks",
    "LearningRateMonitor": "test_a_schedule_steps_once_a_round_for_each_model",
    "ModelCheckpoint": "test_model_checkpoint",
    "ModelSummary": "test_model_summary",
    "OnExceptionCheckpoint": "tests/test_resume.py",
    "ProgressBar": "test_a_bar_of_ones_own",
    "RichModelSummary": "test_model_summary",
    "RichProgressBar": "test_rich_shows_rounds_clients_and_accuracy",
    "TQDMProgressBar": "test_tqdm_shows_rounds_clients_and_accuracy",
    "Timer": "test_timer",
    "WeightAveraging": "test_weight_averaging_averages_the_models_of_the_rounds",
}


def test_every_callback_of_lightning_is_decided_on():
    assert set(callbacks.__all__) == set(MADE) | set(WELCOME)
    shown = [name for name in WELCOME.values() if not name.endswith(".py")]
    assert [name for name in shown if name not in globals()] == []
    for refused in CALLBACKS:
        assert refused.__name__ in MADE


@pytest.mark.parametrize("name", MADE)
def test_a_callback_is_refused_before_anything_is_done(tmp_path, name):
    refused = MADE[name]()
    expected = f"^Expected trainer argument `callbacks` without {type(refused).__name__} but got"
    with Untouched() as (data, seen), pytest.raises(ValueError, match=expected):
        fit(tmp_path, data=data, callbacks=[seen, refused])


def test_the_callbacks_of_a_client_are_looked_at_too(tmp_path):
    class Finds(FedAvg):
        def configure_callbacks(self):
            assert self.trainer.max_epochs == 3
            return callbacks.BatchSizeFinder()

    with pytest.raises(ValueError, match="without BatchSizeFinder but got one"):
        fit(tmp_path, client_of(Finds))


def test_last_ckpt_that_would_come_too_late_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^Expected ModelCheckpoint with `save_last` to have"):
        fit(tmp_path, callbacks=ModelCheckpoint(save_last=True, save_top_k=0))
    linked = ModelCheckpoint(save_last="link", save_on_exception=True)
    with pytest.raises(
        ValueError, match=r"^Expected `save_last` of ModelCheckpoint to be true with"
    ):
        fit(tmp_path, callbacks=linked)


def test_checkpoints_go_to_local_folders(tmp_path):
    saver = ModelCheckpoint(tmp_path)
    saver.dirpath = "s3://bucket/run"  # as it is where fsspec knows the place
    with pytest.raises(ValueError, match="Expected ModelCheckpoint with a local folder as `dirpa"):
        fit(tmp_path, callbacks=saver)


PLATEAU = functools.partial(ReduceLROnPlateau, monitor="val/personal/los")


@pytest.mark.parametrize(
    ("watching", "client", "limit", "words"),
    [
        (EarlyStopping("val/accuracy"), {}, 1.0, "Expected EarlyStopping with .* val/personal/acc"),
        (ModelCheckpoint(monitor="val_loss"), {}, 1.0, "as val/.*/loss.* but got val_loss"),
        (
            ModelCheckpoint(monitor="val/global/loss"),
            {},
            0,
            "as train/loss .* but got val/global/lo",
        ),
        ([], {"lr_scheduler": PLATEAU}, 1.0, "ReduceLROnPlateau .* val/personal/loss.* got val/pe"),
        (
            [],
            {"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
            1.0,
            "`lr_scheduler` to have a monitored metric .* lightning.pytorch.cli.ReduceLROnPlateau",
        ),
    ],
)
def test_what_nobody_logs_is_not_waited_for(tmp_path, watching, client, limit, words):
    with pytest.raises(ValueError, match=words):
        fit(tmp_path, client_of(**client), callbacks=watching, limit_val_batches=limit)
    assert not (tmp_path / "run" / "metrics.csv").exists(), "no round was run"


def test_who_watches_may_ask_for_what_is_logged_or_not_be_strict(tmp_path):
    names = ["val/hybrid/accuracy_worst10", "train/loss", "round", "epoch"]
    watching = [
        ModelCheckpoint(monitor=name, filename=f"{place}") for place, name in enumerate(names)
    ]
    lenient = EarlyStopping("val/accuracy", strict=False)
    assert fit(tmp_path, callbacks=[*watching, lenient]).global_step == 3


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_would_never_be_called_is_refused(tmp_path, hook):
    expected = f"^Expected argument `callbacks` without the hook `{hook}` but got it in Lambda"
    with Untouched() as (data, seen), pytest.raises(ValueError, match=expected):
        fit(tmp_path, data=data, callbacks=[seen, LambdaCallback(**{hook: lambda *_: None})])


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_would_never_be_called_is_refused(tmp_path, method):
    mine = type("Mine", (FedAvg,), {method: lambda self, *args, **kwargs: None})
    expected = f"^Expected argument `model` without the hook `{method}` but got it in Mine"
    with Untouched() as (data, seen), pytest.raises(ValueError, match=expected):
        fit(tmp_path, client_of(mine), data=data, callbacks=[seen])


@pytest.mark.parametrize("hook", REQUIRED_HOOKS)
def test_a_hook_that_clients_need_calls_theirs(tmp_path, hook):
    assert any(hook in vars(kind) for kind in (ClientRounds, FederationModule))
    mixin = type("Mixin", (), {hook: lambda self, *args: None})
    mine = type("Mine", (mixin, FedAvg), {})
    expected = rf"^Expected `{hook}` of Mixin to call super\(\).{hook}\(...\), because it sets"
    with Untouched() as (data, seen), pytest.raises(ValueError, match=expected):
        fit(tmp_path, client_of(mine), data=data, callbacks=[seen])


def test_a_client_adds_to_the_hooks_it_needs(tmp_path):
    class Mine(FedAvg):
        def on_validation_epoch_end(self):
            super().on_validation_epoch_end()
            self.log("val/mine", 1.0)

    trainer = fit(tmp_path, client_of(Mine))
    assert {"val/mine", "val/global/accuracy"} <= set(trainer.callback_metrics)


def test_what_is_no_client_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"^Expected argument `model` to be a pl_fed.clients.Cl"):
        fit(tmp_path, lightning.LightningModule())
    with pytest.raises(TypeError, match=r"to an algorithm, as in pl_fed.clients.FedAvg\(Lit"):
        fit(tmp_path, LitAutoencoder())
    by_hand = client_of(FedAvg)
    by_hand.automatic_optimization = False
    with pytest.raises(ValueError, match=r"^Expected argument `model` to have automatic_optimiza"):
        fit(tmp_path, by_hand)


def test_what_is_no_federated_data_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"^Expected argument `datamodule` to be a pl_fed.data.Fed"):
        make(tmp_path).fit(client_of())

    class Transfers(FederatedData):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    with pytest.raises(ValueError, match=r"^Expected argument `datamodule` without the hook"):
        fit(tmp_path, data=digits(Transfers))


def test_a_run_has_a_folder_of_its_own(tmp_path):
    federation = pl_fed.Federation(Uniform(3), seed=0)
    make_one = functools.partial(
        pl_fed.Trainer, federation, default_root_dir=tmp_path, accelerator="cpu", **QUIET
    )
    one, other = make_one(max_epochs=1), make_one(max_epochs=2)
    assert one.run_dir.parent == other.run_dir.parent == tmp_path
    assert one.run_dir != other.run_dir
    one.fit(client_of(), digits())
    again = make_one(run_dir="last", max_epochs=2)
    assert again.run_dir == one.run_dir == Path(again.log_dir)


def test_a_checkpoint_io_of_ones_own(tmp_path):
    class Counting(AtomicCheckpointIO):
        saved = 0

        def save_checkpoint(self, *args, **kwargs):
            self.saved += 1
            super().save_checkpoint(*args, **kwargs)

    mine = Counting()
    fit(tmp_path, plugins=mine, callbacks=LastCheckpoint(share=1))
    assert mine.saved == 3


# metrics.csv


def text(folder):
    return (folder / "metrics.csv").read_text()


def test_a_row_grows(tmp_path):
    logger = RunCSV(tmp_path)
    logger.log_metrics({"a": 1.0, "epoch": 0}, step=0)
    logger.log_metrics({"b": 0.25}, step=0)
    assert text(tmp_path) == "round,a,b\n0,1,0.25\n"
    logger.log_metrics({"a": 1000.0}, step=1)
    logger.log_metrics({"a": 2.0}, step=1)
    assert text(tmp_path) == "round,a,b\n0,1,0.25\n1,2,\n", "nothing is left of the longer row"
    logger.log_metrics({"b": 3.0, "round": 5.0}, step=2)
    assert text(tmp_path).endswith("1,2,\n5,,3\n"), "the metric `round` says which"


def test_rows_are_taken_up_again(tmp_path):
    RunCSV(tmp_path).log_metrics({"a": 1.0}, step=0)
    RunCSV(tmp_path).log_metrics({"b": 2.0}, step=0)
    RunCSV(tmp_path).log_metrics({"a": 3.0}, step=1)
    assert text(tmp_path) == "round,a,b\n0,1,2\n1,3,\n"


def test_rows_that_are_kept(tmp_path):
    (tmp_path / "metrics.csv").write_text("round,a\n0,1\n1,2\n2,3\n3,")
    logger = RunCSV(tmp_path)
    logger.keep(2)
    assert text(tmp_path) == "round,a\n0,1\n1,2\n"
    logger.log_metrics({"b": 7.0}, step=1)
    assert text(tmp_path) == "round,a,b\n0,1,\n1,2,7\n"
    logger.keep(0)
    assert text(tmp_path) == "round\n"
