"""Features of Lightning's Trainer: pl_fed honours each, or refuses it before training."""

import csv
import functools
import inspect
import io
import re
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import rich
import torch
from exhaustive import exhaustive_for
from further_cases import mark_if
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
from pl_fed.lightning.compatibility import (
    CALLBACKS,
    HOOKS,
    METHODS,
    REQUIRED_HOOKS,
    warn_of_opposite_modes,
)
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
    """Return data of six clients, evaluated two at a time."""
    settings = {"num_clients": 6, "clients_per_eval_batch": 2, "seed": 0, **options}
    return data_class(Digits(), partitioner or Shards(3), **settings)


class SingleClient(Sampler):
    """Takes the same client in every round."""

    def size_of_cohort(self, num_clients):
        return 1

    def sample(self, num_clients, sizes, generator):
        return torch.tensor([4])


def make_client(kind=Ditto, **options):
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
    trainer.fit(client or make_client(), data or digits())
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


@pytest.mark.slow
def test_callback_hooks_are_called_in_order(tmp_path):
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


@pytest.mark.slow
def test_hooks_of_a_resumed_run_are_called_in_order(tmp_path):
    fit(tmp_path, callbacks=[Recorder(), LastCheckpoint(share=1)], max_epochs=1)
    recorder = Recorder()
    keep = [recorder, LastCheckpoint(share=1)]
    trainer = make(tmp_path, callbacks=keep, max_epochs=2, limit_val_batches=0)
    trainer.fit(make_client(), digits(), ckpt_path="last")
    assert recorder.seen == [
        *("setup", "on_load_checkpoint", "load_state_dict", "on_fit_start", "on_train_start"),
        *(*TRAINING, *END),
        *("on_train_end", "on_fit_end", "teardown"),
    ]


@pytest.mark.slow
def test_hooks_of_a_client_are_called_in_order(tmp_path):
    """The client's hooks run in Lightning's order."""
    seen = []

    class RecordingClient(Ditto):
        pass

    def record(name, self, *args, **kwargs):
        seen.append(name)
        return getattr(Ditto, name)(self, *args, **kwargs)

    for name in [*TRAINING, *VALIDATION, "on_train_start", "on_train_epoch_end", "on_train_end"]:
        setattr(RecordingClient, name, functools.partialmethod(functools.partial(record, name)))
    fit(
        tmp_path,
        make_client(RecordingClient),
        max_epochs=1,
        num_sanity_val_steps=0,
        limit_val_batches=1,
    )
    expected = ["on_train_start", *TRAINING, *VALIDATION, "on_train_epoch_end", "on_train_end"]
    assert seen == expected


@pytest.mark.slow
def test_round_calls_no_empty_hooks(tmp_path):
    """A round calls the hooks that a callback, or the client, overrides: also on the instance."""
    called = []

    class Profiling(Profiler):
        def start(self, action_name):
            called.append(action_name)

        def stop(self, action_name):
            pass

    overriding, plain, client = Callback(), Callback(), make_client()
    overriding.on_train_batch_start = lambda *_: None
    client.on_train_epoch_start = lambda: None
    options = {"limit_val_batches": 0, "enable_checkpointing": False, "max_epochs": 1}
    fit(tmp_path, client, callbacks=[overriding, plain], profiler=Profiling(), **options)
    hooks = (*TRAINING, "on_train_epoch_end")
    assert [action for action in called if action.endswith(hooks)] == [
        "[LightningModule]Ditto.on_train_epoch_start",
        "[Callback]Callback.on_train_batch_start",
        "[Callback]RoundMetrics.on_train_batch_end",
        "[Callback]EngineReport.on_train_batch_end",
    ]


def test_exception_calls_on_exception(tmp_path):
    recorder = Recorder()

    def fail(*_):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fit(tmp_path, callbacks=[recorder, LambdaCallback(on_train_batch_start=fail)])
    assert recorder.seen[-2:] == ["on_train_batch_start", "on_exception"]


