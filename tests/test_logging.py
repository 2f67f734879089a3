"""Delayed writing of rows loses no metric of any round, in any logger."""

import csv
import functools
import json
import math

import pytest
import torch
from exhaustive import exhaustive_but
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from small_federations import Only
from torchmetrics import Metric

import pl_fed
from pl_fed.attacks import RandomLabels
from pl_fed.clients import Ditto
from pl_fed.data import Digits, FederatedData
from pl_fed.engine.base import ROUND_NUMBERS
from pl_fed.lightning.checkpoints import AtomicCheckpointIO
from pl_fed.loggers import RunCSV, WaitingRows
from pl_fed.models import MLP
from pl_fed.partitioners import Shards
from pl_fed.samplers import Uniform

pytestmark = pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need")
ROUNDS, SELDOM = 7, 100


class Recording(Logger):
    """Records the logged metrics and their rounds."""

    name = version = "recording"

    def __init__(self, rounds=lambda: None):
        super().__init__()
        self.logged, self.saves, self.rounds = [], 0, rounds

    def log_hyperparams(self, *args, **kwargs):
        self.hyperparams = args

    def log_metrics(self, metrics, step=None):
        self.logged.append((self.rounds(), step, dict(metrics)))

    def save(self):
        self.saves += 1

    def rows(self, name):
        """Return the rounds and values of a metric."""
        return [(step, metrics[name]) for _, step, metrics in self.logged if name in metrics]


class Failing(Recording):
    def log_metrics(self, metrics, step=None):
        raise ConnectionError


class Killed(BaseException):
    """Replaces a signal."""


BYTES = ("upload_bytes", "download_bytes")


def die(trainer, *_):
    if trainer.current_epoch == 4:
        raise Killed


@functools.cache
def digits():
    return FederatedData(Digits(), Shards(3), num_clients=6, seed=0)


def make(folder, every, **arguments):
    torch.manual_seed(0)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    client = arguments.pop("client", Ditto)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl_fed.Trainer(
        pl_fed.Federation(
            Uniform(3), engine=pl_fed.EngineOptions(arguments.pop("engine", "one_by_one")), seed=0
        ),
        run_dir=folder,
        log_every_n_steps=every,
        accelerator="cpu",
        num_sanity_val_steps=0,
        **({"max_epochs": ROUNDS, "limit_val_batches": 0} | quiet | arguments),
    )
    return trainer, client(MLP(64, [8], 10), optimizer=optimizer, local_steps=2)


def fit(folder, every, **arguments):
    trainer, client = make(folder, every, **arguments)
    trainer.fit(client, digits())
    return trainer


def table(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "time/round"} for row in csv.DictReader(file)]


def rounds(folder):
    return [int(row["round"]) for row in table(folder)]


@pytest.mark.slow
@exhaustive_but("3-1", "10-3")
@pytest.mark.parametrize("validation", [0, 1, 3])
@pytest.mark.parametrize("every", [1, 3, 10])
def test_delayed_rows_equal_immediate_rows(tmp_path, every, validation):
    options = (
        {"limit_val_batches": 1.0, "check_val_every_n_epoch": validation} if validation else {}
    )
    logger, usual = Recording(), Recording()
    fit(tmp_path / "usual", 1, logger=usual, **options)
    fit(tmp_path / "seldom", every, logger=logger, **options)
    assert table(tmp_path / "seldom") == table(tmp_path / "usual")
    assert rounds(tmp_path / "seldom") == list(range(ROUNDS))
    numbers = "loss cohort byzantine rejected update_norm"
    for name in ["round", *(f"train/{number}" for number in numbers.split())]:
        assert logger.rows(name) == usual.rows(name)
    losses = [float(row["train/loss"]) for row in table(tmp_path / "seldom")]
    assert [step for step, _ in logger.rows("train/loss")] == list(range(ROUNDS))
    assert [loss for _, loss in logger.rows("train/loss")] == pytest.approx(losses)
    assert [step for step, _ in logger.rows("val/global/loss")] == [
        round for round in range(ROUNDS) if validation and (round + 1) % validation == 0
    ]
    for _, step, metrics in logger.logged:
        assert metrics["round"] == metrics["epoch"] == step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "writes"),
    [(1, list(range(ROUNDS))), (3, [2, 2, 2, 5, 5, 5, 7]), (SELDOM, [7] * ROUNDS), (0, [])],
)
def test_rows_are_written_every_n_rounds_and_at_the_end(tmp_path, every, writes):
    logger = Recording()
    trainer, client = make(tmp_path, every, logger=logger, enable_checkpointing=False)
    logger.rounds = lambda: trainer.current_epoch
    trainer.fit(client, digits())
    assert [round for round, *_ in logger.logged] == writes
    assert logger.saves == len(set(writes)) + 2, "Lightning saves at the beginning and at the end"


