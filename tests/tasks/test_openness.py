"""Nets of several inputs, losses of pixels, and tasks of a user's own, in several engines."""

import copy
import functools
from typing import NamedTuple

import pytest
import torch
from exhaustive import exhaustive_but, exhaustive_for
from small_federations import Given, mlp, reals, run_tried_rounds, seeded, sgd, shared_out
from tables import table_test
from torch import nn
from torch.nn import functional
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassF1Score

from pl_fed import Federation
from pl_fed.attacks import Backdoor, FlippedLabels, Outliers, RandomLabels
from pl_fed.clients import Ditto, DittoChoice, DittoGreedy, FedAvg, FedTilt
from pl_fed.data import Arrays, FederatedData, module
from pl_fed.partitioners import IID, Dirichlet
from pl_fed.samplers import All
from pl_fed.tasks import (
    Classification,
    CriterionTask,
    LanguageModelling,
    MultiLabel,
    Regression,
    Segmentation,
    Task,
)

SIZES = [5, 8, 3]
OWNER = torch.arange(3).repeat_interleave(torch.tensor(SIZES))
IGNORED = 255


class Sentences(nn.Module):
    """Takes token ids and a mask by name, and gives logits of classes."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, ids, mask):
        words = self.embedding(ids) * mask[..., None]
        return self.last(torch.tanh(words.sum(1) / mask.sum(1, keepdim=True)))


class Pixels(nn.Module):
    """Return class logits of every pixel."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, images):
        return self.layer(images)


def sentences(samples=16, generator=0):
    draw = torch.Generator().manual_seed(generator)
    ids = torch.randint(11, (samples, 6), generator=draw)
    mask = (torch.arange(6) < torch.randint(1, 7, (samples, 1), generator=draw)).float()
    labels = torch.randint(3, (samples,), generator=draw)
    return Arrays({"ids": ids, "mask": mask}, labels, OWNER, num_classes=3)


def images(samples=16):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 2, 5, 5, generator=draw)
    y = torch.randint(3, (samples, 5, 5), generator=draw)
    y[torch.rand(y.shape, generator=draw) < 0.6] = IGNORED
    return Arrays(x, y, OWNER)


def sentence_loss(net, batch, targets):
    return functional.cross_entropy(net(batch["ids"], batch["mask"].double()), targets)


def pixel_loss(net, batch, targets):
    return functional.cross_entropy(net(batch.double()), targets, ignore_index=IGNORED)


class Tokens(nn.Module):
    """Return logits of the next token at every position."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, ids):
        return self.last(torch.tanh(self.embedding(ids).cumsum(1)))


def texts(samples=16):
    """Sequences of several lengths, padded; the targets are the inputs themselves."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(7, (samples, 6), generator=draw)
    targets = ids.clone()
    targets[torch.arange(6) >= torch.randint(3, 7, (samples, 1), generator=draw)] = -100
    return Arrays(ids, targets, OWNER)


def text_loss(net, ids, targets):
    logits = net(ids)[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())


CASES = {
    "dict inputs": (Sentences, {}, sentences, sentence_loss),
    "segmentation": (Pixels, {"task": Segmentation(3, IGNORED)}, images, pixel_loss),
    "language model": (Tokens, {"task": LanguageModelling(shift=True)}, texts, text_loss),
    "pixels": (
        Pixels,
        {"criterion": nn.CrossEntropyLoss(ignore_index=IGNORED)},
        images,
        pixel_loss,
    ),
}
every_case = pytest.mark.parametrize(
    ("net", "options", "arrays", "loss"), CASES.values(), ids=CASES
)


class Words(NamedTuple):
    """A sentence as a named tuple."""

    ids: torch.Tensor
    mask: torch.Tensor


