"""Nets of several inputs, losses of pixels, and tasks of a user's own, in several engines."""

import copy
from typing import NamedTuple

import pytest
import torch
from small_federations import Given, mlp, reals, run_rounds, seeded, sgd, shared_out
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
    """Gives logits of classes for each pixel."""

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
    """Gives logits of the next token at each position."""

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
every_case = pytest.mark.parametrize(("net", "how", "arrays", "loss"), CASES.values(), ids=CASES)


class Words(NamedTuple):
    """A sentence as a tuple with names."""

    ids: torch.Tensor
    mask: torch.Tensor


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["one_by_one_compiled", "stacked_compiled"])
def test_inputs_that_are_a_named_tuple_are_compiled_too(engine, recwarn):
    by_name = sentences()
    words = Arrays(Words(**by_name.inputs), by_name.targets, OWNER, num_classes=3)
    found, expected = (
        run_rounds(
            FedAvg(seeded(Sentences), optimizer=sgd(0.3), local_epochs=2),
            shared_out(arrays, batch_size=3),
            rounds=2,
            engine=name,
        )
        for arrays, name in ((words, engine), (by_name, "one_by_one"))
    )
    assert not [str(each.message) for each in recwarn if "cannot be compiled" in str(each.message)]
    torch.testing.assert_close(found.w, expected.w, rtol=1e-6, atol=1e-8)


def part(tree, mask):
    if isinstance(tree, dict):
        return {name: leaf[mask] for name, leaf in tree.items()}
    return tree[mask]


@pytest.mark.slow
@every_case
@pytest.mark.parametrize("kind", [FedAvg, Ditto])
def test_engines_agree(net, how, arrays, loss, kind):
    client = kind(seeded(net), optimizer=sgd(0.3), local_epochs=2, **how)
    data = shared_out(arrays(), batch_size=3)
    one = run_rounds(client, data, rounds=2)
    compiled = kind is Ditto and net is Sentences
    for engine in ("stacked", *(["stacked_compiled"] if compiled else [])):
        assert one.distance(run_rounds(client, data, rounds=2, engine=engine)) < 1e-10, engine


@every_case
def test_the_loss_is_the_users_own_on_the_real_samples(net, how, arrays, loss):
    net, made = seeded(net), arrays()
    client = FedAvg(net, optimizer=sgd(0.3), **how)
    data = shared_out(made, batch_size=100)
    own, rows = [], []
    for one in range(3):
        mine = copy.deepcopy(net).double()
        mask = made.client == one
        value = loss(mine, part(made.inputs, mask), made.targets[mask])
        value.backward()
        own.append(value.detach())
        rows.append(torch.cat([(p - 0.3 * p.grad).detach().flatten() for p in mine.parameters()]))
    for engine in ("one_by_one", "stacked"):
        found = run_rounds(client, data, rounds=1, engine=engine)
        torch.testing.assert_close(
            found.reports[0]["train/loss"], torch.stack(own).mean(), rtol=0, atol=1e-10
        )
        torch.testing.assert_close(found.w, torch.stack(rows).mean(0), rtol=0, atol=1e-10)


@every_case
def test_evaluations_and_predictions(net, how, arrays, loss):
    made = arrays()
    client = Ditto(seeded(net), **how).double()
    data = shared_out(made, val_fraction=0.0, test_fraction=0.4)
    federation = Federation(All(), seed=0)
    federation.setup(client, data, "test")
    everyone = torch.arange(3)
    federation.evaluate("test", everyone)
    table = federation.metrics("test")["personal"].per_client()
    for one, predicted in enumerate(federation.predict(everyone)):
        index = data.clients.test.samples(one)
        expected = loss(client.global_model, part(made.inputs, index), made.targets[index])
        assert float(table["loss"][one]) == pytest.approx(float(expected.detach()), abs=1e-10)
        assert len(predicted["prediction"]) == len(predicted["target"]) == len(index)


def test_validation_data_of_several_tensors_choose_lambda():
    data = shared_out(sentences(), batch_size=3, val_fraction=0.3)
    client = DittoGreedy(seeded(Sentences), min_validation=1)
    one = run_rounds(client, data)
    assert one.distance(run_rounds(client, data, engine="stacked")) < 1e-10


def test_labels_of_several_inputs_may_be_attacked():
    data, client = shared_out(sentences(), batch_size=3), FedAvg(seeded(Sentences))
    one = run_rounds(client, data, attack=FlippedLabels(), ids=[1])
    assert (
        one.distance(run_rounds(client, data, attack=FlippedLabels(), ids=[1], engine="stacked"))
        < 1e-10
    )
    assert one.distance(run_rounds(client, data)) > 1e-3


@pytest.mark.parametrize("engine", ["one_by_one", "stacked"])
def test_large_images_stay_small_until_the_minibatch(engine, monkeypatch):
    def outcome():
        data = shared_out(arrays, batch_size=3, test_fraction=0.4)
        federation = Federation(All(), seed=0)
        federation.setup(client, data, "test")
        federation.evaluate("test", torch.arange(3))
        table = federation.metrics("test")["personal"].per_client()
        return data.clients.inputs.dtype, run_rounds(client, data, engine=engine), table

    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (16, 1, 2, 2), generator=draw, dtype=torch.uint8)
    arrays = Arrays(images, torch.arange(16) % 3, OWNER, num_classes=3)
    client = Ditto(seeded(lambda: nn.Sequential(nn.Flatten(), mlp())))
    before, one, table = outcome()
    monkeypatch.setattr(module, "_LARGE", 0)
    after, other, other_table = outcome()
    assert (before, after) == (torch.float32, torch.uint8)
    assert one.distance(other) == 0
    for name, column in table.items():
        torch.testing.assert_close(column, other_table[name], rtol=0, atol=0, equal_nan=True)


class SumOfPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(3, 2)

    def forward(self, one, other):
        return {"logits": self.first(one) + self.second(other), "extra": one}


class Scored(Task):
    """A user's own task: tuples in, a dict out, targets in a dict, and a metric of its own."""

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


@pytest.mark.parametrize("kind", [FedAvg, Ditto])
def test_a_task_of_ones_own(kind):
    client = kind(seeded(SumOfPair), task=Scored(), optimizer=sgd(0.2))
    data = shared_out(pairs(), batch_size=2, test_fraction=0.4)
    one = run_rounds(client, data)
    assert one.distance(run_rounds(client, data, engine="stacked")) < 1e-10
    federation = Federation(All(), seed=0)
    federation.setup(client, data, "test")
    federation.evaluate("test", torch.arange(3))
    found = federation.metrics("test")["global"]
    assert federation.monitored_metric == "f1"
    assert "f1_worst10" in found.compute()
    for k in range(3):
        batch = data.clients.batch(data.clients.test.samples(k))
        logits = client.global_model(*batch.inputs)["logits"]
        expected = MulticlassF1Score(2, average="macro")(logits, batch.targets["label"])
        assert float(found.per_client()["f1"][k]) == pytest.approx(float(expected))


def line(noise=0.1):
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(40, 4, generator=draw)
    y = x.sum(1, keepdim=True) + noise * torch.randn(40, 1, generator=draw)
    return reals(x, y, torch.arange(4).repeat_interleave(10))


def net_of_one():
    return mlp(num_classes=1)


def test_regression_has_every_figure_of_its_own_metrics():
    client = Ditto(seeded(net_of_one), criterion=nn.MSELoss())
    data = shared_out(line(), val_fraction=0.2, test_fraction=0.3)
    federation = Federation(All(), seed=0)
    federation.setup(client, data, "test")
    everyone = torch.arange(4)
    federation.evaluate("test", everyone)
    assert isinstance(client.task, Regression)
    assert federation.monitored_metric == "mae"
    errors = []
    for k in range(4):
        batch = data.clients.batch(data.clients.test.samples(k))
        errors.append((client.global_model(batch.inputs.float()) - batch.targets).abs().mean())
    errors = torch.stack(errors).double().detach()
    found = federation.metrics("test")["global"].compute()
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
        assert float(found[name]) == pytest.approx(float(value), rel=1e-5), name
    assert found["r2_worst10"] <= found["r2"] <= found["r2_best10"], "larger is better"


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


@pytest.mark.parametrize(("monitor", "better"), [("mae", "global"), ("loss", "personal")])
def test_the_monitored_metric_chooses_the_hybrid_model(monitor, better):
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


def test_the_monitored_metric_chooses_lambda():
    data = shared_out(line(), val_fraction=0.4)
    client = DittoChoice(
        seeded(net_of_one), lams=(0.01, 5.0), lam=5.0, min_validation=1, criterion=nn.MSELoss()
    )
    scores = []

    class Watched(DittoChoice):
        def end_round(self, round):
            scores.append((dict(round.validation_scores), round.states["choice"].clone()))
            return super().end_round(round)

    client.__class__ = Watched
    run_rounds(client, data, rounds=1)
    assert scores[-1][0] == {}, "by the loss unless another metric is named"
    outcome = run_rounds(client, data, rounds=1, monitor="mae")
    values = torch.stack([scores[-1][0][f"personal_{k}"] for k in range(2)])
    assert torch.equal(outcome.states["choice"][:, 0].long(), values.argmin(0))


REFUSED = {
    "a metric that is none": (
        lambda: run_rounds(
            FedAvg(net_of_one(), criterion=nn.MSELoss()), shared_out(line()), monitor="f1"
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
        lambda: run_rounds(
            FedAvg(seeded(SumOfPair), task=Scored()), shared_out(pairs()), attack=Outliers(),
            fraction=0.4,
        ),
        "inputs of one tensor of real numbers for Outliers",
    ),
    "FedTilt": (
        lambda: run_rounds(FedTilt(net_of_one(), criterion=nn.MSELoss()), shared_out(line())),
        "a class id for each sample, as FedTilt",
    ),
    "a pull of classes": (
        lambda: run_rounds(
            Ditto(net_of_one(), regularizer="kl", criterion=nn.MSELoss()), shared_out(line())
        ),
        "`regularizer` to be l2 or fisher if targets are no classes",
    ),
    "Dirichlet": (lambda: by_class(line()), "class ids for Dirichlet"),
    "Dirichlet of trees": (lambda: by_class(pairs()), "class ids for Dirichlet"),
    "transformed trees": (
        lambda: shared_out(pairs(), transforms=[nn.Identity()]).clients,
        "`transforms` to be left out for inputs of several tensors",
    ),
    "classes that are none": (
        lambda: run_rounds(FedAvg(net_of_one(), task=Classification()), shared_out(line())),
        "class id for each sample for the task Classification",
    ),
}  # fmt: skip


def attacked(attack):
    client = FedAvg(net_of_one(), criterion=nn.MSELoss())
    return run_rounds(client, shared_out(line()), attack=attack, fraction=0.5)


def by_class(arrays):
    return FederatedData(Given(arrays), Dirichlet(0.5), 2, seed=0).clients


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_what_needs_classes_says_so(call, words):
    with pytest.raises((ValueError, TypeError), match=f"^Expected .*{words}"):
        call()


def test_who_needs_no_classes_gets_any_data():
    data = FederatedData(Given(pairs()), IID(), 2, seed=0, val_fraction=0.0, test_fraction=0.0)
    assert data.clients.train.sizes.tolist() == [8, 8]


def test_the_task_is_told_by_criterion_and_data():
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
