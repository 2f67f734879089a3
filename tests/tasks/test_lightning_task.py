"""Unchanged LightningModules under algorithms and engines, beside plain Lightning fits."""

import copy
import functools
import sys
import warnings
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
import yaml
from exhaustive import exhaustive_but, exhaustive_for
from lit_federations import (
    draw,
    float32,
    images,
    labels,
    numbers,
    owners,
    sentences,
    set_up,
    table,
    trainer_of,
)
from lit_modules import (
    LitAutoencoder,
    LitImages,
    LitRegression,
    LitTable,
    LitTemplate,
    LitTokens,
)
from small_federations import classes, mlp, run_tried_rounds, seeded, sgd, shared_out
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC

import pl_fed
from pl_fed.aggregators import QFFL, FLTrust, Median
from pl_fed.attacks import SignFlipping
from pl_fed.clients import APFL, Ditto, FedAvg, FedRep, PerFedAvg, PFedMe, Scaffold
from pl_fed.command.main import main
from pl_fed.data import Arrays
from pl_fed.samplers import All
from pl_fed.tasks import LightningTask
from pl_fed.tasks.module_facts import ModuleFacts
from pl_fed.tasks.module_steps import call_step
from pl_fed.types import Batch

MODULES = {
    "images": (LitImages, images),
    "images without BatchNorm": (lambda: LitImages(norm=False), images),
    "table": (LitTable, table),
    "regression": (LitRegression, numbers),
    "autoencoder": (LitAutoencoder, numbers),
    "tokens": (LitTokens, sentences),
}
every_module = pytest.mark.parametrize(("make", "arrays"), MODULES.values(), ids=MODULES)


def step_values(report):
    """Return the logged values of the steps, without counts and norms of the round."""
    counts = {"update_norm", "benign_distance", *pl_fed.engine.base.ROUND_NUMBERS}
    return {k: v for k, v in report.items() if k.startswith("train/") and k[6:] not in counts}


@exhaustive_for(
    "Ditto-images",
    "Ditto-table",
    "Ditto-regression",
    "Ditto-autoencoder",
    "Ditto-tokens",
    "APFL-images*",
    "APFL-regression",
    "APFL-autoencoder",
    "APFL-tokens",
    "FedRep-images*",
    "FedRep-table",
    "FedRep-regression",
    "FedRep-tokens",
)
@pytest.mark.slow
@every_module
@pytest.mark.parametrize("algorithm", [FedAvg, Ditto, APFL, FedRep])
def test_engines_agree_for_modules(make, arrays, algorithm):
    client, data = algorithm(seeded(make), local_epochs=2), shared_out(arrays())
    one_by_one = run_tried_rounds(client, data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stacked = run_tried_rounds(client, data, engine="stacked", chunk_size=2)
    messages = [str(warning.message) for warning in caught if "one by one" in str(warning.message)]
    assert len(messages) == (make is LitImages), "only BatchNorm cannot be stacked"
    assert one_by_one.distance(stacked) < 1e-10
    for report, other in zip(one_by_one.reports, stacked.reports):
        values, others = step_values(report), step_values(other)
        assert values.keys() == others.keys()
        assert all(abs(float(values[k]) - float(others[k])) < 1e-10 for k in values)


@exhaustive_but("stacked_compiled")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one_compiled", "stacked_compiled"])
def test_compiled_engines_agree_for_modules(uncompiled, engine):
    client, data = Ditto(seeded(LitTable)), shared_out(table())
    outcomes = [run_tried_rounds(client, data, engine=name) for name in ("one_by_one", engine)]
    assert outcomes[0].distance(outcomes[1]) < 1e-10


def fit_plainly(module, data, epochs, folder):
    """Fit a module on client 0 by Lightning, without shuffling, and return its parameters."""
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    inputs, targets, *_ = data.clients.to(torch.device("cpu"), torch.float64).training_samples(0)
    trainer.fit(module, DataLoader(TensorDataset(inputs, targets), batch_size=4))
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [LitImages, LitTable, LitAutoencoder], ids=lambda kind: kind.__name__
)
def test_fit_of_one_client_equals_a_lightning_fit(make, tmp_path):
    """FedAvg with one client and SGD is a fit; momentum would restart in each round."""
    arrays = {LitImages: images, LitTable: table, LitAutoencoder: numbers}[make]([10])
    net = seeded(lambda: LitImages(momentum=0.0) if make is LitImages else make()).double()
    epochs = 4
    settings = {"optimizer": sgd(0.2)} if make is LitTable else {}
    plain = copy.deepcopy(net)
    if settings:  # AdamW keeps a state over epochs, and local optimizers restart
        plain.configure_optimizers = lambda: torch.optim.SGD(plain.parameters(), lr=0.2)
    data = shared_out(arrays)
    row = fit_plainly(plain, data, epochs, tmp_path)
    outcome = run_tried_rounds(FedAvg(net, **settings), data, rounds=epochs, shuffle=False)
    torch.testing.assert_close(outcome.w, row, rtol=0, atol=1e-10)
    start = nn.utils.parameters_to_vector(net.parameters()).detach()
    assert float((outcome.w - start).abs().max()) > 1e-2
    if make is LitImages:
        norm = plain.net[1]
        statistics = torch.cat([norm.running_mean, norm.running_var])
        torch.testing.assert_close(outcome.w_statistics, statistics, rtol=0, atol=1e-10)


