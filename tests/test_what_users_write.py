"""Invalid classes and arguments of users are refused in one sentence."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from further_cases import covering
from lightning import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from small_federations import Given, classes, mlp, run_tried_rounds, seeded, sgd, shared_out
from tables import table_test
from torch import nn

import pl_fed
from pl_fed.aggregators import Chain, Mean, PreAggregator, PreparedUploads
from pl_fed.attacks import Attack
from pl_fed.clients import FLAME, Ditto, FedAvg
from pl_fed.data import Arrays, DataSource, FederatedData
from pl_fed.partitioners import IID, Partitioner
from pl_fed.samplers import All, Uniform
from pl_fed.skews import Quality
from pl_fed.types import Batch, RoundContext


def fedavg(kind=FedAvg, net=mlp, **options):
    return kind(seeded(net), optimizer=sgd(0.1), local_steps=2, **options)


def object_with(parent, method, result):
    """Return an object of a subclass whose method returns a result, or calls it."""

    def method_body(self, *args, **kwargs):
        return result(*args, **kwargs) if callable(result) else result

    return type("Own", (parent,), {method: method_body})


@table_test(
    ("result", "words"),
    [
        (None, "gave NoneType"),
        ([torch.tensor([0])], "3 tensors of indices .int64., one for each client, but Own gave 1"),
        ([torch.arange(2.0)] * 3, r"gave torch.float32 \[2\] for client 0"),
        ([torch.arange(2), [1], torch.arange(2)], "gave list for client 1"),
        ([torch.arange(2), torch.tensor([-1]), torch.arange(2)], "from 0 to 11 .* gave -1 to -1"),
        ([torch.arange(2), torch.tensor([12]), torch.arange(2)], "gave 12 to 12 for client 1"),
    ],
)
def test_invalid_partitions_are_refused(result, words):
    data = FederatedData(Given(classes([12])), object_with(Partitioner, "split", result)(), 3)
    with pytest.raises(ValueError, match=f"^Expected argument `partitioner` to give .*{words}"):
        _ = data.clients


def test_invalid_data_and_skews_are_refused():
    source = object_with(DataSource, "load", (1, 2))()
    with pytest.raises(TypeError, match=r"^Expected `load` of Own to return Arrays but got tuple"):
        _ = FederatedData(source, IID(), 3).clients
    skew = object_with(Quality, "change", None)()
    with pytest.raises(ValueError, match=r"`skew` to keep the shape .* but got NoneType from Own"):
        _ = FederatedData(Given(classes([12])), IID(), 3, skew=skew).clients


@table_test(
    ("result", "words"),
    [
        (None, "Own returned NoneType"),
        (lambda uploads, *_: uploads, r"Own returned shape \[3, 64\]"),
        (
            lambda uploads, *_: uploads[0, :-1],
            r"into a tensor \[64\] but Own returned shape \[63\]",
        ),
        (lambda uploads, *_: (uploads[0],), "Own returned tuple"),
    ],
)
def test_invalid_results_of_aggregators_are_refused(result, words):
    aggregator = object_with(Mean, "forward", result)()
    with pytest.raises(ValueError, match=f"^Expected argument `aggregator` to merge .*{words}"):
        run_tried_rounds(fedavg(), shared_out(classes([4, 5, 6])), aggregator=aggregator)


@table_test(
    ("result", "words"),
    [
        (None, "Own returned NoneType"),
        (lambda uploads, *_: uploads, r"Own returned a tensor \[3, 4\]"),
        (
            lambda u, w, c: (u[:2], w, c),
            r"returned \(a tensor \[2, 4\], a tensor \[3\], a context of 3",
        ),
        (lambda u, w, c: (u[:2], w[:2], c), "a context of 3 clients"),
    ],
)
def test_invalid_results_of_pre_aggregators_are_refused(result, words):
    chain = Chain([object_with(PreAggregator, "forward", result)()], Mean())
    context = RoundContext(clients=torch.arange(3))
    match = f"^Expected argument `pre_aggregators` to return .*{words}"
    with pytest.raises(ValueError, match=match):
        chain(torch.ones(3, 4), torch.ones(3), context)
    valid = object_with(PreAggregator, "forward", lambda *arguments: PreparedUploads(*arguments))()
    assert torch.equal(
        Chain([valid], Mean())(torch.ones(3, 4), torch.ones(3), context), torch.ones(4)
    )


@table_test(
    ("result", "words"),
    [
        (None, "return a Batch but got NoneType"),
        (
            lambda batch, _: batch._replace(targets=batch.targets + 100),
            "labels from 0 to 2 but got 10",
        ),
        (
            lambda batch, _: batch._replace(targets=batch.targets.float()),
            "of `targets` but got .* torch.float32",
        ),
        (
            lambda batch, _: batch._replace(inputs=batch.inputs[:, :2]),
            r"of `inputs` but got \[\d, 2\]",
        ),
    ],
)
def test_invalid_poisoned_batches_are_refused(result, words):
    attack = object_with(Attack, "poison", result)()
    with pytest.raises(ValueError, match=f"^Expected `poison` of Own to .*{words}"):
        run_tried_rounds(fedavg(), shared_out(classes([4, 5, 6])), attack=attack, ids=[1])


# Algorithms and nets


class Vector(FedAvg):
    def training_step(self, batch, batch_idx):
        return self.sample_losses(self.global_model(batch.inputs), batch.targets)


@table_test("engine", ["one_by_one", "stacked", "one_by_one_compiled"])
@pytest.mark.filterwarnings("ignore:.*cannot be")
def test_loss_that_is_no_scalar_is_refused(engine):
    words = r"^Expected `training_step` to return scalars but got shape \[2\] for `loss`"
    data = shared_out(classes([4, 4]), batch_size=4)
    with pytest.raises(ValueError, match=words):
        run_tried_rounds(fedavg(Vector), data, engine=engine)


@table_test("row", [torch.ones(2, 3), "1", None])
def test_invalid_default_of_a_state_is_refused(row):
    client = fedavg()
    client.add_state("mine", row)
    words = r"^Expected the default of state `mine` to be a number or a tensor \[length\] but got"
    with pytest.raises(ValueError, match=words):
        run_tried_rounds(client, shared_out(classes([4, 4])))


class Embeds(nn.Module):
    """Embeds ids without converting them to integers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)

    def forward(self, x):
        return self.embedding(x).mean(1)