@pytest.mark.slow
def test_rows_are_written_before_a_validation_and_at_the_end(tmp_path):
    written = {}

    class Reader(Callback):
        def on_validation_start(self, trainer, pl_module):
            written["validated"] = rounds(tmp_path)

        def on_train_end(self, trainer, pl_module):
            written["ended"] = rounds(tmp_path)

    options = {"limit_val_batches": 1.0, "check_val_every_n_epoch": 5}
    fit(tmp_path, SELDOM, callbacks=Reader(), enable_checkpointing=False, **options)
    assert written == {"validated": list(range(5)), "ended": list(range(ROUNDS))}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"every_n_epochs": 2}, {"every_n_train_steps": 2}], ids=["epochs", "steps"]
)
def test_rows_are_written_before_a_checkpoint(tmp_path, options):
    """After a kill, the resumed run writes all rows after the checkpoint."""
    written = []

    class Reads(AtomicCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            super().save_checkpoint(checkpoint, path, storage_options)
            written.append((checkpoint["global_step"], rounds(tmp_path)))

    callbacks = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1, **options)
    fit(tmp_path, SELDOM, plugins=Reads(), callbacks=callbacks)
    assert {step for step, _ in written} >= {2, 4, 6}
    for step, written_rounds in written:
        assert written_rounds == list(range(step))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:No checkpoint is written")
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "not saved"])
@pytest.mark.parametrize("moment", ["on_train_epoch_start", "on_before_optimizer_step"])
def test_interrupted_run_loses_no_row(tmp_path, moment, saved):
    killer, logger = Callback(), Recording()
    setattr(killer, moment, die)
    options = {"callbacks": killer, "logger": logger, "enable_checkpointing": saved}
    with pytest.raises(Killed):
        fit(tmp_path, SELDOM, **options)
    assert rounds(tmp_path) == list(range(4))
    assert [step for step, _ in logger.rows("train/loss")] == list(range(4))
    if saved and moment == "on_train_epoch_start":
        trainer, client = make(tmp_path, SELDOM)
        trainer.fit(client, digits(), ckpt_path="last")
        fit(tmp_path / "whole", SELDOM)
        assert table(tmp_path) == table(tmp_path / "whole")


@pytest.mark.parametrize(("saved", "done"), [(True, 1), (False, 3)])
def test_failing_logger_leaves_the_rows_of_other_loggers(tmp_path, saved, done):
    logger = Recording()
    with pytest.raises(ConnectionError):
        fit(tmp_path, 3, logger=[Failing(), logger], enable_checkpointing=saved)
    assert rounds(tmp_path) == list(range(done))
    assert [step for step, _ in logger.rows("train/loss")] == list(range(done))
    assert (tmp_path / "checkpoints" / "last.ckpt").exists() is saved


# Callbacks that read metrics in rounds without writing