@exhaustive_but("stacked_compiled")
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one_compiled", "stacked_compiled"])
def test_named_tuples_as_inputs_are_compiled(uncompiled, engine, recwarn):
    by_name = sentences()
    words = Arrays(Words(**by_name.inputs), by_name.targets, OWNER, num_classes=3)
    actual, expected = (
        run_tried_rounds(
            FedAvg(seeded(Sentences), optimizer=sgd(0.3), local_epochs=2),
            shared_out(arrays, batch_size=3),
            rounds=2,
            engine=name,
        )
        for arrays, name in ((words, engine), (by_name, "one_by_one"))
    )
    assert not [
        str(warning.message) for warning in recwarn if "cannot be compiled" in str(warning.message)
    ]
    assert uncompiled, "the steps are traced"
    torch.testing.assert_close(actual.w, expected.w, rtol=1e-6, atol=1e-8)


def select_samples(tree, mask):
    if isinstance(tree, dict):
        return {name: leaf[mask] for name, leaf in tree.items()}
    return tree[mask]


@exhaustive_for("Ditto-dict inputs", "Ditto-segmentation", "FedAvg-language model", "FedAvg-pixels")
@pytest.mark.slow
@every_case
@pytest.mark.parametrize("kind", [FedAvg, Ditto])
def test_engines_agree_for_every_input_structure(uncompiled, net, options, arrays, loss, kind):
    client = kind(seeded(net), optimizer=sgd(0.3), local_epochs=2, **options)
    data = shared_out(arrays(), batch_size=3)
    outcome = run_tried_rounds(client, data, rounds=2)
    compiled = kind is Ditto and net is Sentences
    for engine in ("stacked", *(["stacked_compiled"] if compiled else [])):
        assert outcome.distance(run_tried_rounds(client, data, rounds=2, engine=engine)) < 1e-10, (
            engine
        )
    assert bool(uncompiled) == compiled


@pytest.mark.slow
@every_case
def test_loss_and_gradient_equal_those_of_a_plain_loop(net, options, arrays, loss):
    net, federated_arrays = seeded(net), arrays()
    client = FedAvg(net, optimizer=sgd(0.3), **options)
    data = shared_out(federated_arrays, batch_size=100)
    own, rows = [], []
    for k in range(3):
        client_net = copy.deepcopy(net).double()
        mask = federated_arrays.client == k
        value = loss(
            client_net,
            select_samples(federated_arrays.inputs, mask),
            federated_arrays.targets[mask],
        )
        value.backward()
        own.append(value.detach())
        rows.append(
            torch.cat([(p - 0.3 * p.grad).detach().flatten() for p in client_net.parameters()])
        )
    for engine in ("one_by_one", "stacked"):
        actual = run_tried_rounds(client, data, rounds=1, engine=engine)
        torch.testing.assert_close(
            actual.reports[0]["train/loss"], torch.stack(own).mean(), rtol=0, atol=1e-10
        )
        torch.testing.assert_close(actual.w, torch.stack(rows).mean(0), rtol=0, atol=1e-10)


@every_case
def test_evaluations_and_predictions_for_every_input_structure(net, options, arrays, loss):
    federated_arrays = arrays()
    client = Ditto(seeded(net), **options).double()
    data = shared_out(federated_arrays, val_fraction=0.0, test_fraction=0.4)
    federation = Federation(All(), seed=0)
    federation.setup(client, data, "test")
    client_ids = torch.arange(3)
    federation.evaluate("test", client_ids)
    table = federation.metrics("test")["personal"].per_client()
    for k, predicted in enumerate(federation.predict(client_ids)):
        index = data.clients.test.samples(k)
        expected = loss(
            client.global_model,
            select_samples(federated_arrays.inputs, index),
            federated_arrays.targets[index],
        )
        assert float(table["loss"][k]) == pytest.approx(float(expected.detach()), abs=1e-10)
        assert len(predicted["prediction"]) == len(predicted["target"]) == len(index)


@pytest.mark.slow
def test_lambda_is_chosen_by_validation_data_of_several_tensors():
    data = shared_out(sentences(), batch_size=3, val_fraction=0.3)
    client = DittoGreedy(seeded(Sentences), min_validation=1)
    outcome = run_tried_rounds(client, data)
    assert outcome.distance(run_tried_rounds(client, data, engine="stacked")) < 1e-10