class Loss(nn.Module):
    """A criterion of a user's own."""

    def __init__(self, value):
        super().__init__()
        self.reduction = "mean"
        self.value = value

    def forward(self, outputs, targets):
        return self.value(outputs, targets)


def test_float_inputs_of_an_embedding_are_refused():
    x = torch.randint(5, (12, 4))
    arrays = Arrays(x, x[:, 0] % 3, torch.arange(12) // 4, num_classes=3)
    run_tried_rounds(FedAvg(Embeds()), shared_out(arrays))  # integers stay integers
    arrays = Arrays(x.float(), x[:, 0] % 3, torch.arange(12) // 4, num_classes=3)
    match = r"^Expected argument `net` to take .* but Embeds failed: .* with x\.long\(\)\.$"
    with pytest.raises(ValueError, match=match):
        run_tried_rounds(FedAvg(Embeds()), shared_out(arrays))


@pytest.mark.slow
@table_test(
    ("value", "words"),
    [
        (lambda o, y: nn.functional.cross_entropy(o, y.long()[:, 0].double()), "failed: .*Long"),
        (lambda o, y: o.softmax(2), "failed: Dimension out of range"),
        (lambda o, y: (o - y).square().mean(1), r"one number, the loss of .* Loss gave \[2\]"),
        (lambda o, y: 0.5, "one number, the loss of a batch, but Loss gave float"),
    ],
)
def test_invalid_criteria_are_refused(value, words):
    x = torch.randn(12, 4)
    arrays = Arrays(x, x[:, :3].abs(), torch.arange(12) // 4)
    with pytest.raises(ValueError, match=f"^Expected argument `criterion` to .*{words}"):
        run_tried_rounds(FedAvg(nn.Linear(4, 3), criterion=Loss(value)), shared_out(arrays))


class OfSamples(FedAvg):
    def training_step(self, batch, batch_idx):
        return self.sample_losses(self.global_model(batch.inputs), batch.targets).mean()


def test_criterion_without_losses_per_sample_is_refused():
    x = torch.randn(12, 4)
    arrays = Arrays(x, x[:, :3].abs(), torch.arange(12) // 4)
    criterion = Loss(lambda outputs, targets: (outputs - targets).square().mean())
    run_tried_rounds(FedAvg(nn.Linear(4, 3), criterion=criterion), shared_out(arrays))
    match = r'^Expected Loss with reduction="none" to return a loss for each of \d .* shape \[\]'
    with pytest.raises(ValueError, match=match):
        run_tried_rounds(OfSamples(nn.Linear(4, 3), criterion=criterion), shared_out(arrays))


class LightningNet(LightningModule):
    """A LightningModule with only a forward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


@table_test("method", ["validation_step", "configure_optimizers", "on_train_start"])
def test_lightning_module_without_training_step_is_refused_as_net(method):
    net = object_with(LightningNet, method, None)()
    match = f"^Expected argument `net` .* but got Own with `{method}` and no `training_step`: "
    with pytest.raises(TypeError, match=match + ".* as `criterion` and its optimizer as"):
        FedAvg(net)
    with pytest.raises(TypeError, match="without federated learning but got FedAvg: give the net"):
        FedAvg(fedavg())


@pytest.mark.slow
def test_lightning_module_with_only_forward_is_a_net(tmp_path):
    client = fedavg(Ditto, LightningNet)
    trainer = make_trainer(tmp_path)
    trainer.fit(client, shared_out(classes([8, 8]), val_fraction=0.25, test_fraction=0.25))
    plain = trainer.federation.model_of(1, "personal")
    assert type(plain) is LightningNet
    assert plain._trainer is None
    expected = run_tried_rounds(
        fedavg(Ditto, LightningNet), shared_out(classes([8, 8])), engine="stacked", rounds=1
    )
    assert expected.reports[0]["train/loss"].isfinite()


def test_lightning_module_is_refused_as_client(tmp_path):
    with pytest.raises(TypeError, match=r"`model` .* got LightningNet: pass the net, its loss"):
        make_trainer(tmp_path).fit(LightningNet(), shared_out(classes([4, 4])))


def test_lazy_net_is_refused():
    with pytest.raises(ValueError, match=r"of known shapes but got lazy ones \(1.weight, 1.bias\)"):
        fedavg(net=lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_trainable_torchscript_is_refused():
    net = nn.Sequential(nn.Flatten(), torch.jit.script(nn.Linear(4, 3)))
    with pytest.raises(ValueError, match=r"trainable parameters in TorchScript but got `1`: give"):
        FedAvg(net)


def test_augmentation_that_changes_the_shape_is_refused():
    data = FederatedData(
        Given(classes([8, 8], (2, 6, 6))), test_fraction=0.0, augment=[nn.AvgPool2d(2)]
    )
    net = nn.Sequential(nn.Flatten(), nn.Linear(72, 3))
    before = torch.random.get_rng_state()
    with pytest.raises(
        ValueError, match=r"inputs of shape \[2, 3, 3\] \(torch.float32\) but Sequential"
    ):
        pl_fed.Federation(All(), seed=0).setup(FedAvg(net), data, "fit")
    assert torch.equal(before, torch.random.get_rng_state())


# From Python


def make_trainer(folder, federation=None, **options):
    return pl_fed.Trainer(
        federation or pl_fed.Federation(Uniform(2), seed=0),
        run_dir=folder,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, **options},
    )


def test_invalid_arguments_from_python_are_refused(tmp_path):
    with pytest.raises(TypeError, match="`federation` to be an object of a subclass of Federation"):
        make_trainer(tmp_path, Uniform(2))
    with pytest.raises(TypeError, match="`lam` to be a number but got 'a'"):
        Ditto(mlp(), lam="a")
    with pytest.raises(TypeError, match="`decay` to be a number but got 'a'"):
        FLAME(mlp(), decay="a")
    for name in ("optimizer", "lr_scheduler"):
        with pytest.raises(TypeError, match=f"`{name}` to be a callable.* but got 'StepLR'"):
            FedAvg(mlp(), **{name: "StepLR"})
    with pytest.raises(TypeError, match=r"`optimizer` to build .* got None: leave .*, or name an"):
        FedAvg(mlp(), optimizer=None)
    with pytest.raises(TypeError, match="Ditto to be loaded with its federation"):
        Ditto.load_from_checkpoint("last.ckpt", net=mlp())


def test_forbidden_overrides_of_a_client_are_refused(tmp_path):
    data = shared_out(classes([4, 4]))

    class Own(FedAvg):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    words = "^Expected `configure_optimizers` of Own .* named global but got 1 with None: change"
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path).fit(fedavg(Own), data)
    own = object_with(FedAvg, "train_dataloader", None)
    with pytest.raises(ValueError, match="without the hook `train_dataloader` but got it in Own"):
        make_trainer(tmp_path).fit(fedavg(own), data)


@pytest.mark.parametrize("ending", ["_trained", "_trained_std", "_trained_worst10"])
def test_monitor_over_trained_clients_is_refused_with_that_over_all(tmp_path, ending):
    """It is logged in the first rounds alone, so Lightning would end the run in a later one."""
    data = FederatedData(Given(classes([9, 9])), val_fraction=0.3, seed=0)
    saver = ModelCheckpoint(tmp_path, monitor=f"val/personal/accuracy{ending}")
    of_all = f"val/personal/accuracy{ending.removeprefix('_trained')}"
    words = f"logged only until all clients have taken part: take {of_all}\\.$"
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path, callbacks=[saver]).fit(fedavg(Ditto), data)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*exists and is not empty", "ignore:No checkpoint is written")
@pytest.mark.parametrize("monitor", ["val/personal/loss", "train/los"])
def test_monitor_that_is_never_logged_is_refused(tmp_path, monitor):
    """Without validation data no val/ is logged. The first round determines the train/ names."""
    data = FederatedData(Given(classes([9, 9])), val_fraction=0.0, seed=0)
    stopping = EarlyStopping(monitor, check_on_train_epoch_end=True)
    options = {"callbacks": [stopping], "max_epochs": 9, "check_val_every_n_epoch": 5}
    with pytest.raises(ValueError, match=f"rounds or validations log, .* but got {monitor}"):
        make_trainer(tmp_path, **options).fit(fedavg(Ditto), data)
    rows = tmp_path / "metrics.csv"
    assert not rows.exists() or len(rows.read_text().splitlines()) <= 2
    saver = ModelCheckpoint(tmp_path, monitor="train/benign_distance")
    make_trainer(tmp_path / "b", callbacks=[saver]).fit(fedavg(Ditto), data)


# Models that callbacks change


def replace_weight(module, method):
    """Set the last layer's weight to 0 by one of four methods."""
    layer = module.global_model[-1]
    zeros = torch.zeros_like(layer.weight)
    if method == "in place":
        layer.weight.data.zero_()
    elif method == "data":
        layer.weight.data = zeros
    elif method == "parameter":
        layer.weight = nn.Parameter(zeros)
    else:
        state = {**layer.state_dict(), "weight": zeros}
        layer.load_state_dict(state, assign=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "method"),
    covering(["on_train_start", "on_train_epoch_end"], ["data", "parameter", "assign"]),
)
def test_replaced_weights_are_trained(tmp_path, method, hook):
    def outcome(method):
        changing = make_callback(hook, lambda module: replace_weight(module, method))
        client = fedavg(Ditto)
        data = FederatedData(Given(classes([9, 9, 9])), seed=0)
        trainer = make_trainer(tmp_path / method, callbacks=[changing], max_epochs=3)
        trainer.fit(client, data)
        trainer.test(client, data, verbose=False)
        return client.row("global").data.clone(), dict(trainer.callback_metrics)

    row, metrics = outcome(method)
    expected, other = outcome("in place")
    assert torch.equal(row, expected)
    assert metrics.pop("time/round", None) != other.pop("time/round", 1)
    assert metrics == other


def make_callback(hook, change):
    from lightning.pytorch import Callback

    def call_change(self, trainer, module):
        with torch.no_grad():
            change(module)

    return type("Changing", (Callback,), {hook: call_change})()


# Time


@pytest.mark.parametrize("seconds", [0.5, 1e6])
def test_engine_measurement_gets_the_remaining_time(tmp_path, monkeypatch, seconds):
    seconds_left = []
    from pl_fed.engine.choice import EngineChoice

    def record_seconds(self, task):
        seconds_left.append(task.seconds)
        return "one_by_one"

    monkeypatch.setattr(EngineChoice, "_find_fastest", record_seconds)
    data = FederatedData(Given(classes([9, 9])), seed=0)
    timer = Timer(timedelta(seconds=seconds))
    federation = pl_fed.Federation(Uniform(2), engine=pl_fed.EngineOptions("fastest"), seed=0)
    make_trainer(tmp_path, federation, callbacks=[timer], max_epochs=1).fit(fedavg(), data)
    (remaining,) = seconds_left
    assert 0 <= remaining <= seconds
    assert remaining > seconds - 60


def test_engines_are_measured_within_the_remaining_time(monkeypatch):
    from pl_fed.engine import choice

    tried = []
    steps = {"global": [10**6]}
    task = SimpleNamespace(cohort=torch.arange(1), seconds=5.0, rounds=100)
    measured = choice.EngineChoice()
    monkeypatch.setattr(
        choice.EngineChoice,
        "_make_candidate",
        lambda *_: SimpleNamespace(seconds_per_step=lambda _: 1e-3),
    )
    monkeypatch.setattr(choice, "measure", lambda candidates, *_: (tried.extend(candidates), []))
    monkeypatch.setattr(choice.EngineChoice, "_can_stack", lambda *_: True)
    for task.seconds, names in ((5.0, []), (30.0, [*choice.EAGER]), (90.0, None)):
        tried.clear()
        measured._measure(task, 10**6 * len(steps), "one_by_one")
        assert tried == ([*choice.EAGER, *choice.COMPILED] if names is None else names)


def test_unchanged_poisoned_batch_is_accepted():
    """The check accepts batches that keep their shapes and dtypes."""
    attack = object_with(Attack, "poison", lambda batch, _: Batch(*batch))()
    run_tried_rounds(fedavg(), shared_out(classes([4, 5, 6])), attack=attack, ids=[1])