@pytest.mark.slow
def test_training_hooks_get_cohort_step_and_outputs(tmp_path):
    """The batch of a round holds the ids of the cohort. The optimizer step is the server's."""
    observed = []

    class HookArguments(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            observed.append((trainer.current_epoch, trainer.global_step, batch_idx))

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            (row,) = optimizer.param_groups[0]["params"]
            self.expected = row.detach() - 0.5 * row.grad

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            rounds = trainer.federation.session.rounds
            assert torch.equal(batch, rounds.draw_cohort(trainer.current_epoch))
            assert torch.equal(pl_module.row("global").data, self.expected)
            assert outputs["loss"] == outputs["train/loss"]
            observed.append((trainer.global_step, batch_idx, trainer.num_training_batches))
            assert trainer.is_last_batch

    halved = {"server_optimizer": functools.partial(torch.optim.SGD, lr=0.5)}
    fit(tmp_path, callbacks=[HookArguments()], federation=halved, max_epochs=2)
    assert observed == [(0, 0, 0), (1, 2, 3), (1, 1, 0), (2, 2, 3)]


@pytest.mark.slow
def test_round_writes_one_row_with_all_metrics(tmp_path):
    fit(tmp_path, max_epochs=2)
    assert [row["round"] for row in rows(tmp_path)] == ["0", "1"]
    numbers = "accuracy accuracy_std accuracy_var accuracy_worst10 accuracy_best10 accuracy_jain"
    numbers += " accuracy_weighted loss loss_var class_std_mean class_std_std"
    numbers += " accuracy_trained accuracy_trained_std accuracy_trained_worst10"
    numbers += " loss_trained loss_trained_std loss_trained_worst10"  # a client never takes part
    models = ("global", "personal", "hybrid")
    evaluated = {f"val/{model}/{name}" for model in models for name in numbers.split()}
    evaluated.add("val/untrained_clients")
    counts = ("cohort", "byzantine", "forged", "clipped", "dropped", "rejected")
    counts += ("upload_bytes", "download_bytes")
    trained = {f"train/{n}" for n in (*counts, "loss", "update_norm", "benign_distance")}
    for row in rows(tmp_path):
        assert set(row) == {"round", "time/round", "bytes/up", "bytes/down"} | trained | evaluated
        assert all(row.values())


@pytest.mark.slow
def test_log_every_n_steps_counts_rounds(tmp_path):
    """The option delays writing. All rounds are written: see tests/test_logging.py."""
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


@pytest.mark.slow
def test_log_every_n_steps_0_logs_no_training(tmp_path):
    fit(tmp_path, log_every_n_steps=0)
    assert not column(tmp_path, "train/loss")
    assert len(column(tmp_path, "val/global/loss")) == 3


@pytest.mark.slow
def test_skipping_a_round_is_refused(tmp_path):
    class Skips(FedAvg):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

    with pytest.raises(ValueError, match="Expected `on_train_batch_start` not to return -1"):
        fit(tmp_path, make_client(Skips))


def test_log_in_training_step_is_refused(tmp_path):
    class Logs(FedAvg):
        def training_step(self, batch, batch_idx):
            self.log("mine", 1.0)

    with pytest.raises(ValueError, match="Expected `training_step` to return the values to log"):
        fit(tmp_path, make_client(Logs))


@pytest.mark.slow
def test_exhausted_iterators_do_not_end_loops(tmp_path):
    """Lightning takes StopIteration for the end of the data, and goes on without a word."""
    values, samples = iter([1.0, 2.0]), iter(range(1))

    class Reads(FedAvg):
        def end_round(self, client):
            next(values)
            return super().end_round(client)

    class Counts(Callback):
        def on_test_batch_end(self, *_):
            next(samples)

    trainer = make(tmp_path, {"engine": "one_by_one"}, callbacks=[Counts()], max_epochs=1)
    client = make_client(Reads)
    with pytest.raises(RuntimeError, match=r"StopIteration.*next\(values\)\): begin") as raised:
        trainer.fit(client, digits())
    assert "round 0" in "".join(raised.value.__notes__)
    with pytest.raises(RuntimeError, match=r"StopIteration.* \(.*next\(samples\)\): begin"):
        trainer.test(client, digits(), verbose=False)


# Length of a run


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


@pytest.mark.slow
def test_max_time_ends_the_run_after_a_round(tmp_path, monkeypatch):
    """A round takes ten seconds. The limit falls into the third round, which ends normally."""
    trainer = make(tmp_path, max_epochs=None, max_time={"seconds": 25})
    monkeypatch.setattr(Timer, "time_elapsed", lambda self, *_: 10.0 * trainer.global_step)
    trainer.fit(make_client(), digits())
    assert len(column(tmp_path, "val/global/loss")) == trainer.current_epoch == 3


@pytest.mark.slow
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_timer(tmp_path, monkeypatch, interval):
    timer = Timer(timedelta(seconds=15), interval=interval)
    trainer = make(tmp_path, max_epochs=9, min_epochs=4, callbacks=timer)
    elapsed = functools.partial(lambda *_: 10.0 * trainer.global_step)
    monkeypatch.setattr(Timer, "time_elapsed", elapsed)
    trainer.fit(make_client(), digits())
    assert trainer.current_epoch == 4, "min_epochs is honoured too"


@pytest.mark.slow
def test_timer_from_the_command_line(tmp_path):
    """The timer's default interval is an enum. The saved config holds it as a string."""
    config = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
    timer = ["--trainer.callbacks+=Timer", "--trainer.callbacks.duration=00:01:00:00"]
    one_round = ["--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
    folder = ["--trainer.default_root_dir", str(tmp_path)]
    main(["fit", "--config", str(config), *timer, *one_round, *folder])
    (saved,) = tmp_path.glob("*/config.yaml")
    assert "interval: step" in saved.read_text()
    main(["fit", "--config", str(saved)])
    assert len(list(tmp_path.glob("*/per_client.csv"))) == 2


def log_values(*values):
    """Log the metric ``mine``: one value for each round that is validated."""
    remaining = list(values)
    return LambdaCallback(
        on_validation_epoch_end=lambda trainer, pl_module: (
            None if trainer.sanity_checking else pl_module.log("mine", remaining.pop(0))
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
    """The second value is the best, and the patience is two validations."""
    watch = [
        log_values(1.0, 3.0, 2.0, 2.0, 2.0, 2.0),
        EarlyStopping("mine", patience=2, mode="max"),
    ]
    trainer = fit(tmp_path, max_epochs=9, callbacks=watch, **arguments)
    assert trainer.current_epoch == trainer.global_step == rounds


# Checkpoints


def names(folder):
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


@pytest.mark.slow
@exhaustive_for("options[1258]-*")
@pytest.mark.parametrize(
    ("options", "arguments", "epochs"),
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
def test_model_checkpoint(tmp_path, options, arguments, epochs):
    saver = ModelCheckpoint(filename="{epoch}", **options)
    fit(tmp_path, max_epochs=6, callbacks=[log_values(1.0, 2, 6, 5, 0, 4), saver], **arguments)
    assert names(tmp_path) == [f"epoch={epoch}.ckpt" for epoch in epochs]


@pytest.mark.slow
def test_last_checkpoint_is_saved_by_default(tmp_path):
    epochs = []

    def read_epoch(trainer, *_):
        epochs.append(
            torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["epoch"]
        )

    reader = LambdaCallback(on_train_batch_start=read_epoch, on_fit_end=read_epoch)
    client = make_client()
    with pytest.raises(FileNotFoundError):
        fit(tmp_path, callbacks=reader)
    reader.on_train_batch_start = lambda *_: None
    trainer = fit(tmp_path, client, callbacks=reader, check_val_every_n_epoch=9)
    assert epochs[0] in (2, 3), "in or after the last round"
    assert names(tmp_path) == ["last.ckpt"]
    assert isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO)
    assert make(tmp_path, enable_checkpointing=False).checkpoint_callback is None
    untrained = make_client()
    trainer.test(untrained, digits(), ckpt_path="last", verbose=False)
    assert torch.equal(untrained.row("global").data, client.row("global").data)


@pytest.mark.slow
def test_last_checkpoint_takes_a_share_of_the_run_time(tmp_path, monkeypatch):
    """A round takes one second and saving two. A share of a fifth saves every ten seconds."""
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
    trainer.fit(make_client(), digits())
    assert saves == [1, 9, 17, 18]


def test_invalid_share_is_refused():
    for share, expected in (
        (0.0, "above 0, and finite, but got 0.0"),
        (1.5, "at most 1 but got 1.5"),
    ):
        with pytest.raises(ValueError, match=f"^Expected argument `share` to be {expected}"):
            LastCheckpoint(share)


@pytest.mark.slow
def test_best_checkpoint_is_tested(tmp_path):
    saver = ModelCheckpoint(monitor="mine", filename="{epoch}")
    client = make_client()
    trainer = make(tmp_path, callbacks=[log_values(3.0, 1.0, 2.0), saver])
    trainer.fit(client, digits())
    trainer.test(client, digits(), ckpt_path="best", verbose=False)
    assert rows(tmp_path)[-1]["round"] == "2", "the best was saved after two rounds"
    again = make(tmp_path / "other")
    again.test(make_client(), digits(), ckpt_path=saver.best_model_path, verbose=False)
    assert {**rows(tmp_path / "other")[-1]}.items() <= rows(tmp_path)[-1].items()


@pytest.mark.slow
def test_final_models_are_tested_beside_a_checkpoint_of_a_requeue_signal(tmp_path, monkeypatch):
    """Lightning loads it in a job of SLURM, and would test the models of an earlier round."""
    client = make_client()
    trainer = fit(tmp_path, client, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "run" / "hpc_ckpt_1.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(client, digits(), ckpt_path="last")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    before = [value.clone() for value in client.state_dict().values()]
    trainer.test(client, digits(), verbose=False)
    assert rows(tmp_path)[-1]["round"] == "2"
    assert all(map(torch.equal, before, client.state_dict().values()))


# Progress bars and summaries


def parse_bar(output):
    """Return the states of a TQDM bar of the training: (epoch, done, total, postfix)."""
    matches = re.findall(r"Epoch (\d+):.*?(\d+)/(\d+) \[(.*?)\]", output)
    return [(int(epoch), int(n), int(total), postfix) for epoch, n, total, postfix in matches]


@pytest.fixture
def unthrottled_bar(monkeypatch):
    """Let the progress bar move with every client."""
    monkeypatch.setattr("pl_fed.lightning.loop._BAR_SECONDS", 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("unthrottled_bar")
@pytest.mark.parametrize("rounds", [{"max_epochs": 2}, {"max_epochs": None, "max_steps": 2}])
def test_tqdm_shows_rounds_clients_and_accuracy(tmp_path, capsys, rounds):
    bar = TQDMProgressBar()
    fit(tmp_path, callbacks=[bar], **{**rounds, "enable_progress_bar": True})
    out = capsys.readouterr().out
    seen = parse_bar(out)
    steps = dict.fromkeys(values[:3] for values in seen)
    assert list(steps) == [(epoch, n, 3) for epoch in range(2) for n in range(4)]
    assert re.search(r"train/loss=[\d.]+", seen[-1][-1])
    for model in ("global", "personal"):
        (accuracy,) = column(tmp_path, f"val/{model}/accuracy")[-1:]
        assert f"val/{model}/accuracy={accuracy:.3g}" in seen[-1][-1]
    assert re.search(r"Validation DataLoader 0:.*?3/3", out)


@pytest.fixture
def console():
    """Restore rich's console after the test: the progress bar replaces it."""
    screen = io.StringIO()
    yield {"file": screen, "width": 300}
    rich.reconfigure()


@pytest.mark.slow
@pytest.mark.usefixtures("unthrottled_bar")
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


@pytest.mark.slow
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_bar_of_a_resumed_round_is_complete(tmp_path, capsys, console, bar):
    """The checkpoint holds the round's training, without its validation."""

    def fail(*_):
        raise KeyError

    save = ModelCheckpoint(every_n_train_steps=1, save_last=True)
    failing = [save, LambdaCallback(on_validation_start=fail)]
    with pytest.raises(KeyError):
        fit(tmp_path, callbacks=failing, num_sanity_val_steps=0)
    trainer = make(tmp_path, callbacks=[bar()], max_epochs=2, enable_progress_bar=True)
    trainer.fit(make_client(), digits(), ckpt_path="last")
    assert "3/3" in capsys.readouterr().out + console["file"].getvalue()
    assert len(column(tmp_path, "val/global/loss")) == trainer.current_epoch == 2


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "moves"), [(0.0, [1, 2, 3] * 2), (1e9, [1, 3, 3])])
def test_user_progress_bar_gets_the_batches(tmp_path, monkeypatch, seconds, moves):
    """A bar as in Lightning's documentation needs only the hooks."""
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


@pytest.mark.slow
@pytest.mark.parametrize("summary", [ModelSummary, RichModelSummary])
def test_model_summary(tmp_path, capfd, caplog, summary):
    with caplog.at_level("INFO"):
        fit(tmp_path, max_epochs=1, callbacks=summary(max_depth=1), enable_model_summary=True)
    text = capfd.readouterr().out + caplog.text
    assert "global_model" in text
    assert "1.2 K" in text, "610 parameters, twice"


# The local steps


class Watched(Ditto):
    """Ditto that records the dtypes and batches of its local steps, and the model updates."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dtypes, self.batches, self.moves = set(), [], {}
        with torch.no_grad():
            for parameter in self.personal_model.parameters():
                parameter.mul_(2)

    def training_step(self, batch, batch_idx):
        is_stacked = torch._C._functorch.is_batchedtensor(batch.targets)
        self.batches.append([] if is_stacked or batch.mask is not None else batch.targets.tolist())
        self.dtypes |= {self.global_model(batch.inputs).dtype, torch.zeros(1).dtype}
        return super().training_step(batch, batch_idx)

    def on_train_epoch_start(self):
        self.began = {name: self.row(name).data.clone() for name in self.trained}

    def end_round(self, client):
        """Record the updates of a client's first round."""
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
    client = make_client(Watched, local_steps=4)
    fit(tmp_path, client, federation={"engine": "one_by_one"}, max_epochs=1, **limits)
    assert len(client.batches) == 3 * steps


@pytest.mark.slow
def test_gradients_accumulate_over_minibatches(tmp_path):
    """Two minibatches of four samples make up a step on eight, also in a resumed run."""
    accumulates = {"data": digits(batch_size=4), "accumulate_grad_batches": 2}
    steps = {"kind": FedAvg, "local_steps": 6}
    for engine in ("one_by_one", "stacked"):
        run, federation = tmp_path / engine, {"engine": engine}
        expected, client = make_client(FedAvg, local_steps=3), make_client(**steps)
        fit(run / "large", expected, digits(batch_size=8), federation=federation)
        trainer = fit(run / "a", client, federation=federation, **accumulates)
        assert trainer.global_step == 3
        rows = [each.row("global").data for each in (expected, client)]
        torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=1e-6)
        fit(run / "b", make_client(**steps), federation=federation, max_epochs=1, **accumulates)
        resumed = make_client(**steps)
        last = run / "b" / "run" / "checkpoints" / "last.ckpt"
        trainer = make(run / "c", federation, accumulate_grad_batches=2)
        trainer.fit(resumed, accumulates["data"], ckpt_path=last)
        assert torch.equal(resumed.row("global").data, client.row("global").data)


@pytest.mark.slow
@pytest.mark.parametrize(("overfit", "same"), [(0.0, False), (2, True), (1.0, True)])
def test_overfit_batches_takes_the_same_batches_in_each_round(tmp_path, overfit, same):
    client = make_client(Watched)
    only = {
        "sampler": SingleClient(),
        "engine": "one_by_one",
    }  # "auto" reads the first batches, too
    fit(tmp_path, client, federation=only, overfit_batches=overfit)
    rounds = [client.batches[begin : begin + 2] for begin in (0, 2, 4)]
    assert (rounds[0] == rounds[1] == rounds[2]) is same


@pytest.mark.slow
@exhaustive_for("stacked-32-true-*", "stacked-bf16-mixed-*")
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
    client = make_client(Watched)
    trainer = fit(tmp_path, client, precision=precision, federation={"engine": engine})
    assert client.dtypes == dtypes
    row = torch.float64 if precision == "64-true" else torch.float32
    assert client.row("global").data.dtype == row
    assert trainer.federation.store.read("personal", torch.tensor([0])).dtype == row


def client_moves(folder, engine, **arguments):
    client = make_client(
        Watched, optimizer=functools.partial(torch.optim.SGD, lr=1.0), local_steps=1
    )
    all_clients = {"sampler": Uniform(6), "engine": engine, "chunk_size": 6}
    fit(folder, client, federation=all_clients, max_epochs=1, **arguments)
    return client.moves


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_gradients_are_clipped_by_client_and_by_model(tmp_path, engine):
    """One step with learning rate 1 moves a model by its gradient."""
    free = client_moves(tmp_path / "free", engine)
    norms = torch.stack([move.norm(dim=1) for move in free.values()])
    limit = float(norms.median())
    clipped = client_moves(tmp_path / "norm", engine, gradient_clip_val=limit)
    for model, move in free.items():
        expected = move * (limit / move.norm(dim=1, keepdim=True)).clamp(max=1.0)
        torch.testing.assert_close(clipped[model], expected)
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    clipped = client_moves(tmp_path / "value", engine, **by_value)
    for model, move in free.items():
        torch.testing.assert_close(clipped[model], move.clamp(-0.01, 0.01))
        assert (move.abs() > 0.01).any()
    for off in (0, -1.0):
        same = client_moves(tmp_path / str(off), engine, gradient_clip_val=off)
        assert all(torch.equal(same[model], move) for model, move in free.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Error detected in MulBackward0")
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_detect_anomaly_raises_at_nan_gradients(tmp_path, engine):
    class Broken(FedAvg):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss + (0 * loss).sqrt()

    with pytest.raises(RuntimeError, match="returned nan values"):
        fit(tmp_path, make_client(Broken), federation={"engine": engine}, detect_anomaly=True)


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
@exhaustive_for("one_by_one-warmup", "one_by_one-plateau", "stacked-cosine", "stacked-sequence")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_schedule_steps_once_a_round_for_each_model(tmp_path, name, engine):
    schedule, factors = SCHEDULES[name]
    client = make_client(Watched, lr_scheduler=schedule, personal_lr=0.3, local_steps=1)
    moves = {"global": [], "personal": []}

    def record_moves(trainer, pl_module, *_):
        for model, move in pl_module.moves.items():
            moves[model].append(float(move.norm()))

    watch = [
        log_values(2.0, 3.0, 1.0, 1.0),
        LearningRateMonitor(),
        LambdaCallback(on_train_batch_end=record_moves),
    ]
    federation = {"engine": engine, "sampler": SingleClient()}
    fit(tmp_path, client, federation=federation, max_epochs=4, callbacks=watch)
    for model, base in (("global", 0.1), ("personal", 0.3)):
        logged = column(tmp_path, f"lr-SGD/{model}")
        assert logged == pytest.approx([base * factor for factor in factors])
    assert [move > 0 for move in moves["global"]] == [factor > 0 for factor in factors]


@pytest.mark.slow
def test_plateau_schedule_steps_after_each_validation(tmp_path):
    """The schedule does not step in rounds without a validation."""
    client = make_client(
        lr_scheduler=lambda o: ReduceLROnPlateau(o, "val/global/loss", threshold=0.9, patience=0)
    )
    watch = LearningRateMonitor()
    fit(tmp_path, client, max_epochs=7, check_val_every_n_epoch=2, callbacks=watch)
    assert column(tmp_path, "lr-SGD/global") == pytest.approx(
        [0.1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.001]
    )


@pytest.mark.slow
def test_schedule_with_interval_step_steps_once_a_round(tmp_path):
    class Stepwise(FedAvg):
        def configure_optimizers(self):
            configured = super().configure_optimizers()
            configured["lr_scheduler"]["interval"] = "step"
            return configured

    halves = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    client = make_client(Stepwise, lr_scheduler=halves)
    fit(tmp_path, client, callbacks=LearningRateMonitor())
    assert column(tmp_path, "lr-SGD/global") == pytest.approx([0.1, 0.05, 0.025])


# Evaluation


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "clients"), [(1, 2), (2, 4), (9, 6), (0.34, 2), (0, 0)])
def test_limit_val_batches_counts_batches_of_clients(tmp_path, limit, clients):
    trainer = fit(tmp_path, limit_val_batches=limit, max_epochs=1)
    samples = trainer.federation.metrics("val")["global"].per_client()["samples"]
    assert (samples > 0).tolist() == [k < clients for k in range(6)]
    assert bool(column(tmp_path, "val/global/accuracy")) is (clients > 0)


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_limit_test_and_predict_batches_count_batches_of_clients(tmp_path, stage):
    trainer = make(tmp_path, **{f"limit_{stage}_batches": 2})
    seen = LambdaCallback(**{f"on_{stage}_batch_end": lambda *args: batches.append(args[3])})
    batches = []
    trainer.callbacks.append(seen)
    getattr(trainer, stage)(make_client(), datamodule=digits())
    assert torch.cat(batches).tolist() == [0, 1, 2, 3]


def test_too_small_limit_val_batches_is_refused_before_training(tmp_path):
    few = {"limit_val_batches": 0.1, "num_sanity_val_steps": 0, "check_val_every_n_epoch": 3}
    with pytest.raises(Exception, match=r"0.1 \* 3 < 1. Please increase"):
        fit(tmp_path, **few)
    assert rows(tmp_path) == [] if (tmp_path / "run/metrics.csv").exists() else True


def fit_results(folder, **arguments):
    client = make_client()
    trainer = fit(folder, client, **arguments)
    metrics = [{k: v for k, v in row.items() if k != "time/round"} for row in rows(folder)]
    personal = trainer.federation.store.read("personal", torch.arange(6))
    return client.state_dict(), personal, metrics


@pytest.mark.slow
def test_sanity_check_changes_no_result(tmp_path):
    weights, personal, metrics = fit_results(tmp_path / "none", num_sanity_val_steps=0)
    for steps in (2, -1):
        checked = fit_results(tmp_path / str(steps), num_sanity_val_steps=steps)
        assert all(torch.equal(weights[name], tensor) for name, tensor in checked[0].items())
        assert torch.equal(personal, checked[1])
        assert metrics == checked[2]


@pytest.mark.slow
def test_check_val_every_n_epoch(tmp_path):
    fit(tmp_path, max_epochs=5, check_val_every_n_epoch=2)
    assert [bool(row["val/global/loss"]) for row in rows(tmp_path)] == [False, True] * 2 + [False]


def test_fast_dev_run(tmp_path):
    recorder = Recorder()
    trainer = fit(tmp_path, fast_dev_run=True, max_epochs=9, callbacks=[recorder])
    assert trainer.global_step == 1
    assert recorder.seen.count("on_validation_batch_end") == 1
    assert not list((tmp_path / "run").iterdir()), "nothing is written"


def test_inference_mode_changes_no_result(tmp_path):
    expected = make(tmp_path / "a").validate(make_client(), digits(), verbose=False)
    assert make(tmp_path / "b", inference_mode=False).validate(
        make_client(), datamodule=digits(), verbose=False
    ) == (expected)


# Loggers, profilers and other callbacks


@pytest.mark.slow
def test_other_loggers_get_the_numbers_of_metrics_csv(tmp_path):
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
    assert [type(logger) for logger in trainer.loggers] == [RunCSV]
    assert len(rows(tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule")
@exhaustive_for("pytorch-6")
@pytest.mark.parametrize(
    ("profiler", "rounds"), [("simple", 6), ("advanced", 6), ("pytorch", 1), ("pytorch", 6)]
)
def test_profilers_see_the_rounds(tmp_path, profiler, rounds, capfd, caplog):
    with caplog.at_level("INFO"):
        options = {"max_epochs": rounds, "check_val_every_n_epoch": 9}
        fit(tmp_path, profiler=profiler, enable_checkpointing=False, **options)
    assert "run_federated_round" in capfd.readouterr().out + caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("averaging", "weights"),
    [
        (WeightAveraging, [1 / 3, 1 / 3, 1 / 3]),
        (functools.partial(EMAWeightAveraging, decay=0.5), [0.25, 0.25, 0.5]),
    ],
)
def test_weight_averaging_averages_the_models_of_the_rounds(tmp_path, averaging, weights):
    client, ended, validated = make_client(), [], []

    def copy_row_to(rows):
        return lambda trainer, pl_module, *_: rows.append(pl_module.row("global").data.clone())

    watch = LambdaCallback(
        on_train_batch_end=copy_row_to(ended), on_validation_batch_end=copy_row_to(validated)
    )
    fit(tmp_path, client, callbacks=[watch, averaging()], num_sanity_val_steps=0)
    expected = sum(weight * row for weight, row in zip(weights, ended, strict=True))
    torch.testing.assert_close(client.row("global").data, expected)
    torch.testing.assert_close(validated[-1], expected)


@pytest.mark.slow
def test_device_stats_monitor(tmp_path, monkeypatch):
    """Fixed numbers replace those of psutil. Without psutil Lightning refuses the callback."""
    module = "lightning.pytorch.callbacks.device_stats_monitor._PSUTIL_AVAILABLE"
    monkeypatch.setattr(module, True)
    stats = lambda self, device: {"cpu": 7.0}  # noqa: E731
    monkeypatch.setattr("lightning.pytorch.accelerators.CPUAccelerator.get_device_stats", stats)
    fit(tmp_path, callbacks=DeviceStatsMonitor())
    assert len(rows(tmp_path)) == 3
    for moment in ("on_train_batch_start", "on_train_batch_end", "on_validation_batch_end"):
        assert column(tmp_path, f"DeviceStatsMonitor.{moment}/cpu") == [7.0] * 3


def test_prediction_writer_gets_every_client(tmp_path):
    written = {}

    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer, module, prediction, indices, batch, *_):
            written.update({table["client"]: len(table["prediction"]) for table in prediction})

        def write_on_epoch_end(self, trainer, module, predictions, indices):
            written["batches"] = len(predictions)

    make(tmp_path, callbacks=Writer("batch_and_epoch")).predict(make_client(), digits())
    sizes = digits().clients.test.sizes.tolist()
    assert written == {**dict(enumerate(sizes)), "batches": 3}


# Completeness: these tests fail for each new argument, hook or callback of Lightning


HONOURED = {
    "accumulate_grad_batches": "test_gradients_accumulate_over_minibatches",
    "callbacks": "test_callback_hooks_are_called_in_order",
    "check_val_every_n_epoch": "test_check_val_every_n_epoch",
    "default_root_dir": "test_each_run_has_its_own_folder",
    "detect_anomaly": "test_detect_anomaly_raises_at_nan_gradients",
    "enable_checkpointing": "test_last_checkpoint_is_saved_by_default",
    "enable_model_summary": "test_model_summary",
    "enable_progress_bar": "test_tqdm_shows_rounds_clients_and_accuracy",
    "fast_dev_run": "test_fast_dev_run",
    "gradient_clip_algorithm": "test_gradients_are_clipped_by_client_and_by_model",
    "gradient_clip_val": "test_gradients_are_clipped_by_client_and_by_model",
    "inference_mode": "test_inference_mode_changes_no_result",
    "limit_predict_batches": "test_limit_test_and_predict_batches_count_batches_of_clients",
    "limit_test_batches": "test_limit_test_and_predict_batches_count_batches_of_clients",
    "limit_train_batches": "test_limits_of_the_local_steps",
    "limit_val_batches": "test_limit_val_batches_counts_batches_of_clients",
    "log_every_n_steps": "test_log_every_n_steps_counts_rounds",
    "logger": "test_other_loggers_get_the_numbers_of_metrics_csv",
    "max_epochs": "test_max_epochs_and_max_steps_count_rounds",
    "max_steps": "test_max_epochs_and_max_steps_count_rounds",
    "max_time": "test_max_time_ends_the_run_after_a_round",
    "min_epochs": "test_early_stopping",
    "min_steps": "test_early_stopping",
    "num_sanity_val_steps": "test_sanity_check_changes_no_result",
    "overfit_batches": "test_overfit_batches_takes_the_same_batches_in_each_round",
    "plugins": "test_user_checkpoint_io_saves_the_checkpoints",
    "precision": "test_precision_of_the_local_steps",
    "profiler": "test_profilers_see_the_rounds",
}
REFUSED = {
    "barebones": True,
    "precision": "bf16-true",
    "reload_dataloaders_every_n_epochs": 1,
    "strategy": "ddp_spawn",
    "val_check_interval": 0.5,
}
TESTED_ELSEWHERE = {"devices", "num_nodes"}  # in test_processes.py
PASSED_ON = {
    "accelerator": "cpu",
    "benchmark": True,
    "deterministic": True,
    "enable_autolog_hparams": False,
    "model_registry": "mine",
    "sync_batchnorm": True,
    "use_distributed_sampler": False,
}


def test_every_trainer_argument_has_a_test_or_a_refusal():
    arguments = set(inspect.signature(lightning.Trainer.__init__).parameters) - {"self"}
    assert arguments == set(HONOURED) | set(REFUSED) | set(PASSED_ON) | TESTED_ELSEWHERE
    assert [name for name in HONOURED.values() if name not in globals()] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *REFUSED.items(),
        ("val_check_interval", "00:00:00:01"),
        *[("accumulate_grad_batches", value) for value in (0, -1, 2.0, True, {0: 2})],
    ],
)
def test_argument_is_refused_before_data_and_hooks(tmp_path, name, value):
    quiet = dict.fromkeys(QUIET) if name == "barebones" else {}
    with UntouchedData() as (data, seen), pytest.raises(ValueError, match=f"^Expected .*{name}"):
        fit(tmp_path, data=data, callbacks=[seen], **{name: value, **quiet})


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(PASSED_ON, id="all"),
        *(mark_if(True, {n: v}, id=f"{n}-{v}") for n, v in PASSED_ON.items()),
    ],
)
def test_argument_passed_to_lightning_changes_no_result(tmp_path, arguments):
    usual, passed = fit_results(tmp_path / "a"), fit_results(tmp_path / "b", **arguments)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    assert all(torch.equal(usual[0][key], tensor) for key, tensor in passed[0].items())
    assert usual[2] == passed[2]