KEPT = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.02, weight_decay=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.02, weight_decay=0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01, momentum=0.5),
}


@exhaustive_but("Adam", "SGD with momentum")
@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_fit_of_one_client_with_a_kept_optimizer_state_equals_a_lightning_fit(name, tmp_path):
    net = seeded(LitTable).double()
    net.__class__ = type("Own", (LitTable,), {"configure_optimizers": lambda m: build(m)})

    def build(module):
        return KEPT[name](module.parameters())

    data, epochs = shared_out(table([10])), 4
    plain = fit_plainly(copy.deepcopy(net), data, epochs, tmp_path)
    client = FedAvg(net)
    settings = {"rounds": epochs, "shuffle": False}
    kept = run_tried_rounds(client, data, keep_optimizer_state=True, **settings)
    torch.testing.assert_close(kept.w, plain, rtol=0, atol=1e-12)
    assert float((run_tried_rounds(client, data, **settings).w - plain).abs().max()) > 1e-3


@pytest.mark.slow
def test_logs_of_training_are_means_over_local_steps_and_clients():
    arrays, net = table([4, 8]), seeded(LitTable).double()
    data = shared_out(arrays)
    report = run_tried_rounds(FedAvg(net, sgd(0.0)), data, rounds=1).reports[0]
    clients = [arrays.targets[arrays.client == k].double().mean() for k in range(2)]
    assert float(report["train/positives"]) == pytest.approx(float(sum(clients)) / 2)
    assert "train/positives" in step_values(report)
    several = run_tried_rounds(Ditto(net, optimizer=sgd(0.0)), data, rounds=1).reports[0]
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


@pytest.mark.slow
def test_metric_object_in_training_is_computed_per_step():
    arrays, net = table([8, 8]), seeded(LitLogger).double()
    data = shared_out(arrays, batch_size=8)
    client = FedAvg(net, sgd(0.0))
    report = run_tried_rounds(client, data, rounds=2).reports[1]
    scores, y = net(arrays.inputs).sigmoid(), arrays.targets
    aurocs = [BinaryAUROC()(scores[arrays.client == k], y[arrays.client == k]) for k in range(2)]
    assert float(report["train/auroc"]) == pytest.approx(float(sum(aurocs)) / 2)
    assert float(report["train/step"]) == 0
    assert not client.global_model.train_auroc.update_called
    assert "log" not in vars(client.global_model)


@pytest.mark.slow
def test_module_reads_the_round_from_its_trainer(tmp_path):
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


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_widespread_template_runs_unchanged(tmp_path, engine):
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


