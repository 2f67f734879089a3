"""Evaluation and prediction by the steps of LightningModules, for each client."""

import copy
import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from forked_processes import ForkedCommand
from lightning.pytorch.callbacks import EarlyStopping
from lit_federations import (
    draw,
    float32,
    labels,
    numbers,
    sentences,
    set_up,
    table,
    trainer_of,
)
from lit_modules import (
    LitAutoencoder,
    LitImages,
    LitLists,
    LitRegression,
    LitTable,
    LitTokens,
)
from small_federations import run_tried_rounds, seeded, shared_out
from torch import nn
from torchmetrics.classification import BinaryAUROC

import pl_fed
from pl_fed.clients import FedAvg, Finetuning
from pl_fed.samplers import All
from pl_fed.tasks import LightningTask
from pl_fed.tasks.step_logs import StepLogs
from pl_fed.trees import select
from pl_fed.types import Batch


@pytest.mark.slow
def test_evaluation_steps_give_metrics_per_client(tmp_path):
    arrays = float32(table([16, 24, 4]))
    trainer, client, data = set_up(LitTable, arrays, tmp_path=tmp_path)
    trainer.test(client, data)
    metrics = trainer.federation.metrics("test")["personal"].per_client()
    clients, expected = data.clients, {"auroc": [], "loss": []}
    for k in range(3):
        net = trainer.federation.model_of(k, "personal")
        batch = clients.batch(clients.test.samples(k))
        with torch.no_grad():
            logits = net(batch.inputs)
            expected["loss"].append(float(net.loss(logits, batch.targets.float())))
        if len(batch.targets.unique()) == 2:
            expected["auroc"].append(float(BinaryAUROC()(logits.sigmoid(), batch.targets)))
        else:
            expected["auroc"].append(torch.nan)
    for name, values in expected.items():
        torch.testing.assert_close(
            metrics[name], torch.tensor(values).double(), equal_nan=True, rtol=1e-5, atol=1e-6
        )
    logged = trainer.callback_metrics
    undefined = sum(value != value for value in expected["auroc"])
    assert undefined >= 1, "or nothing is undefined here"
    assert float(logged["test/personal/auroc_undefined"]) == undefined
    defined = [value for value in expected["auroc"] if value == value]
    assert float(logged["test/personal/auroc"]) == pytest.approx(sum(defined) / len(defined))
    for model in ("global", "personal", "hybrid"):
        for statistic in ("", "_std", "_worst10", "_jain"):
            assert f"test/{model}/f1{statistic}" in logged


def test_missing_loss_of_an_evaluation_step_is_the_logged_one_or_undefined():
    task, batch = LightningTask(), Batch(draw(6, 1, 6, 6), labels(6, 3))
    net = seeded(LitImages).double().eval()
    with torch.no_grad():
        loss, values = task.evaluate(net, [batch, batch], "val")
        expected = float(nn.functional.cross_entropy(net(batch.inputs), batch.targets))
        accuracy = float((net(batch.inputs).argmax(1) == batch.targets).double().mean())
        assert loss == pytest.approx(expected)
        assert values == {"acc": pytest.approx(accuracy)}
        returned, _ = task.evaluate(net, [batch, batch], "test")
        assert returned == pytest.approx(expected)
        net, batch = seeded(LitRegression).double().eval(), Batch(draw(6, 4), draw(6, 1, seed=3))
        loss, values = task.evaluate(net, [batch], "val")
        errors = net.net(batch.inputs) - batch.targets
        assert math.isnan(loss)
        assert values["mae"] == pytest.approx(float(errors.abs().mean()))
        assert values["r2"] < 1


class BeginsInStart(LitLists):
    """Makes its list at the start of a validation, as Lightning calls the hooks."""

    def __init__(self):
        super().__init__()
        del self.outputs

    def on_validation_start(self):
        self.outputs = []

    def on_validation_epoch_start(self):
        self.log("val_begin", float(len(self.outputs)))


def test_hook_at_the_start_of_a_validation_runs_before_that_of_the_epoch():
    net, batch = seeded(BeginsInStart).double().eval(), Batch(draw(8, 4), labels(8, 2))
    with torch.no_grad():
        _, values = LightningTask().evaluate(net, [batch, batch], "val")
        scores = net.net(batch.inputs).softmax(1)[:, 1]
    assert values["begin"] == 0
    assert values["auroc"] == pytest.approx(float(BinaryAUROC()(scores, batch.targets)))


