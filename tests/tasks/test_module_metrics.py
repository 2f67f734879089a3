"""Metrics and losses of real modules: undefined for a batch or a client, in dicts, in wrappers."""

import pytest
import torch
from lit_federations import draw, labels
from small_federations import seeded
from stateful_modules import Stateful
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, MinMaxMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryROC, MulticlassAccuracy
from torchmetrics.regression import MeanSquaredError, R2Score
from torchmetrics.wrappers import Running

from pl_fed.tasks import LightningTask
from pl_fed.types import Batch


class Judged(Stateful):
    """Logs a collection of which one metric is undefined for samples of one class."""

    def keep(self):
        metrics = {"acc": BinaryAccuracy(), "auroc": BinaryAUROC()}
        self.metrics = MetricCollection(metrics, prefix="val_")

    def validation_step(self, batch, batch_idx):
        self.metrics.update(self(batch[0])[:, 0].sigmoid(), batch[1])
        self.log_dict(self.metrics)


def test_metric_of_a_collection_is_undefined_by_itself():
    net, batch = seeded(Judged).double().eval(), Batch(draw(6, 4), torch.ones(6, dtype=torch.int64))
    with torch.no_grad():
        _, values = LightningTask().evaluate(net, [batch], "val")
        expected = float((net(batch.inputs)[:, 0] > 0).double().mean())
    assert values["acc"] == pytest.approx(expected)
    assert values["auroc"] != values["auroc"], "undefined"


class Computed(Stateful):
    """Computes an area under the curve itself: of each batch, and at the end."""

    def keep(self):
        self.by_batch, self.by_epoch, self.curve = BinaryAUROC(), BinaryAUROC(), BinaryROC()

    def validation_step(self, batch, batch_idx):
        self.log("batch", self.by_batch(*batch))
        self.by_epoch.update(*batch)
        self.curve.update(*batch)

    def on_validation_epoch_end(self):
        self.log("epoch", self.by_epoch.compute())
        self.log("again", self.by_epoch)
        false_positives, _, _ = self.curve.compute()
        self.log("points", float(len(false_positives)))


def test_metric_that_a_module_computes_is_undefined_for_one_class():
    net, scores = Computed().eval(), torch.tensor([0.2, 0.8])
    for positives, expected in (([0, 1], 1.0), ([1, 1], torch.nan)):
        _, values = LightningTask().evaluate(net, [Batch(scores, torch.tensor(positives))], "val")
        assert values == pytest.approx(
            {"batch": expected, "epoch": expected, "again": expected, "points": 3.0}, nan_ok=True
        )