@pytest.mark.slow
def test_optimizer_and_schedule_are_those_of_the_module(tmp_path):
    _, client, data = set_up(LitImages, float32(images()), tmp_path=tmp_path, rounds=2)
    (group, personal) = client.optimizers().param_groups
    assert type(client.optimizers().optimizer) is torch.optim.SGD
    assert (group["lr"], group["momentum"]) == (0.1 / 4, 0.5)
    assert personal["lr"] == group["lr"]
    data = shared_out(table())
    built = FedAvg(LitTable()).objective.build_optimizer({"global": [nn.Parameter(torch.ones(2))]})
    assert (type(built), built.defaults["weight_decay"]) == (torch.optim.AdamW, 0.1)
    outcomes = [
        run_tried_rounds(FedAvg(seeded(LitTable), **settings), data)
        for settings in ({}, {"optimizer": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)})
    ]
    assert outcomes[0].distance(outcomes[1]) == 0
    assert run_tried_rounds(FedAvg(seeded(LitTable), sgd(0.05)), data).distance(outcomes[0]) > 1e-3


@pytest.mark.exhaustive
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


@pytest.mark.slow
def test_further_algorithms_attacks_and_aggregators_accept_a_module():
    data = shared_out(numbers([6, 8, 8, 8]))  # PerFedAvg takes parts of minibatches
    for make in (lambda: PerFedAvg(LitAutoencoder()), lambda: PFedMe(LitAutoencoder()),
                 lambda: Scaffold(LitAutoencoder())):  # fmt: skip
        report = run_tried_rounds(make(), data).reports[-1]
        assert torch.isfinite(torch.as_tensor(report["train/loss"]))
    report = run_tried_rounds(
        FedAvg(LitAutoencoder()), data, attack=SignFlipping(), fraction=0.25, aggregator=Median()
    ).reports[-1]
    assert report["train/byzantine"] == 1


def test_start_losses_are_those_of_the_training_step():
    """An aggregator receives the mean over the samples of every client."""
    losses = []

    class Watched(QFFL):
        def forward(self, uploads, weights, context):
            losses.append(context.start_losses)
            return super().forward(uploads, weights, context)

    arrays, net = numbers([6, 9]), seeded(LitAutoencoder).double()
    run_tried_rounds(FedAvg(net), shared_out(arrays), rounds=1, aggregator=Watched())
    x = arrays.inputs.double()
    errors = (net(x) - x).square().mean(1)
    expected = torch.stack([errors[arrays.client == k].mean() for k in range(2)]).detach()
    torch.testing.assert_close(losses[-1], expected, rtol=1e-10, atol=0)


class Lookahead(torch.optim.Adam):
    """An optimizer of a user's own, with options in keyword arguments."""

    def __init__(self, params, **options):
        super().__init__(params, **options)


def test_options_of_a_model_are_preserved():
    net = LitAutoencoder()
    net.__class__ = type("Own", (LitAutoencoder,), {"configure_optimizers": build_lookahead})
    client = Ditto(net, personal_lr=0.5)
    optimizer = client.objective.build_optimizer(client.trained_parameters)
    assert type(optimizer) is Lookahead
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.9)] * 2


def build_lookahead(module):
    return Lookahead(module.parameters(), lr=0.25, betas=(0.5, 0.9))


def test_root_update_uses_the_steps_of_the_module():
    data = shared_out(numbers([8, 8]), root_samples=4)
    roots = []

    class Watched(FLTrust):
        def forward(self, uploads, weights, context):
            roots.append(context.root)
            return super().forward(uploads, weights, context)

    net = seeded(LitAutoencoder).double()
    run_tried_rounds(FedAvg(net), data, rounds=1, aggregator=Watched(), shuffle=False)
    plain = copy.deepcopy(net)
    x = data.clients.to(torch.device("cpu"), torch.float64).batch(data.clients.root).inputs
    (plain(x) - x).square().mean().backward()
    step = torch.cat([-0.3 * p.grad.flatten() for p in plain.parameters()])
    torch.testing.assert_close(roots[-1], step, rtol=1e-8, atol=1e-10)