@pytest.mark.slow
def test_mean_of_a_logged_number_is_weighted_by_samples():
    task, net = LightningTask(), seeded(LitTokens).eval()
    arrays = sentences([9])
    batches = [
        Batch(select(arrays.inputs, part), select(arrays.targets, part))
        for part in (slice(0, 7), slice(7, 9))
    ]
    with torch.no_grad():
        _, values = task.evaluate(net, batches, "val")
        losses = [net._loss(task.build_batch(*batch[:2])).exp() for batch in batches]
    assert values["perplexity"] == pytest.approx(float(losses[0] * 7 + losses[1] * 2) / 9, rel=1e-5)


@pytest.mark.slow
def test_further_metrics_equal_logged_metrics(tmp_path):
    federation = pl_fed.Federation(All(), seed=0, metrics={"area": BinaryAUROC()}, monitor="area")
    arrays = float32(table([16, 24, 4]))
    trainer, _, _ = set_up(LitTable, arrays, tmp_path=tmp_path, federation=federation)
    for model in ("global", "personal", "hybrid"):
        values = trainer.federation.metrics("val")[model].per_client()
        torch.testing.assert_close(values["area"], values["auroc"], equal_nan=True)
        assert values["area"].isfinite().any()
    assert "val/global/area_worst10" in trainer.callback_metrics
    assert trainer.federation.monitored_metric == "area"