class UntouchedData:
    """Check that the data are not loaded and that no hook of a callback is called."""

    def __enter__(self):
        self.data = FederatedData(Digits(), IID(), num_clients=6)
        self.seen = Recorder()
        return self.data, self.seen

    def __exit__(self, *_):
        assert self.data._clients is None
        assert self.seen.seen == []


REFUSED_CALLBACKS = {
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
ACCEPTED_CALLBACKS = {
    "BasePredictionWriter": "test_prediction_writer_gets_every_client",
    "Callback": "test_callback_hooks_are_called_in_order",
    "Checkpoint": "test_model_checkpoint",
    "DeviceStatsMonitor": "test_device_stats_monitor",
    "EMAWeightAveraging": "test_weight_averaging_averages_the_models_of_the_rounds",
    "EarlyStopping": "test_early_stopping",
    "LambdaCallback": "test_exception_calls_on_exception",
    "LearningRateMonitor": "test_schedule_steps_once_a_round_for_each_model",
    "ModelCheckpoint": "test_model_checkpoint",
    "ModelSummary": "test_model_summary",
    "OnExceptionCheckpoint": "tests/test_resume.py",
    "ProgressBar": "test_user_progress_bar_gets_the_batches",
    "RichModelSummary": "test_model_summary",
    "RichProgressBar": "test_rich_shows_rounds_clients_and_accuracy",
    "TQDMProgressBar": "test_tqdm_shows_rounds_clients_and_accuracy",
    "Timer": "test_timer",
    "WeightAveraging": "test_weight_averaging_averages_the_models_of_the_rounds",
}


def test_every_callback_of_lightning_has_a_test_or_a_refusal():
    assert set(callbacks.__all__) == set(REFUSED_CALLBACKS) | set(ACCEPTED_CALLBACKS)
    tests = [name for name in ACCEPTED_CALLBACKS.values() if not name.endswith(".py")]
    assert [name for name in tests if name not in globals()] == []
    for refused in CALLBACKS:
        assert refused.__name__ in REFUSED_CALLBACKS


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED_CALLBACKS)
def test_callback_is_refused_before_data_and_hooks(tmp_path, name):
    refused = REFUSED_CALLBACKS[name]()
    expected = f"^Expected trainer argument `callbacks` without {type(refused).__name__} but got"
    with UntouchedData() as (data, seen), pytest.raises(ValueError, match=expected):
        fit(tmp_path, data=data, callbacks=[seen, refused])