@pytest.mark.slow
def test_labels_of_several_input_tensors_may_be_attacked():
    data, client = shared_out(sentences(), batch_size=3), FedAvg(seeded(Sentences))
    outcome = run_tried_rounds(client, data, attack=FlippedLabels(), ids=[1])
    assert (
        outcome.distance(
            run_tried_rounds(client, data, attack=FlippedLabels(), ids=[1], engine="stacked")
        )
        < 1e-10
    )
    assert outcome.distance(run_tried_rounds(client, data)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_large_images_stay_uint8_until_the_minibatch(engine, monkeypatch):
    def run():
        data = shared_out(arrays, batch_size=3, test_fraction=0.4)
        federation = Federation(All(), seed=0)
        federation.setup(client, data, "test")
        federation.evaluate("test", torch.arange(3))
        table = federation.metrics("test")["personal"].per_client()
        return data.clients.inputs.dtype, run_tried_rounds(client, data, engine=engine), table

    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (16, 1, 2, 2), generator=draw, dtype=torch.uint8)
    arrays = Arrays(images, torch.arange(16) % 3, OWNER, num_classes=3)
    client = Ditto(seeded(lambda: nn.Sequential(nn.Flatten(), mlp())))
    before, outcome, table = run()
    monkeypatch.setattr(module, "_LARGE", 0)
    after, other, other_table = run()
    assert (before, after) == (torch.float32, torch.uint8)
    assert outcome.distance(other) == 0
    for name, column in table.items():
        torch.testing.assert_close(column, other_table[name], rtol=0, atol=0, equal_nan=True)


class SumOfPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(3, 2)

    def forward(self, x, z):
        return {"logits": self.first(x) + self.second(z), "extra": x}


class Scored(Task):
    """A user's task: tuples as inputs, dicts as outputs and targets, and its own metric."""

    def losses(self, outputs, targets):
        return functional.cross_entropy(outputs["logits"], targets["label"], reduction="none")

    def metrics(self):
        return MetricCollection({"f1": MulticlassF1Score(2, average="macro")})

    def metric_inputs(self, outputs, targets):
        return outputs["logits"], targets["label"]

    def predictions(self, outputs):
        return {"prediction": outputs["logits"].argmax(1)}


def pairs():
    draw = torch.Generator().manual_seed(2)
    inputs = (torch.randn(16, 4, generator=draw), torch.randn(16, 3, generator=draw))
    return Arrays(inputs, {"label": torch.randint(2, (16,), generator=draw)}, OWNER)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FedAvg, Ditto])
def test_task_of_a_user(kind):
    client = kind(seeded(SumOfPair), task=Scored(), optimizer=sgd(0.2))
    data = shared_out(pairs(), batch_size=2, test_fraction=0.4)
    outcome = run_tried_rounds(client, data)
    assert outcome.distance(run_tried_rounds(client, data, engine="stacked")) < 1e-10
    federation = Federation(All(), seed=0)
    federation.setup(client, data, "test")
    federation.evaluate("test", torch.arange(3))
    actual = federation.metrics("test")["global"]
    assert federation.monitored_metric == "f1"
    assert "f1_worst10" in actual.compute()
    for k in range(3):
        batch = data.clients.batch(data.clients.test.samples(k))
        logits = client.global_model(*batch.inputs)["logits"]
        expected = MulticlassF1Score(2, average="macro")(logits, batch.targets["label"])
        assert float(actual.per_client()["f1"][k]) == pytest.approx(float(expected))


def line_data(noise=0.1):
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(40, 4, generator=draw)
    y = x.sum(1, keepdim=True) + noise * torch.randn(40, 1, generator=draw)
    return reals(x, y, torch.arange(4).repeat_interleave(10))


def scalar_net():
    return mlp(num_classes=1)


