"""Unchanged LightningModules under algorithms and engines, beside plain Lightning fits."""

import copy
import functools
import sys
import warnings

import lightning
import numpy as np
import pytest
import torch
import yaml
from lit_modules import (
    LitAutoencoder,
    LitImages,
    LitLists,
    LitRegression,
    LitTable,
    LitTemplate,
    LitTokens,
)
from small_federations import mlp, run_rounds, seeded, sgd, shared_out
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

import pl_fed
from pl_fed.aggregators import Median
from pl_fed.attacks import Backdoor, SignFlipping
from pl_fed.clients import APFL, Ditto, FedAvg, FedRep, FedTilt, PerFedAvg, PFedMe, Scaffold
from pl_fed.command.main import main
from pl_fed.data import Arrays
from pl_fed.samplers import All
from pl_fed.tasks import Classification, LightningTask
from pl_fed.tasks.step_logs import StepLogs
from pl_fed.trees import select
from pl_fed.types import Batch

SIZES = [8, 8, 8]


def owners(sizes):
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(samples, classes, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(classes, (samples,), generator=generator)


def images(sizes=SIZES):
    n = sum(sizes)
    return Arrays(draw(n, 1, 6, 6), labels(n, 3), owners(sizes), num_classes=3)


def table(sizes=SIZES):
    n = sum(sizes)
    return Arrays(draw(n, 4), labels(n, 2), owners(sizes), num_classes=2)


def numbers(sizes=SIZES):
    n = sum(sizes)
    return Arrays(draw(n, 4), draw(n, 1, seed=2), owners(sizes))


def sentences(sizes=SIZES):
    n, generator = sum(sizes), torch.Generator().manual_seed(0)
    ids = torch.randint(1, 11, (n, 6), generator=generator)
    lengths = torch.randint(2, 7, (n, 1), generator=generator)
    mask = (torch.arange(6) < lengths).long()
    targets = torch.where(mask.bool(), ids.roll(-1, 1), -100)
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    return Arrays(batch, {"labels": targets}, owners(sizes))


MODULES = {
    "images": (LitImages, images),
    "images without BatchNorm": (lambda: LitImages(norm=False), images),
    "table": (LitTable, table),
    "regression": (LitRegression, numbers),
    "autoencoder": (LitAutoencoder, numbers),
    "tokens": (LitTokens, sentences),
}
every_module = pytest.mark.parametrize(("make", "arrays"), MODULES.values(), ids=MODULES)


def trained_values(report):
    """The values of a report that steps gave, without counts and norms of the round."""
    counts = {"update_norm", "benign_distance", *pl_fed.engine.base.ROUND_NUMBERS}
    return {k: v for k, v in report.items() if k.startswith("train/") and k[6:] not in counts}


@every_module
@pytest.mark.parametrize("algorithm", [FedAvg, Ditto, APFL, FedRep])
def test_engines_agree(make, arrays, algorithm):
    client, data = algorithm(seeded(make), local_epochs=2), shared_out(arrays())
    one_by_one = run_rounds(client, data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stacked = run_rounds(client, data, engine="stacked", chunk_size=2)
    said = [str(warning.message) for warning in caught if "one by one" in str(warning.message)]
    assert len(said) == (make is LitImages), "only BatchNorm cannot be stacked"
    assert one_by_one.distance(stacked) < 1e-10
    for report, other in zip(one_by_one.reports, stacked.reports):
        values, others = trained_values(report), trained_values(other)
        assert values.keys() == others.keys()
        assert all(abs(float(values[k]) - float(others[k])) < 1e-10 for k in values)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one_compiled", "stacked_compiled"])
def test_compiled_engines_agree(engine):
    client, data = Ditto(seeded(LitTable)), shared_out(table())
    outcomes = [run_rounds(client, data, engine=name) for name in ("one_by_one", engine)]
    assert outcomes[0].distance(outcomes[1]) < 1e-10


@pytest.mark.parametrize(
    "make", [LitImages, LitTable, LitAutoencoder], ids=lambda kind: kind.__name__
)
def test_one_client_is_the_plain_lightning_fit(make, tmp_path):
    """FedAvg with one client and SGD is a fit; momentum would restart in each round."""
    arrays = {LitImages: images, LitTable: table, LitAutoencoder: numbers}[make]([10])
    net = seeded(lambda: LitImages(momentum=0.0) if make is LitImages else make()).double()
    epochs = 4
    settings = {"optimizer": sgd(0.2)} if make is LitTable else {}
    plain = copy.deepcopy(net)
    if settings:  # AdamW keeps a state over epochs, and local optimizers restart
        plain.configure_optimizers = lambda: torch.optim.SGD(plain.parameters(), lr=0.2)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    data = shared_out(arrays)
    inputs, targets, *_ = data.clients.to(torch.device("cpu"), torch.float64).training_samples(0)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=4)
    trainer.fit(plain, loader)
    outcome = run_rounds(FedAvg(net, **settings), data, rounds=epochs, shuffle=False)
    row = nn.utils.parameters_to_vector(plain.parameters()).detach()
    torch.testing.assert_close(outcome.w, row, rtol=0, atol=1e-10)
    start = nn.utils.parameters_to_vector(net.parameters()).detach()
    assert float((outcome.w - start).abs().max()) > 1e-2
    if make is LitImages:
        norm = plain.net[1]
        statistics = torch.cat([norm.running_mean, norm.running_var])
        torch.testing.assert_close(outcome.w_statistics, statistics, rtol=0, atol=1e-10)


def test_logs_of_training_are_means_over_local_steps_and_clients():
    arrays, net = table([4, 8]), seeded(LitTable).double()
    data = shared_out(arrays)
    report = run_rounds(FedAvg(net, sgd(0.0)), data, rounds=1).reports[0]
    clients = [arrays.targets[arrays.client == k].double().mean() for k in range(2)]
    assert float(report["train/positives"]) == pytest.approx(float(sum(clients)) / 2)
    assert "train/positives" in trained_values(report)
    several = run_rounds(Ditto(net, optimizer=sgd(0.0)), data, rounds=1).reports[0]
    assert {"train/global/positives", "train/personal/positives"} <= several.keys()
    assert "train/positives" not in several


class LitLogger(LitTable):
    """Logs a metric object in training, and numbers of Python."""

    def __init__(self):
        super().__init__()
        self.train_auroc = BinaryAUROC(validate_args=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = super().training_step(batch, batch_idx)["loss"]
        self.train_auroc(self(x).sigmoid().detach(), y)
        self.log("train_auroc", self.train_auroc)
        self.log("step", float(batch_idx))
        return loss


def test_a_metric_object_in_training_has_the_value_of_each_step():
    arrays, net = table([8, 8]), seeded(LitLogger).double()
    data = shared_out(arrays, batch_size=8)
    client = FedAvg(net, sgd(0.0))
    report = run_rounds(client, data, rounds=2).reports[1]
    scores, y = net(arrays.inputs).sigmoid(), arrays.targets
    aurocs = [BinaryAUROC()(scores[arrays.client == k], y[arrays.client == k]) for k in range(2)]
    assert float(report["train/auroc"]) == pytest.approx(float(sum(aurocs)) / 2)
    assert float(report["train/step"]) == 0
    assert not client.global_model.train_auroc.update_called
    assert "log" not in vars(client.global_model)


def set_up(make, arrays, algorithm=Ditto, tmp_path=None, rounds=1, federation=None, **settings):
    """Fit, and return the trainer, the client and the data."""
    client = algorithm(seeded(make), **settings)
    data = shared_out(arrays, val_fraction=0.25, test_fraction=0.25)
    trainer = trainer_of(tmp_path, rounds, federation)
    trainer.fit(client, data)
    return trainer, client, data


def trainer_of(folder, rounds, federation=None):
    return pl_fed.Trainer(
        federation or pl_fed.Federation(All(), seed=0), run_dir=folder, max_epochs=rounds,
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def float32(arrays):
    x, y = (t.float() if t.is_floating_point() else t for t in (arrays.inputs, arrays.targets))
    return Arrays(x, y, arrays.client, num_classes=arrays.num_classes)


def test_evaluation_steps_give_each_clients_metrics(tmp_path):
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


def test_a_step_without_a_returned_loss_has_the_logged_one_or_that_of_training(tmp_path):
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
        assert loss == pytest.approx(float(errors.square().mean()))
        assert values["mae"] == pytest.approx(float(errors.abs().mean()))
        assert values["r2"] < 1


def test_the_mean_of_a_logged_number_is_weighted_by_samples():
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


def test_a_logged_metric_chooses_models(tmp_path):
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
    with pytest.raises(ValueError, match=r"`federation.monitor` to be one of mae, r2, loss for"):
        run_rounds(FedAvg(LitRegression()), shared_out(numbers()), monitor="f1")


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


def test_the_module_reads_the_round_from_its_trainer(tmp_path):
    rounds = []

    class LitCounter(LitAutoencoder):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if self.training:
                rounds.append((self.current_epoch, self.global_step, self.trainer.max_epochs))
            assert loss.device == self.device
            return loss

    set_up(LitCounter, float32(numbers([8])), FedAvg, tmp_path=tmp_path, rounds=3)
    assert {0, 1, 2} == {epoch for epoch, _, limit in rounds if limit == 3}
    assert all(epoch == step for epoch, step, _ in rounds)


@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_a_widespread_template_runs_unchanged(tmp_path, engine):
    def make():
        schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        return LitTemplate(mlp(), functools.partial(torch.optim.Adam, lr=0.01), schedule)

    n = 48
    arrays = Arrays(draw(n, 4).float(), labels(n, 3), owners([16] * 3), num_classes=3)
    federation = pl_fed.Federation(All(), seed=0, engine=pl_fed.EngineOptions(engine))
    with pytest.warns(UserWarning, match="does not call `on_train_start` of LitTemplate"):
        trainer, client, data = set_up(
            make, arrays, tmp_path=tmp_path, rounds=2, federation=federation
        )
    assert client.optimizers().param_groups[0]["lr"] == 0.01 / 4
    logged = trainer.callback_metrics
    for model in ("global", "personal"):
        net = trainer.federation.model_of(0, model)
        batch = data.clients.batch(data.clients.val.samples(0))
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(net(batch.inputs), batch.targets))
        table = trainer.federation.metrics("val")[model].per_client()
        assert float(table["loss"][0]) == pytest.approx(loss, rel=1e-5)
        assert torch.equal(table["acc"], table["acc_best"]), "metrics are reset between clients"
        assert {f"train/{model}/acc", f"train/{model}/loss", f"val/{model}/acc_std"} <= set(logged)


def test_lists_of_a_module_hold_one_clients_outputs(tmp_path):
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


def test_the_optimizer_and_the_schedule_are_those_of_the_module(tmp_path):
    _, client, data = set_up(LitImages, float32(images()), tmp_path=tmp_path, rounds=2)
    (group, personal) = client.optimizers().param_groups
    assert type(client.optimizers().optimizer) is torch.optim.SGD
    assert (group["lr"], group["momentum"]) == (0.1 / 4, 0.5)
    assert personal["lr"] == group["lr"]
    data = shared_out(table())
    built = FedAvg(LitTable()).objective.build_optimizer({"global": [nn.Parameter(torch.ones(2))]})
    assert (type(built), built.defaults["weight_decay"]) == (torch.optim.AdamW, 0.1)
    outcomes = [
        run_rounds(FedAvg(seeded(LitTable), **settings), data)
        for settings in ({}, {"optimizer": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)})
    ]
    assert outcomes[0].distance(outcomes[1]) == 0
    assert run_rounds(FedAvg(seeded(LitTable), sgd(0.05)), data).distance(outcomes[0]) > 1e-3


@pytest.mark.slow
def test_a_resumed_fit_with_a_schedule_is_bit_equal(tmp_path):
    arrays = float32(images())
    _, complete, data = set_up(LitImages, arrays, tmp_path=tmp_path / "all", rounds=4)
    first, _, _ = set_up(LitImages, arrays, tmp_path=tmp_path / "half", rounds=2)
    path = tmp_path / "half.ckpt"
    first.save_checkpoint(path)
    resumed = Ditto(seeded(LitImages, seed=1))
    trainer_of(tmp_path / "rest", 4).fit(resumed, data, ckpt_path=path)
    assert torch.equal(resumed.row("global").data, complete.row("global").data)
    rates = [c.optimizers().param_groups[0]["lr"] for c in (resumed, complete)]
    assert rates == [0.1 / 16] * 2


def test_further_algorithms_attacks_and_aggregators_take_a_module():
    data = shared_out(numbers([6, 8, 8, 8]))  # PerFedAvg takes parts of minibatches
    for make in (lambda: PerFedAvg(LitAutoencoder()), lambda: PFedMe(LitAutoencoder()),
                 lambda: Scaffold(LitAutoencoder())):  # fmt: skip
        report = run_rounds(make(), data).reports[-1]
        assert torch.isfinite(torch.as_tensor(report["train/loss"]))
    report = run_rounds(
        FedAvg(LitAutoencoder()), data, attack=SignFlipping(), fraction=0.25, aggregator=Median()
    ).reports[-1]
    assert report["train/byzantine"] == 1


class LitBranch(LitAutoencoder):
    """Branches on data."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss.item() > 1e3:
            loss = loss / 2
        return loss


def test_a_module_that_cannot_be_stacked_names_the_line():
    data = shared_out(numbers())
    client = FedAvg(seeded(LitBranch))
    with pytest.warns(UserWarning, match=r"one by one.*test_lightning_task.py:\d+: if loss.item()"):
        outcome = run_rounds(client, data, engine="stacked")
    assert outcome.distance(run_rounds(client, data)) == 0


def lit(**members):
    """An autoencoder with other members."""
    return type("Own", (LitAutoencoder,), members)()


def with_optimizer(build):
    return lit(configure_optimizers=build)


def scheduled(optimizer, **options):
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **options}}


def plateau(module):
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}


def fedavg_round(net, arrays=numbers, **settings):
    return run_rounds(FedAvg(net), shared_out(arrays()), **settings)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


REFUSED = {
    "manual optimization": (
        lambda: FedAvg(lit(automatic_optimization=False)),
        "`automatic_optimization` = True but got Own with False",
    ),
    "hooks of steps": (
        lambda: FedAvg(lit(on_after_backward=None, optimizer_step=None)),
        "no hooks of single steps but got Own with `on_after_backward`, `optimizer_step`: move",
    ),
    "an iterator": (
        lambda: FedAvg(lit(training_step=lambda self, dataloader_iter: None)),
        r"`training_step` of Own to take \(batch, batch_idx\) but got dataloader_iter",
    ),
    "a criterion": (
        lambda: FedAvg(lit(), criterion=nn.MSELoss()),
        "no argument `criterion` for Own, a LightningModule with a `training_step`, but got MSE",
    ),
    "another task": (
        lambda: FedAvg(lit(), task=Classification()),
        "no argument `task` for Own, .* but got Classification",
    ),
    "a task without steps": (
        lambda: FedAvg(nn.Linear(1, 1), task=LightningTask()),
        "LightningModule with a `training_step` for the task LightningTask but got Linear",
    ),
    "two optimizers": (
        lambda: fedavg_round(
            with_optimizer(lambda m: [adam(m.encoder.parameters()), adam(m.decoder.parameters())])
        ),
        "`configure_optimizers` of Own to return one optimizer but got 2",
    ),
    "no optimizer": (
        lambda: fedavg_round(with_optimizer(lambda m: None)),
        "`configure_optimizers` of Own to return an optimizer but got None",
    ),
    "parameter groups": (
        lambda: fedavg_round(
            with_optimizer(
                lambda m: adam([{"params": m.encoder.parameters()},
                                {"params": m.decoder.parameters(), "lr": 0.01}])
            )
        ),
        "Own.configure_optimizers to have one parameter group but got 2",
    ),
    "a part of the parameters": (
        lambda: fedavg_round(with_optimizer(lambda m: adam(m.encoder.parameters()))),
        "all trainable parameters but got one without `decoder.weight`: set its requires_grad=Fal",
    ),
    "a schedule of steps": (
        lambda: fedavg_round(
            with_optimizer(lambda m: scheduled(adam(m.parameters()), interval="step"))
        ),
        "interval epoch and frequency 1 but got step and 1",
    ),
    "a plateau": (
        lambda: fedavg_round(with_optimizer(plateau)),
        "to be a schedule of epochs but got ReduceLROnPlateau: set `model.lr_scheduler`",
    ),
    "another batch": (
        lambda: fedavg_round(LitImages()),
        r"`training_step` of LitImages to take inputs \[4\] .* but that failed:",
    ),
    "no loss": (
        lambda: fedavg_round(lit(training_step=lambda self, batch, batch_idx: None)),
        "`training_step` to return a loss, or a dict with the tensor `loss`, but got NoneType",
    ),
    "a logged tensor": (
        lambda: fedavg_round(
            lit(validation_step=lambda self, batch, batch_idx: self.log("val_x", batch[0]))
        ),
        r"self.log\('x', ...\) to take one number but got shape",
    ),
    "a reserved name": (
        lambda: fedavg_round(
            lit(validation_step=lambda self, batch, batch_idx: self.log("val_samples", 1.0))
        ),
        "that no statistic over clients has .* but got 'samples'",
    ),
    "a metric of several numbers": (
        lambda: fedavg_round(
            lit(validation_step=log_classes, classes=MulticlassAccuracy(3, average=None))
        ),
        r"metric of self.log\('classes', ...\) to give one number but got shape \[3\]",
    ),
    "further metrics": (
        lambda: fedavg_round(LitTable(), table, metrics=[BinaryAUROC()]),
        "no argument `federation.metrics` for the task LightningTask but got binary_auroc: log",
    ),
    "losses of samples": (
        lambda: run_rounds(FedTilt(LitTable()), shared_out(table())),
        "FedTilt tilts sample losses",
    ),
    "a joint batch": (
        lambda: LightningTask(batch="joint").build_batch({"x": 1}, torch.zeros(1)),
        'both dicts for a LightningTask with batch="joint" but got dict and Tensor',
    ),
    "a backdoor": (
        lambda: fedavg_round(LitImages(), images, attack=Backdoor(target=0), fraction=0.4),
        "classes for Backdoor, .* but got the task LightningTask without classes",
    ),
    "padding": (
        lambda: run_rounds(FedAvg(LitTable()), shared_out(table([5, 8])), engine="stacked"),
        "one_by_one_compiled or auto for the loss of `training_step`, .* minibatches of several",
    ),
}  # fmt: skip


def log_classes(self, batch, batch_idx):
    self.classes.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
    self.log("val_classes", self.classes)


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_modules_that_do_not_fit_get_one_sentence(call, words):
    with pytest.raises((ValueError, TypeError), match=f"^Expected .*{words}") as raised:
        call()
    assert "failed: Expected `" not in str(raised.value), "one sentence of pl_fed"


def test_hooks_that_are_not_called_are_named():
    with pytest.warns(UserWarning, match="does not call `on_train_epoch_end`, `setup` of Own"):
        FedAvg(lit(on_train_epoch_end=lambda self: None, setup=lambda self, stage: None))


@pytest.mark.parametrize(
    ("structure", "inputs", "targets", "expected"),
    [
        (None, 1, 2, (1, 2)),
        (None, {"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        (None, {"a": 1}, 2, ({"a": 1}, 2)),
        (None, (1, 2), (3,), ((1, 2), (3,))),
        ("pair", {"a": 1}, {"b": 2}, ({"a": 1}, {"b": 2})),
        ("joint", (1, 2), 3, (1, 2, 3)),
    ],
)
def test_a_batch_has_the_structure_that_is_asked_for(structure, inputs, targets, expected):
    assert LightningTask(structure).build_batch(inputs, targets) == expected


def test_logs_reduce_as_they_are_asked_to():
    logs = StepLogs()
    for size, value in ((1, 1.0), (3, 5.0)):
        logs.size = size
        logs.log("val/mean", value)
        logs.log("sum", torch.tensor(value), reduce_fx="sum")
        logs.log_dict({"min": value, "max": value}, reduce_fx=torch.min)
        logs.log("max", value, reduce_fx="max")
    values = {name: float(value) for name, value in logs.values().items()}
    assert values == {"mean": 4.0, "sum": 6.0, "min": 1.0, "max": 5.0}
    with pytest.raises(ValueError, match=r"`reduce_fx` .* to be one of mean, sum, min, max but"):
        logs.log("x", 1.0, reduce_fx="median")
    with pytest.raises(TypeError, match="a metric of torchmetrics but got str"):
        logs.log("x", "1")


def test_a_log_is_lower_or_higher_by_its_name():
    class LitScores(LitAutoencoder):
        def validation_step(self, batch, batch_idx):
            self.log_dict({"val_hits": 1.0, "val_recon_error": 1.0, "val_bits": 1.0})

    client = FedAvg(LitScores(), task=LightningTask(lower_is_better=["val_bits"]))
    run_client = copy.deepcopy(client)
    federation = pl_fed.Federation(All(), seed=0)
    federation.setup(run_client, shared_out(float32(numbers())), "fit")
    assert run_client.task.measures == {"hits": True, "recon_error": False, "bits": False}


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [False, True])
def test_the_command_line_takes_a_module_by_its_path(tmp_path, chosen):
    """The module's optimizer is that of the run, unless the config chooses one."""
    config = {
        "model": {
            "class_path": "pl_fed.clients.FedAvg",
            "init_args": {"net": {"class_path": "lit_modules.LitAutoencoder"}},
        },
        "data": {"dataset": {"class_path": "pl_fed.data.Npz",
                             "init_args": {"path": str(tmp_path / "data.npz")}},
                 "partitioner": None},
        "federation": {"sampler": {"class_path": "pl_fed.samplers.All"}},
        "trainer": {"max_epochs": 1, "default_root_dir": str(tmp_path), "accelerator": "cpu",
                    "enable_progress_bar": False, "enable_model_summary": False},
    }  # fmt: skip
    if chosen:
        optimizer = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.02}}
        config["model"]["init_args"]["optimizer"] = optimizer
    arrays = float32(numbers([16, 16]))
    np.savez(tmp_path / "data.npz", x=arrays.inputs, y=arrays.targets, client=arrays.client)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    rates = []

    class Watched(FedAvg):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            rates.append((type(optimizer), optimizer.param_groups[0]["lr"]))
            return optimizer

    sys.modules[__name__].Watched = Watched  # by its path, as a config names it
    Watched.__qualname__ = "Watched"
    main(["fit", "--config", str(tmp_path / "c.yaml"), "--model", f"{__name__}.Watched"])
    expected = (torch.optim.Adam, 0.02) if chosen else (torch.optim.SGD, 0.3)
    assert set(rates) == {expected}
    assert list(tmp_path.glob("*/per_client.csv"))