def test_refused_callback_of_a_client_is_refused(tmp_path):
    class Finds(FedAvg):
        def configure_callbacks(self):
            assert self.trainer.max_epochs == 3
            return callbacks.BatchSizeFinder()

    with pytest.raises(ValueError, match="without BatchSizeFinder but got one"):
        fit(tmp_path, make_client(Finds))


def test_late_last_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^Expected ModelCheckpoint with `save_last` to have"):
        fit(tmp_path, callbacks=ModelCheckpoint(save_last=True, save_top_k=0))
    linked = ModelCheckpoint(save_last="link", save_on_exception=True)
    with pytest.raises(
        ValueError, match=r"^Expected `save_last` of ModelCheckpoint to be true with"
    ):
        fit(tmp_path, callbacks=linked)


def test_remote_checkpoint_folder_is_refused(tmp_path):
    saver = ModelCheckpoint(tmp_path)
    saver.dirpath = "s3://bucket/run"  # as with fsspec for remote folders
    with pytest.raises(ValueError, match="Expected ModelCheckpoint with a local folder as `dirpa"):
        fit(tmp_path, callbacks=saver)


PLATEAU = functools.partial(ReduceLROnPlateau, monitor="val/personal/los")


@pytest.mark.slow
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
def test_unlogged_monitor_is_refused(tmp_path, watching, client, limit, words):
    with pytest.raises(ValueError, match=words):
        fit(tmp_path, make_client(**client), callbacks=watching, limit_val_batches=limit)
    assert not (tmp_path / "run" / "metrics.csv").exists(), "no round was run"


