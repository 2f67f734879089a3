"""Each logged value reaches its own metric, and only that one."""

import numpy as np
import pytest
import torch
from small_federations import classes, seeded, shared_out
from stateful_modules import Stateful
from torchmetrics import MaxMetric, MeanMetric, MeanSquaredError, MinMaxMetric
from torchmetrics.regression import PearsonCorrCoef

import pl_fed
from pl_fed.clients import FedAvg
from pl_fed.samplers import All
from pl_fed.tasks import LightningTask
from pl_fed.tasks.module_facts import ModuleFacts
from pl_fed.tasks.step_logs import StepLogs
from pl_fed.types import Batch


def fit(kind, folder):
    trainer = pl_fed.Trainer(
        pl_fed.Federation(All(), seed=0), run_dir=folder, max_epochs=1, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, logger=False,
    )  # fmt: skip
    trainer.fit(FedAvg(seeded(kind)), shared_out(classes([12, 8]), val_fraction=0.5))
    return trainer.callback_metrics


class LogsTwice(Stateful):
    def validation_step(self, batch, batch_idx):
        self.log("val_x", 1.0)

    def on_validation_epoch_end(self):
        self.log("val_x", 9.0)


@pytest.mark.slow
def test_hook_of_the_epoch_replaces_the_value_of_the_step(tmp_path):
    assert float(fit(LogsTwice, tmp_path)["val/global/x"]) == 9


class LogsMoreLater(Stateful):
    """Logs another name from the second batch on, and another loss than the returned one."""

    def validation_step(self, batch, batch_idx):
        self.log_dict({"val_acc": 0.5, "val_loss": 2.0})
        if batch_idx:
            self.log("acc", 9.0)
        return torch.ones(())


def evaluate_with_facts(part, **facts):
    task, batch = LightningTask(), Batch(torch.zeros(1, 4), torch.zeros(1))
    task.facts = ModuleFacts(**facts)
    return task.evaluate(LogsMoreLater().eval(), [batch, batch], part)


def test_name_of_a_metric_that_a_later_step_logs_does_not_replace_the_metric():
    names = {"validation": {"val_acc": "acc", "val_loss": "loss"}}
    with pytest.warns(UserWarning, match="leaves out `acc`, which the steps"):
        assert evaluate_with_facts("val", logged_names=names) == (1.0, {"acc": 0.5})


@pytest.mark.parametrize("part", ["train", "val"])
@pytest.mark.filterwarnings("ignore:pl_fed leaves out")
def test_logged_loss_counts_on_training_samples_as_in_a_validation(part):
    names = {"validation": {"val_acc": "acc", "val_loss": "loss"}}
    loss, _ = evaluate_with_facts(part, logged_names=names, logged_losses=frozenset({"val"}))
    assert loss == 2


class LogsAnotherLoss(Stateful):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", 2 * loss)
        return loss


class LogsItsLoss(LogsAnotherLoss):
    def training_step(self, batch, batch_idx):
        self.log("train_loss", loss := self.loss(batch))
        return loss


@pytest.mark.slow
def test_loss_that_a_training_step_logs_beside_the_returned_one_has_a_column(tmp_path):
    metrics = fit(LogsAnotherLoss, tmp_path / "other")
    assert float(metrics["train/train_loss"]) == pytest.approx(2 * float(metrics["train/loss"]))
    assert "train/train_loss" not in fit(LogsItsLoss, tmp_path / "equal")


def logs_in_training(name):
    class Logs(Stateful):
        def training_step(self, batch, batch_idx):
            self.log(name, 7.0)
            return self.loss(batch)

    return Logs


@pytest.mark.parametrize("name", ["loss", "upload_bytes", "train_small_cohort", "cohort"])
def test_names_of_the_round_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"pl_fed's own `train/.* but got '{name}'"):
        fit(logs_in_training(name), tmp_path)


class SharesSteps(Stateful):
    """Has one evaluation for both parts, whose third parameter is no ``dataloader_idx``."""

    def validation_step(self, batch, batch_idx, stage="val"):
        self.log(f"{stage}_x", 1.0)

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx, stage="test")


def test_third_parameter_of_a_step_has_its_default():
    task, batch = LightningTask(), Batch(torch.zeros(1, 4), torch.zeros(1))
    values = [task.evaluate(SharesSteps().eval(), [batch], part)[1] for part in ("val", "test")]
    assert values == [{"x": 1.0}, {"x": 1.0}]


class LogsPlaces(Stateful):
    def validation_step(self, batch, batch_idx):
        self.log("a/dataloader_idx_0", 1.0)


def test_names_of_dataloaders_are_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="use another name"):
        fit(LogsPlaces, tmp_path)


def test_numbers_of_numpy_are_numbers():
    logs = StepLogs()
    logs.log("x", np.float32(3.5))
    logs.log("n", np.int64(2))
    assert {name: float(value) for name, value in logs.values().items()} == {"x": 3.5, "n": 2.0}


def test_logged_buffer_keeps_the_value_of_its_step():
    logs, samples = StepLogs(), torch.zeros(())
    for _ in range(3):
        samples += 4
        logs.log("samples", samples)
    assert float(logs.values()["samples"]) == 8  # the mean of 4, 8 and 12


