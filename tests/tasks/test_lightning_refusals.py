"""Unsuitable LightningModules are refused in one sentence before training."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lit_federations import (
    float32,
    images,
    numbers,
    sentences,
    table,
)
from lit_modules import (
    LitAutoencoder,
    LitImages,
    LitLists,
    LitTable,
    LitTokens,
)
from small_federations import quiet_trainer, run_tried_rounds, shared_out
from tables import table_test
from torch import nn
from torchmetrics import MeanAbsoluteError
from torchmetrics.classification import BinaryAUROC, BinaryF1Score, MulticlassAccuracy

from pl_fed.attacks import Backdoor
from pl_fed.clients import Ditto, FedAvg, FedTilt, PerFedAvg, PFedMe
from pl_fed.tasks import Classification, LightningTask


def make_module(**members):
    """Return an autoencoder class with replaced members."""
    return type("Own", (LitAutoencoder,), members)()


def module_with_optimizer(build):
    return make_module(configure_optimizers=build)


def add_schedule(optimizer, **options):
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **options}}


def build_plateau_schedule(module):
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}


def log_elsewhere(module, batch, batch_idx):
    """Fail as Lightning's ``log`` does outside of a step that the trainer calls."""
    raise MisconfigurationException(
        "You are trying to `self.log()` but it is not managed by the `Trainer` control flow"
    )


def penalize_slope(module, batch, batch_idx):
    inputs = batch[0].requires_grad_()
    loss = module(inputs).square().mean()
    return loss + torch.autograd.grad(loss, inputs, create_graph=True)[0].square().sum()


def read_rate_of_trainer(module, batch, batch_idx):
    return module.trainer.optimizers[0].param_groups[0]["lr"]


def read_length_of_epoch(module, batch, batch_idx):
    return len(module.trainer.train_dataloader)


def log_metric_of_trainer(module, batch, batch_idx):
    module.log("val_copy", module.trainer.callback_metrics["val_loss"])


def set_criterion(module, stage):
    module.criterion = nn.MSELoss()


def read_own_datamodule(module, batch, batch_idx):
    raise AttributeError("'FederatedData' object has no attribute 'vocabulary'")


def fedavg_round(net, arrays=numbers, **settings):
    return run_tried_rounds(FedAvg(net), shared_out(arrays()), **settings)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