@pytest.mark.slow
@pytest.mark.parametrize("check_val_every_n_epoch", [1, 2])
def test_unlogged_monitor_beside_own_callbacks_is_announced(tmp_path, check_val_every_n_epoch):
    """The run ended at its first validation, which may come after many rounds."""

    class Stop(EarlyStopping):
        def on_train_start(self, trainer, pl_module):
            raise InterruptedError("training begins")

    words = r"^Stop has the monitor val/personel/loss \(did you mean val/personal/loss\?\), which"
    options = {"check_val_every_n_epoch": check_val_every_n_epoch}
    with pytest.raises(InterruptedError), pytest.warns(UserWarning, match=words):
        fit(tmp_path, callbacks=[Stop("val/personel/loss")], **options)


@pytest.mark.slow
def test_logged_or_lenient_monitor_is_accepted(tmp_path):
    names = ["val/hybrid/accuracy_worst10", "train/loss", "round", "epoch"]
    watching = [
        ModelCheckpoint(monitor=name, filename=f"{place}") for place, name in enumerate(names)
    ]
    lenient = EarlyStopping("val/accuracy", strict=False)
    expected = (
        "^ModelCheckpoint with mode min takes the smallest val/hybrid/accuracy_worst10 for the best"
        ", but larger values are better: set its `mode` to max.$"
    )
    with pytest.warns(UserWarning, match=expected):
        assert fit(tmp_path, callbacks=[*watching, lenient]).global_step == 3