class Fitted(Stateful):
    """Calls a collection, so that it computes R² of each batch, also of a batch of one sample."""

    def keep(self):
        self.net = nn.Linear(4, 1)
        self.metrics = MetricCollection({"r2": R2Score(), "mse": MeanSquaredError()})

    def validation_step(self, batch, batch_idx):
        self.metrics(self(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.log_dict(self.metrics.compute())


def test_metric_that_is_undefined_for_a_batch_is_defined_for_the_epoch():
    net, x, y = seeded(Fitted).double().eval(), draw(5, 4), draw(5, 1, seed=2)
    batches = [Batch(x[:4], y[:4]), Batch(x[4:], y[4:])]
    with torch.no_grad():
        _, values = LightningTask().evaluate(net, batches, "val")
        _, of_one = LightningTask().evaluate(net, batches[1:], "val")
        errors = (net(x) - y).square()
    assert values["mse"] == pytest.approx(float(errors.mean()))
    assert values["r2"] == pytest.approx(1 - float(errors.sum() / (y - y.mean()).square().sum()))
    assert of_one["mse"] == pytest.approx(float(errors[4]))
    assert of_one["r2"] != of_one["r2"], "undefined"


class KeepsMetricsInADict(Stateful):
    """Keeps metrics in a dict and a list, which are no modules."""

    def keep(self):
        self.by_stage = {"train": [MulticlassAccuracy(3, average="micro")]}

    def training_step(self, batch, batch_idx):
        self.log("train_acc", self.by_stage["train"][0](self(batch[0]), batch[1]))
        return self.loss(batch)[None]


def test_metrics_in_a_dict_begin_anew_and_a_loss_may_have_one_entry():
    net, task = seeded(KeepsMetricsInADict).double(), LightningTask()
    for seed in (0, 1):
        batch = Batch(draw(6, 4, seed=seed), labels(6, 3, seed=seed))
        with task.training_logs(0) as logs:
            loss = task.loss(net, batch)
        assert torch.equal(loss, net.loss(batch))
        expected = (net(batch.inputs).argmax(1) == batch.targets).double().mean()
        assert float(logs[id(net)]["acc"]) == pytest.approx(float(expected))
        assert not net.by_stage["train"][0].update_called


class RunningLoss(Stateful):
    """Logs a wrapper that does not count its updates."""

    def keep(self):
        self.mean_loss = Running(MeanMetric(), window=3)

    def validation_step(self, batch, batch_idx):
        self.mean_loss(self.loss(batch))
        self.log("val_mean", self.mean_loss)


def test_wrapper_without_a_count_of_updates_begins_anew_with_each_client():
    net, task = seeded(RunningLoss).double().eval(), LightningTask()
    for seed in (0, 1):
        batch = Batch(draw(6, 4, seed=seed), labels(6, 3, seed=seed))
        with torch.no_grad():
            _, values = task.evaluate(net, [batch], "val")
            assert values["mean"] == pytest.approx(float(net.loss(batch)))


class Thresholds(Stateful):
    """Logs accuracies at two thresholds: their states are equal for some samples."""

    def keep(self):
        metrics = {"low": BinaryAccuracy(0.5), "high": BinaryAccuracy(0.9)}
        self.metrics = MetricCollection(metrics)

    def validation_step(self, batch, batch_idx):
        self.metrics.update(*batch)
        self.log_dict(self.metrics)


def test_metrics_that_are_equal_for_the_first_client_differ_for_the_next():
    net, ones = Thresholds().eval(), torch.ones(2, dtype=torch.int64)
    pairs = [([0.1, 0.95], (0.5, 0.5)), ([0.6, 0.95], (1.0, 0.5))]
    for scores, (low, high) in pairs:
        _, values = LightningTask().evaluate(net, [Batch(torch.tensor(scores), ones)], "val")
        assert values == {"low": low, "high": high}


class Bounds(Stateful):
    """Logs the largest value of a metric over the batches of a client."""

    def keep(self):
        self.bounds = MinMaxMetric(MeanSquaredError())

    def validation_step(self, batch, batch_idx):
        self.bounds(*batch)

    def on_validation_epoch_end(self):
        self.log_dict(self.bounds.compute())


def test_bounds_of_a_metric_are_those_of_one_client():
    net = Bounds().eval()
    for size in (3.0, 1.0):
        batch = Batch(torch.tensor([size]), torch.zeros(1))
        _, values = LightningTask().evaluate(net, [batch], "val")
        assert values == {"raw": size**2, "min": size**2, "max": size**2}


class Averages(Stateful):
    """Logs a mean, which torchmetrics adds up in place."""

    def keep(self):
        self.mean, self.parts = MeanMetric(), MetricCollection({"mse": MeanSquaredError()})

    def validation_step(self, batch, batch_idx):
        self.mean.update(batch[1].float())
        self.parts.update(batch[1].float(), 0 * batch[1].float())
        self.log("val_mean", self.mean)
        self.log_dict(self.parts)


def test_metrics_of_a_validation_before_a_fit_can_be_added_to_in_the_fit():
    """A validation in inference mode left states that no later update may change in place."""
    net, batch = seeded(Averages).eval(), Batch(draw(4, 4).float(), torch.tensor([0, 1, 2, 1]))
    task, expected = LightningTask(), {"mean": 1.0, "mse": 1.5}
    with torch.inference_mode():
        assert task.evaluate(net, [batch], "val")[1] == expected
        net.mean.reset()  # in a hook of the module
    with torch.no_grad():
        assert task.evaluate(net, [batch], "val")[1] == expected