class LitHooks(LitAutoencoder):
    """Clips its gradients by itself, and changes its batches before each step."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, *targets = batch
        return 2 * x, *targets

    def on_after_backward(self):
        self.encoder.bias.grad.zero_()

    def on_before_optimizer_step(self, optimizer):
        (group,) = optimizer.param_groups
        assert {*map(id, group["params"])} == {*map(id, self.parameters())}
        nn.utils.clip_grad_norm_(group["params"], 0.01)
        self.log("norm", sum(p.grad.square().sum() for p in self.parameters()))


@exhaustive_for("one_by_one_compiled")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked", "one_by_one_compiled"])
def test_hooks_of_a_batch_and_of_gradients_are_called_as_in_a_lightning_fit(engine, tmp_path):
    net, data = seeded(LitHooks).double(), shared_out(numbers([8]))
    plain = copy.deepcopy(net)
    inputs, targets, *_ = data.clients.to(torch.device("cpu"), torch.float64).training_samples(0)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(plain, DataLoader(TensorDataset(inputs, targets), batch_size=4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = run_tried_rounds(FedAvg(net), data, engine=engine, shuffle=False, chunk_size=1)
    row = nn.utils.parameters_to_vector(plain.parameters()).detach()
    torch.testing.assert_close(outcome.w, row, rtol=0, atol=1e-10)
    named = [str(w.message) for w in caught if "`on_after_backward`" in str(w.message)]
    assert len(named) == (engine != "one_by_one")
    if engine == "one_by_one":
        several = run_tried_rounds(Ditto(net, lam=0.0), data, engine=engine, shuffle=False)
        torch.testing.assert_close(several.w, row, rtol=0, atol=1e-10)
        torch.testing.assert_close(several.v[0], row, rtol=0, atol=1e-10)


class LitAdversarial(LitAutoencoder):
    """Training on inputs that a gradient has moved, which leaves gradients in the parameters."""

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        loss = (self(x) - x).square().mean()
        moved = (x + 0.1 * self.input_gradient(loss, x).sign()).detach()
        return (self(moved) - moved).square().mean()

    def input_gradient(self, loss, x):
        loss.backward()
        return x.grad

    learning_rate = 0.1


class LitAdversarialByGrad(LitAdversarial):
    def input_gradient(self, loss, x):
        return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("algorithm", [FedAvg, Ditto])
@pytest.mark.slow
def test_gradients_that_a_step_leaves_are_dropped_as_in_a_lightning_fit(algorithm):
    outcomes = [
        run_tried_rounds(algorithm(seeded(kind)), shared_out(numbers()), rounds=1)
        for kind in (LitAdversarial, LitAdversarialByGrad)
    ]
    assert outcomes[0].distance(outcomes[1]) == 0


class LitAuxiliary(LitAutoencoder):
    """Has a second output in training mode, as GoogLeNet has."""

    def __init__(self):
        super().__init__()
        self.norm, self.second = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        outputs = super().forward(self.norm(x))
        return (outputs, self.second(x)) if self.training else outputs

    def training_step(self, batch, batch_idx):
        x, _ = batch
        first, second = self(x)
        return (first - x).square().mean() + (second - x).square().mean()

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.log("val_error", (self(x) - x).abs().mean())


@pytest.mark.slow
def test_start_loss_of_a_step_that_needs_the_training_mode_is_evaluated_in_it(tmp_path):
    trainer, client, data = set_up(
        LitAuxiliary, float32(numbers([12, 16])), FedAvg, tmp_path=tmp_path
    )
    assert client.task.facts.needs_training_mode
    values = trainer.federation.metrics("val")["global"].per_client()
    net, clients = trainer.federation.model_of(1, "global"), data.clients
    batch, samples = clients.batch(clients.val.samples(1)), clients.batch(clients.train.samples(1))
    statistics = client.statistics("global").data.clone()
    evaluator = trainer.federation.session.evaluation.evaluator
    start = evaluator.start_losses(clients, torch.tensor([1]), {})
    with torch.no_grad():
        error = float((net(batch.inputs) - batch.inputs).abs().mean())
        loss = float(net.train().training_step((samples.inputs, samples.targets), 0))
    assert float(values["error"][1]) == pytest.approx(error, rel=1e-5)
    assert float(start[0]) == pytest.approx(loss, rel=1e-5)
    assert values["loss"].isnan().all(), "no step gives a loss of validation samples"
    trainer.validate(client, data, verbose=False)
    assert torch.equal(client.statistics("global").data, statistics)


class LitSparse(LitAutoencoder):
    """Logs other names in other steps."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.log("first", 1.0)
        else:
            self.log("later", 1.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_name_logged_by_some_steps_is_omitted_with_a_warning(engine):
    data = shared_out(numbers([8, 8]))
    with pytest.warns(UserWarning, match="leaves out `later`, which the steps of the module"):
        report = run_tried_rounds(FedAvg(seeded(LitSparse)), data, engine=engine).reports[-1]
    assert torch.as_tensor(report["train/first"]).isnan()
    assert torch.isfinite(torch.as_tensor(report["train/recon"]))
    assert "train/later" not in report


class LitBranch(LitAutoencoder):
    """Branches on data."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss.item() > 1e3:
            loss = loss / 2
        return loss


def test_warning_of_an_unstackable_module_names_the_line():
    data = shared_out(numbers())
    client = FedAvg(seeded(LitBranch))
    with pytest.warns(UserWarning, match=r"one by one.*test_lightning_task.py:\d+: if loss.item()"):
        outcome = run_tried_rounds(client, data, engine="stacked")
    assert outcome.distance(run_tried_rounds(client, data)) == 0


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
def test_batch_has_the_configured_structure(structure, inputs, targets, expected):
    assert LightningTask(structure).build_batch(inputs, targets) == expected


def test_inputs_of_further_metrics_fit_the_targets():
    task, y = LightningTask(), torch.tensor([1, 0])
    logits = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    column = torch.tensor([[0.25], [0.75]])
    assert torch.equal(task.metric_inputs({"logits": logits}, y)[0], logits.softmax(1))
    assert torch.equal(task.metric_inputs(logits.softmax(1), y)[0], logits.softmax(1))
    assert torch.equal(task.metric_inputs(column, y)[0], column[:, 0])
    assert torch.equal(task.metric_inputs({"prediction": y}, {"labels": y})[1], y)
    assert torch.equal(task.metric_inputs(logits, logits)[0], logits)


@exhaustive_but("True")
@pytest.mark.slow
@pytest.mark.parametrize("chosen", [False, True])
def test_command_line_accepts_a_module_by_its_path(tmp_path, chosen):
    """The run uses the optimizer of the module, unless the config sets one."""
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


@pytest.mark.parametrize(
    ("options", "kind"), [({}, torch.optim.AdamW), ({"foreach": False}, torch.optim.SGD)], ids=str
)
def test_optimizer_like_the_default_is_chosen_by_an_option_that_changes_no_number(options, kind):
    def build(parameters):
        return torch.optim.SGD(parameters, lr=0.05, **options)

    build.__module__ = "jsonargparse"  # as of a config
    client = FedAvg(LitTable(), build)
    assert type(client.objective.build_optimizer(client.trained_parameters)) is kind


def test_logged_numbers_of_python_are_on_the_device_of_the_loss():
    class Logging(LitAutoencoder):
        def training_step(self, batch, batch_idx):
            self.log("number", 2.0)
            return super().training_step(batch, batch_idx)

    module, task = Logging().to("meta"), LightningTask()
    task.facts = ModuleFacts(step_names=("number", "recon", "missing"))
    inputs = torch.zeros(3, 4, device="meta")
    with task.training_logs(0) as logs:
        task.loss(module, Batch(inputs, inputs))
    values = logs[id(module)]
    assert {name: value.device.type for name, value in values.items()} == {
        "number": "meta", "recon": "meta", "missing": "meta"
    }  # fmt: skip


def test_loss_of_a_step_on_the_cpu_goes_to_the_device_of_the_batch():
    class OnTheCpu(LitAutoencoder):
        def training_step(self, batch, batch_idx):
            return torch.ones(())

    inputs = torch.zeros(3, 4, device="meta")
    loss = LightningTask().loss(OnTheCpu().to("meta"), Batch(inputs, inputs))
    assert loss.device.type == "meta"


def test_hook_before_the_transfer_gets_the_batch_on_the_cpu_and_the_step_on_the_device():
    places = []

    class Shifts(LitAutoencoder):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            places.append(batch.device.type)
            return batch + torch.ones(4)

        def training_step(self, batch, batch_idx):
            places.append(batch.device.type)

    call_step(Shifts().to("meta"), "training_step", torch.zeros(3, 4), 0)
    assert places == ["cpu", "meta"]


def test_hook_of_a_data_module_reads_the_trainer_of_the_step():
    """Its own trainer is None, or that of an earlier plain fit."""

    class Adds(lightning.LightningDataModule):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch + (10 if self.trainer.training else 20)

    class Returns(LitAutoencoder):
        def training_step(self, batch, batch_idx):
            return float(batch)

    module, own = Returns(), Adds()
    module._trainer = SimpleNamespace(training=True)
    for earlier in (None, SimpleNamespace(training=False)):
        own.trainer = earlier
        assert call_step(module, "training_step", torch.tensor(1.0), 0, datamodule=own) == 11
        assert own.trainer is earlier


def test_step_behind_a_decorator_with_any_arguments_gets_batch_and_index():
    def pass_on(step):
        return lambda *arguments, **options: step(*arguments, **options)

    class Decorated(LitAutoencoder):
        @pass_on
        def training_step(self, batch, batch_idx):
            return batch.sum(), batch_idx

    assert call_step(Decorated(), "training_step", torch.ones(3, 4), 5) == (12, 5)


class Doubles(lightning.LightningModule):
    """A frozen layer and a trained one, of doubled inputs."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.stem, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.stem(x.mul_(2) if self.in_place else x * 2))


class DoublesInTraining(Doubles):
    """Doubles the inputs in training mode only."""

    def forward(self, x):
        return super().forward(x) if self.training else self.head(self.stem(x))


class DoublesInStep(DoublesInTraining):
    """The same as a module with a step of its own."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@exhaustive_but(
    "Doubles-one_by_one-Ditto",
    "Doubles-stacked-Ditto",
    "DoublesInTraining-one_by_one-Ditto",
    "DoublesInStep-one_by_one-PFedMe",
)
@pytest.mark.parametrize("kind", [Ditto, PFedMe])
@pytest.mark.parametrize(
    ("net", "engine"),
    [
        (Doubles, "one_by_one"),
        (Doubles, "stacked"),
        (DoublesInTraining, "one_by_one"),
        (DoublesInStep, "one_by_one"),
    ],
)
@pytest.mark.slow
def test_net_that_changes_its_inputs_in_place_changes_no_other_model(kind, net, engine):
    """The next model, or the next step on a minibatch, has the samples of the data."""
    data = shared_out(classes([6, 8]))
    options = {} if net is DoublesInStep else {"optimizer": sgd(0.1)}
    fresh, changed = (
        run_tried_rounds(
            kind(seeded(functools.partial(net, in_place)), **options), data, engine=engine
        )
        for in_place in (False, True)
    )
    assert fresh.distance(changed) == 0


class DoubledTargets(nn.L1Loss):
    """The distance to doubled targets."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def forward(self, outputs, targets):
        return super().forward(outputs, targets.mul_(2) if self.in_place else targets * 2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_criterion_that_changes_targets_in_place_changes_no_other_model(engine):
    data = shared_out(numbers([6, 8]))
    fresh, changed = (
        run_tried_rounds(
            Ditto(
                seeded(lambda: nn.Linear(4, 1)),
                optimizer=sgd(0.1),
                criterion=DoubledTargets(in_place),
            ),
            data,
            engine=engine,
        )
        for in_place in (False, True)
    )
    assert fresh.distance(changed) == 0