def test_regression_logs_all_statistics_of_its_metrics():
    client = Ditto(seeded(scalar_net), criterion=nn.MSELoss())
    data = shared_out(line_data(), val_fraction=0.2, test_fraction=0.3)
    federation = Federation(All(), seed=0)
    federation.setup(client, data, "test")
    client_ids = torch.arange(4)
    federation.evaluate("test", client_ids)
    assert isinstance(client.task, Regression)
    assert federation.monitored_metric == "mae"
    errors = []
    for k in range(4):
        batch = data.clients.batch(data.clients.test.samples(k))
        errors.append((client.global_model(batch.inputs.float()) - batch.targets).abs().mean())
    errors = torch.stack(errors).double().detach()
    actual = federation.metrics("test")["global"].compute()
    expected = {
        "mae": errors.mean(),
        "mae_weighted": errors.mean(),
        "mae_std": errors.std(correction=0),
        "mae_var": errors.var(correction=0),
        "mae_worst10": errors.max(),
        "mae_best10": errors.min(),
        "mae_jain": errors.sum() ** 2 / (4 * errors.square().sum()),
    }
    for name, value in expected.items():
        assert float(actual[name]) == pytest.approx(float(value), rel=1e-5), name
    assert actual["r2_worst10"] <= actual["r2"] <= actual["r2_best10"], "larger is better"


def shifted(monitor):
    """Two clients, whose own models have the lower loss, and the higher absolute error."""
    x, owner = torch.zeros(20, 1), torch.arange(2).repeat_interleave(10)
    y = torch.zeros(20, 1)
    y[[9, 19]] = 10.0  # outliers: the mean is 1, the median 0
    client = Ditto(seeded(lambda: nn.Linear(1, 1)), criterion=nn.MSELoss())
    data = shared_out(reals(x, y, owner), test_fraction=0.5, split="own")
    federation = Federation(All(), seed=0, monitor=monitor, model_selection="test")
    federation.setup(client, data, "test")
    return client, data, federation


@pytest.mark.slow
@pytest.mark.parametrize(("monitor", "better"), [("mae", "global"), ("loss", "personal")])
def test_monitored_metric_chooses_the_hybrid_model(monitor, better):
    client, data, federation = shifted(monitor)
    with torch.no_grad():
        client.row("global").data.zero_()  # gives 0
        row = client.row("global").data.clone()
        targets = data.clients.targets[data.clients.test.index].view(2, -1)
        federation.store.write(
            "personal", torch.arange(2), torch.stack([row.index_fill(0, torch.tensor([1]), float(m))
            for m in targets.mean(1)])
        )  # fmt: skip
    federation.evaluate("test", torch.arange(2))
    metrics = federation.metrics("test")
    table = metrics["hybrid_by_test_data"].per_client()
    for column in ("loss", "mae"):
        assert torch.equal(table[column], metrics[better].per_client()[column])


@pytest.mark.slow
def test_monitored_metric_chooses_lambda():
    data = shared_out(line_data(), val_fraction=0.4)
    client = DittoChoice(
        seeded(scalar_net),
        lams=(0.01, 5.0),
        lam=5.0,
        min_validation=1,
        criterion=nn.MSELoss(),
    )
    scores = []

    class Watched(DittoChoice):
        def end_round(self, round):
            scores.append((dict(round.validation_scores), round.states["choice"].clone()))
            return super().end_round(round)

    client.__class__ = Watched
    run_tried_rounds(client, data, rounds=1)
    assert scores[-1][0] == {}, "by the loss unless another metric is named"
    outcome = run_tried_rounds(client, data, rounds=1, monitor="mae")
    values = torch.stack([scores[-1][0][f"personal_{k}"] for k in range(2)])
    assert torch.equal(outcome.states["choice"][:, 0].long(), values.argmin(0))