class NamesByStage(LitAutoencoder):
    """A step for all stages, which asks the trainer for the stage."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = (self(x) - x).square().mean()
        trainer = self.trainer
        stage = "train" if trainer.training else "test" if trainer.testing else "val"
        if not trainer.sanity_checking:
            self.log_dict({f"{stage}_loss": loss, f"{stage}_mae": loss.sqrt()})
        return loss * (1 if trainer.training else 0)

    validation_step = test_step = training_step


@pytest.mark.filterwarnings("error:pl_fed leaves out")
@pytest.mark.slow
def test_steps_read_their_own_stage_from_the_trainer(tmp_path):
    trainer, client, data = set_up(NamesByStage, float32(numbers()), Finetuning, tmp_path)
    assert {"val/global/mae", "val/global/loss"} <= trainer.callback_metrics.keys()
    assert client.task.facts.logged_names["validation"] == {"val_loss": "loss", "val_mae": "mae"}
    trainer.test(client, data, verbose=False)
    assert client.task.facts.measures == {"mae": False}
    models = (trainer.federation.model_of(0, name) for name in ("global", "personal"))
    start, adapted = (model.decoder.weight for model in models)
    assert not torch.equal(start, adapted), "an adaptation trains in every stage"


class LitAreas(LitLists):
    """Computes a metric of an epoch that three samples leave undefined."""

    def on_validation_epoch_end(self):
        scores, y = (torch.cat(tensors) for tensors in zip(*self.outputs))
        if len(y) < 4:
            raise IndexError("too few samples.")
        self.log("val_share", (scores.argsort() == y).double().mean())
        self.log("val_samples_seen", len(y))
        self.outputs.clear()


@pytest.mark.slow
def test_metric_that_fails_at_the_end_of_an_epoch_is_undefined_for_the_client(tmp_path):
    with pytest.warns(
        UserWarning, match="3 samples .too few samples.: pl_fed counts its"
    ) as caught:
        trainer, _, _ = set_up(LitAreas, float32(table([12, 24, 12])), tmp_path=tmp_path)
    messages = [str(warning.message) for warning in caught]
    assert sum("too few samples" in message for message in messages) == 1
    values = trainer.federation.metrics("val")["global"].per_client()
    assert values["share"].isnan().tolist() == [True, False, True]
    assert values["samples_seen"][1] == 6, "no samples of another client"
    assert trainer.callback_metrics["val/global/share_undefined"] == 2


def test_lack_of_memory_at_the_end_of_an_epoch_is_no_undefined_metric(tmp_path):
    class LitFull(LitLists):
        def on_validation_epoch_end(self):
            raise torch.OutOfMemoryError("no memory left")

    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        set_up(LitFull, float32(table([12, 24, 12])), tmp_path=tmp_path)


def test_tensors_on_two_devices_at_the_end_of_an_epoch_are_no_undefined_metric():
    class LitTwoDevices(LitAutoencoder):
        def validation_step(self, batch, batch_idx):
            pass

        def on_validation_epoch_end(self):
            torch.ones(2) + torch.ones(2, device="meta")

    batch = Batch(torch.zeros(3, 4), torch.zeros(3, 4))
    with pytest.raises(RuntimeError, match="device"):
        LightningTask().evaluate(LitTwoDevices().eval(), [batch], "val")


@pytest.mark.slow
def test_random_draws_of_evaluation_steps_belong_to_the_client(tmp_path):
    class LitDraws(LitAutoencoder):
        def validation_step(self, batch, batch_idx):
            self.log("val_draw", torch.rand(()))

    trainer, client, data = set_up(LitDraws, float32(numbers([16, 16])), tmp_path=tmp_path)
    draws = []
    for _ in range(2):
        torch.rand(3)
        state = torch.get_rng_state()
        trainer.validate(client, data, verbose=False)
        assert torch.equal(torch.get_rng_state(), state)
        draws.append(trainer.federation.metrics("val")["global"].per_client()["draw"])
    assert torch.equal(*draws)
    assert len(set(draws[0].tolist())) == 2


@pytest.mark.slow
def test_batch_has_the_structure_of_the_samples(tmp_path):
    """A dict with one input stays a dict, and the entries of a tuple stay in their order."""
    batches = []

    class LitEntries(LitAutoencoder):
        def training_step(self, batch, batch_idx):
            batches.append(batch)
            x = batch["signal"] if isinstance(batch, dict) else batch[2]
            return super().training_step((x,), batch_idx)

    signals, targets = draw(8, 4).float(), labels(8, 2)
    dicts = [
        {"signal": x, "owner": k % 2, "y": y} for k, (x, y) in enumerate(zip(signals, targets))
    ]
    tuples = [(y, k % 2, x, -x) for k, (x, y) in enumerate(zip(signals, targets))]
    for samples, options in ((dicts, {"client": "owner"}), (tuples, {"client": 1, "target": 0})):
        data = pl_fed.data.FederatedData(pl_fed.data.TorchDataset(samples, **options), seed=0)
        trainer_of(tmp_path / type(samples[0]).__name__, 1).fit(FedAvg(LitEntries()), data)
    named = [batch for batch in batches if isinstance(batch, dict)]
    assert {tuple(batch) for batch in named} == {("signal", "y")}
    others = [batch for batch in batches if isinstance(batch, tuple)]
    assert all(torch.equal(x, -negative) and len(y) == len(x) for y, x, negative in others)
    assert len(named) > 2 < len(others)


@pytest.mark.slow
def test_logged_metric_chooses_hybrid_models(tmp_path):
    federation = pl_fed.Federation(All(), seed=0, monitor="val_mae")
    trainer, client, data = set_up(
        LitRegression, float32(numbers([16, 16])), tmp_path=tmp_path, federation=federation
    )
    assert trainer.federation.monitored_metric == "mae"
    assert not trainer.federation.session.evaluation.monitor.higher_is_better
    trainer.validate(client, data)
    metrics = trainer.federation.metrics("val")
    mae = {name: metrics[name].per_client()["mae"] for name in ("global", "personal", "hybrid")}
    assert torch.equal(mae["hybrid"], torch.minimum(mae["global"], mae["personal"]))
    with pytest.raises(ValueError, match=r"`federation.monitor` to be one of mae, r2 for"):
        run_tried_rounds(FedAvg(LitRegression()), shared_out(numbers()), monitor="f1")


@pytest.mark.slow
def test_predictions_are_those_of_predict_step(tmp_path):
    trainer, client, data = set_up(
        LitRegression, float32(numbers([16, 24])), FedAvg, tmp_path=tmp_path
    )
    tables = [table for batch in trainer.predict(client, data) for table in batch]
    net, clients = trainer.federation.model_of(0, "global"), data.clients
    for k in range(2):
        inputs = clients.batch(clients.test.samples(k)).inputs
        with torch.no_grad():
            torch.testing.assert_close(tables[k]["prediction"].flatten(), net.net(inputs)[:, 0])


@pytest.mark.slow
def test_lists_of_a_module_contain_outputs_of_one_client(tmp_path):
    trainer, client, data = set_up(
        LitLists, float32(table([16, 24, 16])), FedAvg, tmp_path=tmp_path, rounds=4
    )
    assert float(trainer.callback_metrics["train/lr"]) == pytest.approx(0.01 / 4)
    assert client.optimizers().param_groups[0]["lr"] == 0
    measured = trainer.federation.metrics("val")["global"].per_client()["auroc"]
    net = trainer.federation.model_of(0, "global")
    for k in range(3):
        batch = data.clients.batch(data.clients.val.samples(k))
        with torch.no_grad():
            scores = net.net(batch.inputs).softmax(1)[:, 1]
        assert float(measured[k]) == pytest.approx(float(BinaryAUROC()(scores, batch.targets)))
    with pytest.raises(ValueError, match="Expected LitLists to have a `predict_step`, or to take"):
        trainer.predict(client, data)


def test_logs_are_reduced_by_reduce_fx():
    logs = StepLogs()
    for size, value in ((1, 1.0), (3, 5.0)):
        logs.size = size
        logs.log("val/mean", value)
        logs.log("sum", torch.tensor(value), reduce_fx="sum")
        logs.log_dict({"min": value, "max": value}, reduce_fx=torch.min)
        logs.log("max", value, reduce_fx="max")
    values = {name: float(value) for name, value in logs.values().items()}
    assert values == {"val/mean": 4.0, "sum": 6.0, "min": 1.0, "max": 5.0}
    with pytest.raises(ValueError, match=r"`reduce_fx` .* to be one of mean, sum, min, max but"):
        logs.log("x", 1.0, reduce_fx="median")
    with pytest.raises(TypeError, match="a metric of torchmetrics but got str"):
        logs.log("x", "1")


def measures_of(validation_step, test_step=None, **federation):
    """Return the task of a module with these steps, after the trial before training."""
    steps = {"validation_step": validation_step} | ({"test_step": test_step} if test_step else {})
    client = FedAvg(type("LitLogs", (LitAutoencoder,), steps)())
    pl_fed.Federation(All(), seed=0, **federation).setup(
        client, shared_out(float32(numbers())), "fit"
    )
    return client.task


def log_all(**values):
    return lambda self, batch, batch_idx: self.log_dict(values)


@pytest.mark.parametrize("backwards", [False, True])
def test_two_logged_names_never_share_a_metric(backwards):
    pairs = {"val_loss": 2.0, "loss": 8.0, "lag-1": 1.0, "lag+1": 3.0, "train_acc": 1.0, "acc": 0.5}
    pairs |= {"val_top 5": 1.0, "val/f": 1.0, "val_f": 2.0, "größe/ü": 1.0}
    if backwards:
        pairs = dict(reversed(pairs.items()))
    task = measures_of(log_all(**pairs), log_all(test_loss=4.0, **{"test/f": 4.0, "test_new": 1.0}))
    own = {*pairs, "test_loss", "test/f"} - {"val_top 5", "loss"}
    assert {*task.facts.measures} == {*own, "top 5", "new"}
    assert task.facts.loss_parts == {"val"}


def test_step_of_validation_and_test_gives_one_metric():
    """As with ``test_step = validation_step``: the metric of the test had another name."""
    step = log_all(val_acc=0.5, val_loss=2.0)
    task = measures_of(step, step)
    assert {*task.facts.measures} == {"acc"}
    assert task.facts.loss_parts == {"val", "test"}


def test_a_returned_loss_never_hides_another_logged_loss():
    def step(self, batch, batch_idx):
        self.log("val_loss", 2.0)
        return torch.tensor(8.0)

    task = measures_of(step, log_all(test_loss=4.0))
    module = type("LitLogs", (LitAutoencoder,), {"validation_step": step})()
    inputs = torch.zeros(3, 4)
    assert task.facts.logged_losses == {"val"}
    assert task.evaluate(module, [Batch(inputs, inputs, None, torch.arange(3))], "val")[0] == 2.0


def test_declared_directions_win_and_unknown_ones_choose_nothing():
    step = log_all(val_smape=1.0, val_mae=1.0, val_kl_a=1.0, hits=1.0)
    options = {"lower_is_better": ["*kl*"], "higher_is_better": ["hits", "val_mae"]}
    task = measures_of(step, **options)
    assert task.facts.measures == {"smape": None, "mae": True, "kl_a": False, "hits": True}
    with pytest.raises(ValueError, match=r"got 'smape': add it to `federation.lower_is_better`"):
        measures_of(step, monitor="smape")
    with pytest.raises(ValueError, match=r"`federation.lower_is_better` .* but got 'crps'"):
        measures_of(step, lower_is_better=["crps"])
    with pytest.raises(ValueError, match="different metrics but got 'hits' in both"):
        measures_of(step, lower_is_better=["hits"], higher_is_better=["h*"])


def test_worst_clients_by_an_unknown_direction_are_no_monitor(tmp_path):
    steps = {"validation_step": log_all(val_smape=1.0)}
    client = FedAvg(type("LitLogs", (LitAutoencoder,), steps)())
    stop = EarlyStopping("val/global/smape_worst10")
    trainer = trainer_of(tmp_path, 1)
    trainer.callbacks.append(stop)
    with pytest.raises(ValueError, match=r"add smape to `federation.lower_is_better` or"):
        trainer.fit(client, shared_out(float32(numbers([16, 16])), val_fraction=0.5))


def test_direction_of_a_logged_metric_follows_its_name():
    class LitScores(LitAutoencoder):
        def validation_step(self, batch, batch_idx):
            self.log_dict({"val_hits": 1.0, "val_recon_error": 1.0, "val_bits": 1.0})

    client = FedAvg(LitScores(), task=LightningTask(lower_is_better=["val_bits"]))
    run_client = copy.deepcopy(client)
    federation = pl_fed.Federation(All(), seed=0)
    federation.setup(run_client, shared_out(float32(numbers())), "fit")
    assert run_client.task.facts.measures == {"hits": None, "recon_error": False, "bits": False}


@pytest.mark.slow
def test_two_processes_give_the_metrics_of_one_process(tmp_path):
    arrays = table([16, 24, 16])
    np.savez(tmp_path / "data.npz", x=arrays.inputs, y=arrays.targets, client=arrays.client)
    config = {
        "model": {
            "class_path": "pl_fed.clients.Ditto",
            "init_args": {"net": {"class_path": "lit_modules.LitTable"}},
        },
        "data": {
            "dataset": {
                "class_path": "pl_fed.data.Npz",
                "init_args": {"path": str(tmp_path / "data.npz")},
            },
            "partitioner": None,
            "val_fraction": 0.25,
        },
        "federation": {"sampler": {"class_path": "pl_fed.samplers.All"}},
        "trainer": {"max_epochs": 2, "accelerator": "cpu", "precision": "64-true"},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    tables = []
    for processes in ("1", "2"):
        arguments = ["fit", "--config", str(tmp_path / "c.yaml")]
        arguments += ["--trainer.devices", processes, "--trainer.strategy", "ddp"]
        folder = tmp_path / processes
        arguments += ["--trainer.default_root_dir", str(folder)]
        tests = Path(__file__).parent.parent  # the module is found in the current folder
        command = ForkedCommand(arguments, tests)
        output = command.communicate(timeout=100)[0]
        assert command.returncode == 0, output
        (path,) = folder.glob("*/metrics.csv")
        with path.open(newline="") as file:
            tables.append(list(csv.DictReader(file)))
    assert {"train/global/positives", "val/personal/auroc", "val/personal/f1_std"} <= set(
        tables[0][0]
    )
    for row, other in zip(*tables, strict=True):
        for name in row:
            if row[name] and not name.startswith("time/"):
                assert float(row[name]) == pytest.approx(float(other[name]), abs=1e-10), name


class Detector(LitAutoencoder):
    """A detector with a causal mask, and a threshold that begins with infinity."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("threshold", torch.tensor(torch.inf))
        self.best = 0

    def validation_step(self, batch, batch_idx):
        self.threshold.fill_(2.0)
        self.best += 1
        self.seen = [1.0]
        self.log("val_threshold", self.threshold)


@pytest.mark.slow
def test_threshold_of_a_validation_is_named_and_a_buffer_may_be_infinite(tmp_path):
    message = "change `best`, `threshold`, which pl_fed sets back after each client"
    with pytest.warns(UserWarning, match=message):
        trainer, _, _ = set_up(Detector, numbers(), FedAvg, tmp_path=tmp_path)
    assert float(trainer.callback_metrics["val/global/threshold"]) == 2.0
    net = trainer.federation.model_of(0)
    assert torch.equal(net.threshold, torch.tensor(torch.inf))
    assert torch.equal(net.mask, torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]))


class Smallest(Detector):
    """The smallest loss so far, from infinity on."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.threshold.copy_(torch.minimum(self.threshold, loss.detach()))
        return loss


def test_buffer_that_a_step_moves_away_from_infinity_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`threshold`, integers or infinite at first, which no"):
        set_up(Smallest, numbers(), FedAvg, tmp_path=tmp_path)