def test_modes_that_fit_the_directions_give_no_warning():
    callbacks = [
        EarlyStopping("val/global/accuracy", mode="max"),
        EarlyStopping("val/global/loss_trained_worst10"),
        EarlyStopping("val/global/accuracy_std"),
        EarlyStopping("val/global/skill"),
    ]
    trainer = SimpleNamespace(callbacks=callbacks, lr_scheduler_configs=[])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_opposite_modes(trainer, {"skill": None})
    trainer.callbacks = [ModelCheckpoint(monitor="val/central/mae", mode="max")]
    with pytest.warns(UserWarning, match="max takes the largest val/central/mae for .* to min"):
        warn_of_opposite_modes(trainer, {"mae": False})


@pytest.mark.parametrize("hook", HOOKS)
def test_uncalled_hook_of_a_callback_is_refused(tmp_path, hook):
    expected = f"^Expected argument `callbacks` without the hook `{hook}` but got it in Lambda"
    with UntouchedData() as (data, seen), pytest.raises(ValueError, match=expected):
        fit(tmp_path, data=data, callbacks=[seen, LambdaCallback(**{hook: lambda *_: None})])


@pytest.mark.parametrize("method", METHODS)
def test_uncalled_hook_of_a_client_is_refused(tmp_path, method):
    client_class = type("Mine", (FedAvg,), {method: lambda self, *args, **kwargs: None})
    expected = f"^Expected argument `model` without the hook `{method}` but got it in Mine"
    with UntouchedData() as (data, seen), pytest.raises(ValueError, match=expected):
        fit(tmp_path, make_client(client_class), data=data, callbacks=[seen])