class Watcher(Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.note(trainer)
        assert outputs["loss"] is outputs["train/loss"]

    def on_train_epoch_end(self, trainer, pl_module):
        self.note(trainer)

    def note(self, trainer):
        metric_dicts = [trainer.callback_metrics, trainer.logged_metrics]
        if trainer.progress_bar_callback is not None:
            metric_dicts.append(trainer.progress_bar_metrics)
        self.losses.append({float(metrics["train/loss"]) for metrics in metric_dicts})


@pytest.mark.slow
@pytest.mark.parametrize("bar", [True, False])
def test_callback_metrics_are_those_of_the_round(tmp_path, bar):
    watcher = Watcher()
    trainer = fit(tmp_path, SELDOM, callbacks=watcher, enable_progress_bar=bar)
    losses = [float(row["train/loss"]) for row in table(tmp_path)]
    assert [values.pop() for values in watcher.losses] == pytest.approx(
        [loss for loss in losses for _ in range(2)]
    )
    assert not any(watcher.losses), "all metrics agree"
    expected = {f"train/{name}" for name in {"loss", *ROUND_NUMBERS, *BYTES}}
    expected |= {"round", "time/round", "bytes/up", "bytes/down"}
    assert set(trainer.callback_metrics) == expected
    assert all(isinstance(value, torch.Tensor) for value in trainer.callback_metrics.values())


@pytest.mark.slow
def test_undefined_numbers_reach_callbacks_but_no_logger(tmp_path):
    """No client of the cohort is benign, and a metric of the user has no value."""
    logger = Recording()
    federation = pl_fed.Federation(
        Only(0, 1), adversary=pl_fed.Adversary(RandomLabels(), ids=[0, 1]), metrics=[Undefined()]
    )
    trainer = pl_fed.Trainer(
        federation, run_dir=tmp_path, logger=logger, max_epochs=1, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = FederatedData(Digits(), Shards(1), 12, batch_size=64)
    trainer.fit(Ditto(MLP(64, [4], 10), local_steps=1), data)
    (row,) = table(tmp_path)
    assert row["train/benign_distance"] == ""
    assert trainer.callback_metrics["train/benign_distance"].isnan()
    values = [value for _, _, metrics in logger.logged for value in metrics.values()]
    assert len(values) > 10
    assert not any(math.isnan(value) for value in values)
    assert "nan" not in (tmp_path / "metrics.csv").read_text()


class Undefined(Metric):
    """A metric without a value."""

    higher_is_better = True

    def update(self, preds, target):
        pass

    def compute(self):
        return torch.tensor(torch.nan)


@pytest.mark.slow
def test_early_stopping_and_best_checkpoint_follow_the_training_loss(tmp_path):
    outcomes = []
    for every in (1, SELDOM):
        stopping = EarlyStopping("train/loss", patience=3, check_on_train_epoch_end=True)
        best = ModelCheckpoint(monitor="train/loss", save_on_train_epoch_end=True)
        folder = tmp_path / str(every)
        fit(folder, every, callbacks=[stopping, best], max_epochs=40)
        losses = [float(row["train/loss"]) for row in table(folder)]
        assert 2 < len(losses) < 40, "it stopped early"
        assert float(best.best_model_score) == pytest.approx(min(losses))
        assert float(stopping.best_score) == pytest.approx(min(losses))
        outcomes.append(losses)
    assert outcomes[0] == outcomes[1]


# Metrics of users


class Logs(Ditto):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("square", float(self.current_epoch) ** 2)

    def on_train_epoch_end(self):
        self.log("cube", float(self.current_epoch) ** 3)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_user_metrics_are_in_the_row_of_their_round(tmp_path, every):
    logger = Recording()
    trainer = fit(tmp_path, every, client=Logs, logger=logger)
    for name, power in (("square", 2), ("cube", 3)):
        powers = [float(round) ** power for round in range(ROUNDS)]
        assert [float(row[name]) for row in table(tmp_path)] == powers
        assert logger.rows(name) == list(enumerate(powers))
        assert trainer.callback_metrics[name] == powers[-1]
    (first, *_) = [metrics for *_, metrics in logger.logged if "square" in metrics]
    assert {"train/loss", "round"} <= set(first), "it is in the same row"
    rows = [(step, "cube" in metrics) for _, step, metrics in logger.logged]
    assert rows == sorted(rows), "the row precedes metrics of the end of the round"


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_delayed_and_immediate_rows_keep_their_order(tmp_path, every):
    fit(tmp_path, every, callbacks=LearningRateMonitor("epoch"))
    assert rounds(tmp_path) == list(range(ROUNDS))
    assert {row["lr-SGD/global"] for row in table(tmp_path)} == {"0.1"}
    assert all(row["train/loss"] for row in table(tmp_path))


@pytest.mark.slow
def test_user_step_is_the_step_of_the_row(tmp_path):
    class Steps(Ditto):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log("step", 10.0 * self.current_epoch)

    logger = Recording()
    fit(tmp_path, 3, client=Steps, logger=logger)
    steps = [step for step, _ in logger.rows("train/loss")]
    assert steps == [10 * round for round in range(ROUNDS)]
    assert rounds(tmp_path) == list(range(ROUNDS))


@pytest.mark.parametrize("every", [-1, 2.5])
def test_invalid_log_every_n_steps_is_refused(tmp_path, every):
    with pytest.raises((TypeError, ValueError), match=r"^Expected argument `log_every_n_steps`"):
        fit(tmp_path, every)


# Waiting rows


class LazyNumber:
    """A number that counts its conversions."""

    conversions = 0

    def __float__(self):
        LazyNumber.conversions += 1
        return 1.0


def test_numbers_are_converted_at_writing():
    written = []
    rows = WaitingRows(lambda *row: written.append(row))
    rows.add({"a": LazyNumber()}, 3)
    assert LazyNumber.conversions == 0
    rows.write()
    rows.write()
    assert (LazyNumber.conversions, written) == (1, [({"a": 1.0}, 3)])


def test_row_waits_until_it_is_written():
    written, error = [], [KeyboardInterrupt]

    def log(row, step):
        if step == 1 and error:
            raise error.pop()
        written.append(step)

    rows = WaitingRows(log)
    for step in range(3):
        rows.add({}, step)
    with pytest.raises(KeyboardInterrupt):
        rows.write()
    rows.write()
    assert written == [0, 1, 2]


def test_metrics_csv_writes_waiting_rows_first(tmp_path):
    logger = RunCSV(tmp_path)
    logger.waiting.add({"a": torch.tensor(0.5), "round": 0.0}, 0)
    logger.log_metrics({"b": 2.0}, step=1)
    assert (tmp_path / "metrics.csv").read_text() == "round,a,b\n0,0.5,\n1,,2\n"


@pytest.mark.slow
def test_loggers_and_engine_file_report_the_engine(tmp_path):
    """The report is written after the first round, and again when the engine changes."""
    recording, engines = Recording(), []
    file = tmp_path / "engine.json"

    class EngineChange(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            engines.append(json.loads(file.read_text())["engine"])
            trainer.federation.engine_choice.current = "one_by_one"

    fit(tmp_path, 1, logger=recording, callbacks=[EngineChange()], engine="stacked")
    assert engines == ["stacked"] + ["one_by_one"] * (len(engines) - 1)
    assert len(engines) > 1
    report = {"engine": "one_by_one", "clients_at_a_time": 3, "microseconds_per_step": {}}
    assert recording.hyperparams == ({"engine": report},)
    assert json.loads(file.read_text()) == report