REFUSED = {
    "a metric that is none": (
        lambda: run_tried_rounds(
            FedAvg(scalar_net(), criterion=nn.MSELoss()), shared_out(line_data()), monitor="f1"
        ),
        "`federation.monitor` to be one of mae, r2, rmse, loss for the task Regression but got",
    ),
    "task and criterion": (
        lambda: FedAvg(mlp(), task=Classification(), criterion=nn.NLLLoss()),
        "only one of `task` and `criterion` but got both",
    ),
    "flipped labels": (
        lambda: attacked(FlippedLabels()),
        "FlippedLabels.* (no|cannot|classes)",
    ),
    "random labels": (lambda: attacked(RandomLabels()), "RandomLabels"),
    "a backdoor": (lambda: attacked(Backdoor(target=0)), "classes for Backdoor"),
    "outliers of several inputs": (
        lambda: run_tried_rounds(
            FedAvg(seeded(SumOfPair), task=Scored()), shared_out(pairs()), attack=Outliers(),
            fraction=0.4,
        ),
        "inputs of one tensor of real numbers for Outliers",
    ),
    "FedTilt": (
        lambda: run_tried_rounds(
            FedTilt(scalar_net(), criterion=nn.MSELoss()), shared_out(line_data())
        ),
        "a class id for each sample, as FedTilt",
    ),
    "a pull of classes": (
        lambda: run_tried_rounds(
            Ditto(scalar_net(), regularizer="kl", criterion=nn.MSELoss()), shared_out(line_data())
        ),
        "`regularizer` to be l2 or fisher if targets are no classes",
    ),
    "Dirichlet": (lambda: by_class(line_data()), "class ids for Dirichlet"),
    "Dirichlet of trees": (lambda: by_class(pairs()), "class ids for Dirichlet"),
    "transformed trees": (
        lambda: shared_out(pairs(), transforms=[nn.Identity()]).clients,
        "`transforms` to be left out for inputs of several tensors",
    ),
    "classes that are none": (
        lambda: run_tried_rounds(
            FedAvg(scalar_net(), task=Classification()), shared_out(line_data())
        ),
        "class id for each sample for the task Classification",
    ),
}  # fmt: skip


def attacked(attack):
    client = FedAvg(scalar_net(), criterion=nn.MSELoss())
    return run_tried_rounds(client, shared_out(line_data()), attack=attack, fraction=0.5)


def by_class(arrays):
    return FederatedData(Given(arrays), Dirichlet(0.5), 2, seed=0).clients


@table_test(("call", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.slow
def test_parts_that_need_classes_refuse_other_targets(call, words):
    with pytest.raises((ValueError, TypeError), match=f"^Expected .*{words}"):
        call()


def test_parts_without_need_of_classes_accept_any_targets():
    data = FederatedData(Given(pairs()), IID(), 2, seed=0, val_fraction=0.0, test_fraction=0.0)
    assert data.clients.train.sizes.tolist() == [8, 8]


@pytest.mark.slow
def test_task_is_inferred_from_criterion_and_data():
    def task(arrays, criterion, classes=3):
        client = FedAvg(mlp(num_classes=classes), criterion=criterion)
        federation = Federation(All(), seed=0)
        federation.setup(client, shared_out(arrays), "fit")
        return type(client.task)

    x, owner = torch.randn(12, 4), torch.arange(12) // 4
    labels = (torch.randn(12, 3) > 0).float()
    ids = Arrays(x, torch.arange(12) % 3, owner, num_classes=3)
    assert task(ids, None) is Classification
    assert task(ids, nn.MultiMarginLoss()) is Classification
    assert task(Arrays(x, labels, owner), nn.BCEWithLogitsLoss()) is MultiLabel
    assert task(Arrays(x, labels * 0.5, owner), nn.BCEWithLogitsLoss()) is CriterionTask
    assert task(Arrays(x, labels, owner), nn.SmoothL1Loss()) is Regression
    assert task(Arrays(x, labels.softmax(1), owner), None) is CriterionTask


def test_a_task_that_fits_other_data_is_not_made_anew():
    """A profiler's hooks on the criterion hold objects without a copy."""
    client = FedAvg(mlp())
    client.choose_task(torch.tensor([0, 1]), 2)
    task = client.task
    task.criterion.register_forward_hook(functools.partial(print, (item for item in ())))
    client.choose_task(torch.tensor([0, 1]), 3)
    assert client.task is task