@pytest.mark.parametrize("hook", REQUIRED_HOOKS)
def test_required_hook_without_super_is_refused(tmp_path, hook):
    assert any(hook in vars(kind) for kind in (ClientRounds, FederationModule))
    mixin = type("Mixin", (), {hook: lambda self, *args: None})
    client_class = type("Mine", (mixin, FedAvg), {})
    expected = rf"^Expected `{hook}` of Mixin to call super\(\).{hook}\(...\), because it sets"
    with UntouchedData() as (data, seen), pytest.raises(ValueError, match=expected):
        fit(tmp_path, make_client(client_class), data=data, callbacks=[seen])


@pytest.mark.slow
def test_client_extends_a_required_hook(tmp_path):
    class Mine(FedAvg):
        def on_validation_epoch_end(self):
            super().on_validation_epoch_end()
            self.log("val/mine", 1.0)

    trainer = fit(tmp_path, make_client(Mine))
    assert {"val/mine", "val/global/accuracy"} <= set(trainer.callback_metrics)


def test_model_that_is_no_client_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"^Expected argument `model` to be a pl_fed.clients.Cl"):
        fit(tmp_path, lightning.LightningModule())
    with pytest.raises(TypeError, match=r"to an algorithm, as in pl_fed.clients.FedAvg\(Lit"):
        fit(tmp_path, LitAutoencoder())
    by_hand = make_client(FedAvg)
    by_hand.automatic_optimization = False
    with pytest.raises(ValueError, match=r"^Expected argument `model` to have automatic_optimiza"):
        fit(tmp_path, by_hand)