REFUSED = {
    "manual optimization": (
        lambda: FedAvg(make_module(automatic_optimization=False)),
        "`automatic_optimization` = True but got Own with False",
    ),
    "hooks of steps": (
        lambda: FedAvg(make_module(on_train_batch_end=None, optimizer_step=None)),
        "no hooks of single steps but got Own with `on_train_batch_end`, `optimizer_step`: move",
    ),
    "hooks of Lightning 1": (
        lambda: FedAvg(make_module(validation_epoch_end=lambda self, outputs: None)),
        "no hooks of Lightning 1 but got Own with `validation_epoch_end`, which Lightning 2 rem",
    ),
    "an iterator": (
        lambda: FedAvg(make_module(training_step=lambda self, dataloader_iter: None)),
        r"`training_step` of Own to take \(batch, batch_idx\) but got dataloader_iter",
    ),
    "hidden states between steps": (
        lambda: FedAvg(make_module(training_step=lambda self, batch, batch_idx, hiddens: None)),
        r"`training_step` of Own to take \(batch, batch_idx\) but got hiddens, too, which",
    ),
    "a criterion": (
        lambda: FedAvg(make_module(), criterion=nn.MSELoss()),
        "no argument `criterion` for Own, a LightningModule with a `training_step`, but got MSE",
    ),
    "another task": (
        lambda: FedAvg(make_module(), task=Classification()),
        "no argument `task` for Own, .* but got Classification",
    ),
    "a task without steps": (
        lambda: FedAvg(nn.Linear(1, 1), task=LightningTask()),
        "LightningModule with a `training_step` for the task LightningTask but got Linear",
    ),
    "two optimizers": (
        lambda: fedavg_round(
            module_with_optimizer(
                lambda m: [adam(m.encoder.parameters()), adam(m.decoder.parameters())]
            )
        ),
        "`configure_optimizers` of Own to return one optimizer but got 2",
    ),
    "no optimizer": (
        lambda: fedavg_round(module_with_optimizer(lambda m: None)),
        "`configure_optimizers` of Own to return an optimizer but got None",
    ),
    "a part of the parameters": (
        lambda: fedavg_round(module_with_optimizer(lambda m: adam(m.encoder.parameters()))),
        "all trainable parameters but got one without `decoder.weight`: set its requires_grad=Fal",
    ),
    "an optimizer that evaluates the loss itself": (
        lambda: fedavg_round(module_with_optimizer(lambda m: ClosureSGD(m.parameters(), 0.1))),
        r"optimizer ClosureSGD to step from the gradients .* failed \('NoneType' object is not",
    ),
    "an optimizer around another one": (
        lambda: fedavg_round(module_with_optimizer(lambda m: Around(adam(m.parameters())))),
        "Around of Own.configure_optimizers to be built from parameter groups .* but that failed",
    ),
    "a schedule of every second epoch": (
        lambda: fedavg_round(
            module_with_optimizer(lambda m: add_schedule(adam(m.parameters()), frequency=2))
        ),
        "or interval epoch and frequency 1, but got epoch and 2",
    ),
    "a plateau": (
        lambda: fedavg_round(module_with_optimizer(build_plateau_schedule)),
        "to be a schedule of epochs or steps but got ReduceLROnPlateau: set `model.lr_scheduler`",
    ),
    "another batch": (
        lambda: fedavg_round(LitImages()),
        r"`training_step` of LitImages to take inputs \[4\] .* but that failed:",
    ),
    "a log of another module": (
        lambda: fedavg_round(make_module(training_step=log_elsewhere)),
        r"that failed: You are trying .* flow: pl_fed records `self.log` of the module that it cal",
    ),
    "the trainer's optimizer": (
        lambda: fedavg_round(make_module(training_step=read_rate_of_trainer)),
        r"failed: .*: the trainer has no local optimizers, so call `self.optimizers\(\)`",
    ),
    "the length of the trainer's dataloader": (
        lambda: fedavg_round(make_module(training_step=read_length_of_epoch)),
        "failed: .*: the trainer has a dataloader of clients, in training only, so give the module",
    ),
    "the trainer's metrics": (
        lambda: fedavg_round(make_module(validation_step=log_metric_of_trainer)),
        "failed: .*: the trainer has metrics over clients, such as `val/global/loss`, so compute",
    ),
    "an attribute that an uncalled hook sets": (
        lambda: fedavg_round(
            make_module(training_step=lambda m, batch, _: m.missing(batch[0]), setup=set_criterion)
        ),
        "'missing': pl_fed does not call `setup`, so set the attribute in `__init__`",
    ),
    "an attribute of the user's datamodule": (
        lambda: fedavg_round(make_module(training_step=read_own_datamodule)),
        "no attribute 'vocabulary': .* is `self.trainer.datamodule.dataset.datamodule`",
    ),
    "no loss": (
        lambda: fedavg_round(make_module(training_step=lambda self, batch, batch_idx: "no")),
        "`training_step` to return a loss, or a dict with the tensor `loss`, but got str",
    ),
    "a loss without a gradient, under an objective with a term of its own": (
        lambda: run_tried_rounds(
            Ditto(make_module(training_step=lambda m, batch, _: m(batch[0]).mean().detach())),
            shared_out(numbers()),
        ),
        "the loss of `training_step` of Own to have a gradient but got a number without one",
    ),
    "a loss of gradients of an earlier step": (
        lambda: fedavg_round(make_module(training_step=step_with_gradients)),
        "`training_step` of Own to read no `.grad` of parameters, which is None there",
    ),
    "a logged tensor": (
        lambda: fedavg_round(
            make_module(validation_step=lambda self, batch, batch_idx: self.log("val_x", batch[0]))
        ),
        r"self.log\('val_x', ...\) to take one number but got shape",
    ),
    "a reserved name": (
        lambda: fedavg_round(
            make_module(validation_step=lambda self, batch, batch_idx: self.log("val_samples", 1.0))
        ),
        "that no statistic over clients has .* but got 'samples'",
    ),
    "a metric of several numbers": (
        lambda: fedavg_round(
            make_module(validation_step=log_classes, classes=MulticlassAccuracy(3, average=None))
        ),
        r"metric of self.log\('val_classes', ...\) to give one number but got shape \[3\]",
    ),
    "a further metric with a logged name": (
        lambda: fedavg_round(LitTable(), table, metrics={"auroc": BinaryAUROC()}),
        "`federation.metrics` to have names that LitTable does not log but got `auroc`: use",
    ),
    "a further metric without predictions": (
        lambda: fedavg_round(LitTokens(), sentences, metrics=[BinaryF1Score()]),
        "metric `binary_f1_score` of the task LightningTask to take outputs of shape .* failed",
    ),
    "a further metric of a module without forward": (
        lambda: fedavg_round(
            type("Own", (LitLists,), {"configure_optimizers": lambda m: adam(m.parameters())})(),
            table,
            metrics=[BinaryAUROC()],
        ),
        "Own to have a `predict_step`, or to take inputs .*: define `predict_step`",
    ),
    "a further metric of a module whose step changes the inputs": (
        lambda: fedavg_round(
            make_module(
                forward=lambda m, x: m.decoder(x),
                training_step=lambda m, batch, _: m(m.encoder(batch[0])).square().mean(),
            ),
            metrics=[MeanAbsoluteError()],
        ),
        r"Own to have a `predict_step`, .* that failed \(mat1 and mat2 .*\): define `predict_step`",
    ),
    "a further metric of a failing predict_step": (
        lambda: fedavg_round(
            make_module(predict_step=lambda m, batch, batch_idx: batch["x"]),
            metrics=[MeanAbsoluteError()],
        ),
        "`predict_step` of Own to take the batches of `validation_step`, .* but that failed: tuple",
    ),
    "a schedule under pFedMe": (
        lambda: run_tried_rounds(PFedMe(LitImages(norm=False)), shared_out(images())),
        "`lr_scheduler` to be None, as it would scale the steps of both models, but got",
    ),
    "a gradient for the inputs under PerFedAvg": (
        lambda: run_tried_rounds(
            PerFedAvg(make_module(training_step=penalize_slope)), shared_out(numbers())
        ),
        r"not to call `requires_grad_\(\)` under .* but got test_lightning_refusals.py:\d+: inputs",
    ),
    "losses of samples": (
        lambda: run_tried_rounds(FedTilt(LitTable()), shared_out(table())),
        "FedTilt tilts sample losses",
    ),
    "a joint batch": (
        lambda: LightningTask(batch="joint").build_batch({"x": 1}, torch.zeros(1)),
        'both dicts for a LightningTask with batch="joint" but got dict and Tensor',
    ),
    "a backdoor": (
        lambda: fedavg_round(LitImages(), images, attack=Backdoor(target=0), fraction=0.4),
        "for Backdoor, .* the task LightningTask without classes: .* the net without the steps",
    ),
    "padding": (
        lambda: run_tried_rounds(FedAvg(LitTable()), shared_out(table([5, 8])), engine="stacked"),
        "one_by_one_compiled or auto for the loss of `training_step`, .* minibatches of several",
    ),
}  # fmt: skip