def test_values_of_one_name_may_lie_on_two_devices():
    logs = StepLogs()
    logs.log("x", torch.tensor(2.0))
    logs.log("x", torch.ones((), device="meta"))
    assert logs.values()["x"].device.type == "meta"


def test_metric_that_vmap_does_not_support_is_not_undefined():
    def correlate(x):
        metric, logs = PearsonCorrCoef(), StepLogs()
        metric.update(x, x.square())
        logs.log("correlation", metric)
        return logs.values()["correlation"]

    x = torch.tensor([[0.0, 1.0, 3.0], [2.0, 1.0, 0.0]])
    assert 0.9 < float(correlate(x[0])) < 1
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(correlate)(x)


def test_metric_with_several_values_is_refused_with_its_entries():
    metric, logs = MinMaxMetric(MeanSquaredError()), StepLogs()
    metric.update(torch.ones(2), torch.zeros(2))
    logs.log("mse", metric)
    with pytest.raises(ValueError, match=r"one number but got a dict \(raw, max, min\)"):
        logs.values()


class LogsTokenMeans(Stateful):
    """Logs losses 1 of 3 tokens and 5 of 1 token, and returns them; ``how`` names the log."""

    how = "batch_size"

    def validation_step(self, batch, batch_idx):
        tokens, loss = (3, 1)[batch_idx], torch.tensor((1.0, 5.0)[batch_idx])
        self.total = getattr(self, "total", 0.0) + tokens * loss / 4
        if self.how == "batch_size":
            self.log("val_loss", loss, batch_size=tokens)
        if self.how == "sum":
            self.log("val_loss", tokens * loss / 4, reduce_fx="sum")
        if self.how == "plain":
            self.log("val_loss", loss)
        return loss

    def on_validation_epoch_end(self):
        if self.how == "hook":
            self.log("val_loss", self.total)


@pytest.mark.parametrize(
    ("how", "expected"), [("batch_size", 2.0), ("sum", 2.0), ("hook", 2.0), ("plain", 3.0)]
)
def test_logged_loss_with_a_mean_of_its_own_counts_as_in_a_plain_validation(how, expected):
    task, batch = LightningTask(), Batch(torch.zeros(1, 4), torch.zeros(1))
    task.facts = ModuleFacts(logged_names={"validation": {"val_loss": "loss"}})
    module = LogsTokenMeans().eval()
    module.how = how
    assert task.evaluate(module, [batch, batch], "val") == (expected, {})


def test_batch_without_a_counted_sample_has_no_weight_in_a_log():
    logs = StepLogs()
    logs.log("positives", 0.0, batch_size=0)
    logs.log("positives", 4.0, batch_size=2)
    assert logs.values() == {"positives": 4.0}


class LogsGradients(Stateful):
    def on_before_optimizer_step(self, optimizer):
        self.log_dict({f"norm_{name}": 1.0 for name in "abcde"})


def test_logs_of_gradient_hooks_are_left_out_with_one_warning(recwarn):
    task, net = LightningTask(), LogsGradients()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    task.call_gradient_hook("on_before_optimizer_step", net, optimizer)
    task.call_gradient_hook("on_before_optimizer_step", net, optimizer)
    (warning,) = recwarn
    message = "leaves out `norm_a`, `norm_b`, `norm_c` and 2 more, which `on_before_optimizer_step`"
    assert message in str(warning.message)


class KeepsItsBest(Stateful):
    """The best accuracy of all validations, as in a widespread template."""

    def __init__(self):
        super().__init__()
        self.acc, self.mean, self.best = MeanMetric(), MeanMetric(), MaxMetric()

    def validation_step(self, batch, batch_idx):
        self.acc(batch[1].float())
        self.log("val_acc", self.acc)
        self.log("val_mean", self.mean(batch[1].float()))

    def on_validation_epoch_end(self):
        self.best(self.acc.compute())
        self.log("val_best", self.best.compute())


@pytest.mark.slow
def test_metric_over_all_validations_is_said_to_begin_anew(tmp_path):
    with pytest.warns(UserWarning, match=r"The metrics `best` of KeepsItsBest, which a plain fit"):
        fit(KeepsItsBest, tmp_path)


def test_the_only_optimizer_may_be_toggled():
    """Lightning's own looked for the parameters of a client in the trainer's optimizer."""
    module = Stateful()
    with StepLogs().record(module), module.toggled_optimizer(module.configure_optimizers()):
        assert all(parameter.requires_grad for parameter in module.parameters())
    assert "toggle_optimizer" not in vars(module)


class LogsSum(Stateful):
    def training_step(self, batch, batch_idx):
        self.log("samples", float(len(batch[0])), reduce_fx="sum")
        self.log("mean", 1.0)
        return self.loss(batch)


def test_training_logs_are_said_to_be_means(tmp_path):
    with pytest.warns(UserWarning, match=r"^`train/samples` is the mean over local steps and"):
        metrics = fit(LogsSum, tmp_path)
    assert float(metrics["train/samples"]) == 3.5  # of (4 + 2) / 2 and 4