def test_invalid_datamodule_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"^Expected argument `datamodule` to be a pl_fed.data.Fed"):
        make(tmp_path).fit(make_client())

    class Transfers(FederatedData):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    with pytest.raises(ValueError, match=r"^Expected argument `datamodule` without the hook"):
        fit(tmp_path, data=digits(Transfers))


@pytest.mark.slow
def test_each_run_has_its_own_folder(tmp_path):
    federation = pl_fed.Federation(Uniform(3), seed=0)
    make_trainer = functools.partial(
        pl_fed.Trainer, federation, default_root_dir=tmp_path, accelerator="cpu", **QUIET
    )
    first, second = make_trainer(max_epochs=1), make_trainer(max_epochs=2)
    assert first.run_dir.parent == second.run_dir.parent == tmp_path
    assert first.run_dir != second.run_dir
    first.fit(make_client(), digits())
    again = make_trainer(run_dir="last", max_epochs=2)
    assert again.run_dir == first.run_dir == Path(again.log_dir)


@pytest.mark.slow
def test_user_checkpoint_io_saves_the_checkpoints(tmp_path):
    class Counting(AtomicCheckpointIO):
        saved = 0

        def save_checkpoint(self, *args, **kwargs):
            self.saved += 1
            super().save_checkpoint(*args, **kwargs)

    counting = Counting()
    fit(tmp_path, plugins=counting, callbacks=LastCheckpoint(share=1))
    assert counting.saved == 3


# metrics.csv


def text(folder):
    return (folder / "metrics.csv").read_text()


def test_row_gets_later_metrics(tmp_path):
    logger = RunCSV(tmp_path)
    logger.log_metrics({"a": 1.0, "epoch": 0}, step=0)
    logger.log_metrics({"b": 0.25}, step=0)
    assert text(tmp_path) == "round,a,b\n0,1,0.25\n"
    logger.log_metrics({"a": 1000.0}, step=1)
    logger.log_metrics({"a": 2.0}, step=1)
    assert text(tmp_path) == "round,a,b\n0,1,0.25\n1,2,\n", "the longer row is overwritten"
    logger.log_metrics({"b": 3.0, "round": 5.0}, step=2)
    assert text(tmp_path).endswith("1,2,\n5,,3\n"), "the metric `round` sets the round"


def test_new_logger_extends_the_file(tmp_path):
    RunCSV(tmp_path).log_metrics({"a": 1.0}, step=0)
    RunCSV(tmp_path).log_metrics({"b": 2.0}, step=0)
    RunCSV(tmp_path).log_metrics({"a": 3.0}, step=1)
    assert text(tmp_path) == "round,a,b\n0,1,2\n1,3,\n"


def test_keep_removes_later_rows(tmp_path):
    (tmp_path / "metrics.csv").write_text("round,a\n0,1\n1,2\n2,3\n3,")
    logger = RunCSV(tmp_path)
    logger.keep(2)
    assert text(tmp_path) == "round,a\n0,1\n1,2\n"
    logger.log_metrics({"b": 7.0}, step=1)
    assert text(tmp_path) == "round,a,b\n0,1,\n1,2,7\n"
    logger.keep(0)
    assert text(tmp_path) == "round\n"