def sum_gradients(module):
    return sum(p.grad.square().sum() for p in module.parameters() if p.grad is not None)


def step_with_gradients(self, batch, batch_idx):
    return self(batch[0]).square().mean() + sum_gradients(self)


def step_with_logged_gradients(self, batch, batch_idx):
    self.log("gradients", sum_gradients(self))
    return self(batch[0]).square().mean()


class ClosureSGD(torch.optim.SGD):
    """SGD that evaluates the loss in its step, as sharpness-aware minimization does."""

    def step(self, closure=None):
        loss = closure()
        super().step()
        return loss


class Around(torch.optim.Optimizer):
    """An optimizer around another one, without a state of its own."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


@pytest.mark.slow
def test_loss_that_needs_more_than_two_samples_is_accepted():
    def training_step(self, batch, batch_idx):
        loss = self(batch[0]).square().mean()
        return loss if len(batch[0]) > 2 else loss.detach()

    fedavg_round(make_module(training_step=training_step), engine="one_by_one")


def log_classes(self, batch, batch_idx):
    self.classes.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    self.log("val_classes", self.classes)


@pytest.mark.slow
@table_test(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_unsuitable_modules_are_refused_in_one_sentence(call, words):
    with pytest.raises((ValueError, TypeError), match=f"^Expected .*{words}") as raised:
        call()
    assert "failed: Expected `" not in str(raised.value), "one sentence of pl_fed"


def test_log_of_gradients_of_an_earlier_step_gets_a_warning():
    with pytest.warns(UserWarning, match="Own logs a value of `.grad` of parameters"):
        fedavg_round(make_module(training_step=step_with_logged_gradients))


def weigh_penalty_by_the_trainer(self, batch, batch_idx):
    weight = self.global_step + 1 / self.trainer.num_training_batches + self.trainer.is_last_batch
    weight += len(self.trainer.datamodule.train_dataloader()) + len(self.trainer.callback_metrics)
    return weight * sum(parameter.square().sum() for parameter in self.parameters())


def log_best_loss(self, batch, batch_idx):
    self.log("val_best", self.trainer.callback_metrics.get("val_loss", torch.zeros(())))


@pytest.mark.slow
def test_reads_of_the_trainer_that_mean_others_than_in_a_plain_fit_get_a_warning(tmp_path):
    net = make_module(training_step=weigh_penalty_by_the_trainer, validation_step=log_best_loss)
    client = FedAvg(net)
    with pytest.warns(UserWarning, match="Own reads") as warned:
        quiet_trainer(tmp_path, 1).fit(client, shared_out(float32(numbers())))
    sentences = [str(warning.message) for warning in warned if "Own reads" in str(warning.message)]
    assert [sentence.split(",")[0] for sentence in sentences] == [
        "`training_step` of Own reads `trainer.callback_metrics`",
        "`training_step` of Own reads `global_step`",
        "`training_step` of Own reads `trainer.is_last_batch`",
        "`training_step` of Own reads `trainer.num_training_batches`",
        "`training_step` of Own reads `train_dataloader` of the trainer or of its datamodule",
        "The evaluation by `validation_step` of Own reads `trainer.callback_metrics`",
    ]


def test_warning_names_hooks_that_are_not_called():
    with pytest.warns(UserWarning, match="does not call `on_train_epoch_end`, `setup` of Own"):
        FedAvg(make_module(on_train_epoch_end=lambda self: None, setup=lambda self, stage: None))
