"""Evaluation against plain loops: every model on its clients' samples, and then put back."""

import math
from dataclasses import replace

import pytest
import torch
from further_cases import covering
from hypothesis import given, settings
from hypothesis import strategies as st
from small_federations import Given, classes, mlp, reals, seeded, sgd, shared_out
from torch import nn

import pl_fed
from pl_fed.clients import Ditto, FedAvg, Local
from pl_fed.clients.contract import ClientRound, ModelRows
from pl_fed.clients.model_guard import restore_models
from pl_fed.data import FederatedData
from pl_fed.data.client_data import Part
from pl_fed.engine.rule import trains_convolutions
from pl_fed.evaluation.evaluator import Evaluator
from pl_fed.evaluation.monitor import Tables, prefer_second
from pl_fed.metrics import ClientMetrics
from pl_fed.samplers import All
from pl_fed.state import ClientStore

SIZES = [9, 2, 14, 5]
EVERYONE = torch.arange(4)


def make_clients(arrays=None):
    """Clients of several sizes; the second has one test sample and no validation samples."""
    arrays = classes(SIZES, seed=3) if arrays is None else arrays
    source = Given(arrays)
    return FederatedData(source, val_fraction=0.2, test_fraction=0.4, seed=0).clients


def make_store(client, num_clients=4, seed=5):
    """A store with a different model for every client."""
    client.double().eval()
    defaults = client.state_defaults()
    store = ClientStore(num_clients, defaults)
    draw = torch.Generator().manual_seed(seed)
    for name, row in defaults.items():
        noise = torch.rand(num_clients, len(row), generator=draw, dtype=row.dtype)
        store.write(name, torch.arange(num_clients), row + noise)
    return store


def make_round(client, store, clients):
    """A round of clients with the states of the store."""
    size = torch.ones(len(clients), 1, dtype=torch.float64)
    broadcast = ModelRows(client.row("global").data, client.statistics("global").data)
    states = {name: store.read(name, clients) for name in store.defaults}
    return client.run_begin(ClientRound(clients, size, size, broadcast, states=states))


def make_evaluator(client, store, stacked=None):
    """An evaluator of clients with the states of the store."""
    evaluator = Evaluator(client, lambda ids: make_round(client, store, ids))
    evaluator.runner.stacked = stacked
    return evaluator


def compute_metrics(client, data, part, model, store, clients=EVERYONE, stacked=None):
    metrics = ClientMetrics(data.num_clients, data.num_classes)
    with torch.no_grad():
        make_evaluator(client, store, stacked).evaluate(data, part, clients, {model: metrics})
    return metrics


def reference_outputs(client, data, part, model, store, k):
    """Targets and outputs of a client, computed with its net alone."""
    index = data.part(part).samples(k)
    if model == "personal":
        row = store.read("personal", torch.tensor([k]))[0]
        nn.utils.vector_to_parameters(row, client.personal_model.parameters())
    with torch.no_grad():
        return data.targets[index], client.model(model)(data.inputs[index].double())


def to_float64(data):
    return data.to(torch.device("cpu"), torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1024, 3, 1])
@pytest.mark.parametrize("part", ["train", "val", "test"])
@pytest.mark.parametrize("model", ["global", "personal"])
def test_sums_equal_a_plain_loop(monkeypatch, batch, part, model):
    """Batches may split a client's samples or mix those of several clients."""
    monkeypatch.setattr("pl_fed.evaluation.model_runner._BATCH", batch)
    data, client = to_float64(make_clients()), Ditto(seeded(mlp))
    store = make_store(client)
    metrics = compute_metrics(client, data, part, model, store)
    for k in range(4):
        y, outputs = reference_outputs(client, data, part, model, store, k)
        hit = outputs.argmax(1) == y
        assert metrics.count[k].tolist() == y.bincount(minlength=3).tolist()
        assert metrics.correct[k].tolist() == y[hit].bincount(minlength=3).tolist()
        expected = nn.functional.cross_entropy(outputs, y, reduction="sum")
        torch.testing.assert_close(metrics.loss_sum[k], expected)


def test_client_without_samples_does_not_count():
    data, client = to_float64(make_clients()), Ditto(seeded(mlp))
    assert len(data.val.samples(1)) == 0
    metrics = compute_metrics(client, data, "val", "personal", make_store(client))
    assert metrics.count[1].sum() == 0
    assert metrics.per_client()["accuracy"][1].isnan()


def test_evaluation_of_some_clients_in_any_order():
    data, client = to_float64(make_clients()), Ditto(seeded(mlp))
    store = make_store(client)
    full = compute_metrics(client, data, "test", "personal", store)
    partial = compute_metrics(client, data, "test", "personal", store, torch.tensor([3, 0]))
    for k in (0, 3):
        assert torch.equal(partial.correct[k], full.correct[k])
        torch.testing.assert_close(partial.loss_sum[k], full.loss_sum[k])
    assert partial.count[[1, 2]].sum() == 0


def test_real_valued_targets_have_loss_metrics_and_no_accuracy():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=draw), torch.randn(30, 3, generator=draw)
    owner = torch.arange(4).repeat_interleave(torch.tensor(SIZES))
    data = to_float64(make_clients(reals(x, y, owner)))
    client = Ditto(seeded(mlp), criterion=nn.MSELoss())
    store = make_store(client)
    metrics = compute_metrics(client, data, "test", "personal", store)
    for k in range(4):
        y, outputs = reference_outputs(client, data, "test", "personal", store, k)
        assert metrics.count[k].tolist() == [len(y)]
        torch.testing.assert_close(metrics.loss_sum[k], (outputs - y).square().mean(1).sum())
    figures = ("", "_weighted", "_std", "_var", "_worst10", "_best10", "_jain")
    assert set(metrics.compute()) == {f"loss{figure}" for figure in figures}


class StopError(Exception):
    """What the work space must survive."""


@pytest.mark.parametrize("interrupted", [False, True])
def test_guard_restores_the_models(interrupted):
    client = Ditto(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    store = make_store(client)
    before = {name: value.clone() for name, value in client.state_dict().items()}
    try:
        with restore_models(client, ("global", "personal")):
            client.row("personal").data.copy_(store.read("personal", torch.tensor([2]))[0])
            client.statistics("personal").data.zero_()
            assert not torch.equal(
                client.personal_model[0].weight, before["personal_model.0.weight"]
            )
            client.row("global").data.zero_()
            client.statistics("global").data.zero_()
            if interrupted:
                raise StopError
    except StopError:
        pass
    for name, value in client.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_batch_norm_evaluates_with_the_statistics_of_the_client():
    client = Ditto(seeded(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))))
    store, data = make_store(client), to_float64(make_clients())
    metrics = compute_metrics(client, data, "test", "personal", store)
    for k in range(4):
        weight, bias, linear, constant = store.read("personal", torch.tensor([k]))[0].split(
            [4, 4, 12, 3]
        )
        mean, var = store.read("personal.statistics", torch.tensor([k]))[0].split([4, 4])
        index = data.test.samples(k)
        h = (data.inputs[index] - mean) / (var + 1e-5).sqrt() * weight + bias
        outputs = h @ linear.view(3, 4).T + constant
        expected = nn.functional.cross_entropy(outputs, data.targets[index], reduction="sum")
        torch.testing.assert_close(metrics.loss_sum[k], expected)


@pytest.mark.parametrize("model", ["global", "personal"])
def test_net_that_mixes_the_samples_of_a_batch_gets_those_of_one_client(model):
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    client = Ditto(seeded(lambda: nn.Sequential(norm, nn.Linear(4, 3))))
    store, data = make_store(client, 2), to_float64(make_clients(classes([14, 9])))
    metrics = compute_metrics(client, data, "test", model, store, torch.tensor([1, 0]), True)
    for k in range(2):
        targets, outputs = reference_outputs(client, data, "test", model, store, k)
        expected = nn.functional.cross_entropy(outputs, targets, reduction="sum")
        torch.testing.assert_close(metrics.loss_sum[k], expected)


class Centered(nn.Linear):
    """Centered: subtracts the mean of the batch, without a layer that tells so."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


@pytest.mark.filterwarnings("ignore:Outputs of Centered")
@pytest.mark.parametrize("model", ["global", "personal"])
def test_net_that_mixes_samples_by_an_operation_gets_those_of_one_client(model):
    client, data = (
        Ditto(seeded(lambda: Centered(4, 3))),
        shared_out(classes([14, 9]), test_fraction=0.4),
    )
    pl_fed.Federation(All(), seed=0).setup(client, data, "fit")  # finds it out
    store, data = make_store(client, 2), to_float64(data.clients)
    metrics = compute_metrics(client, data, "test", model, store, torch.tensor([1, 0]), True)
    for k in range(2):
        targets, outputs = reference_outputs(client, data, "test", model, store, k)
        expected = nn.functional.cross_entropy(outputs, targets, reduction="sum")
        torch.testing.assert_close(metrics.loss_sum[k], expected)


# Predictions


@pytest.mark.parametrize("model", ["global", "personal"])
def test_predictions_are_in_the_order_of_the_clients_samples(model):
    data, client = to_float64(make_clients()), Ditto(seeded(mlp))
    store = make_store(client)
    with torch.no_grad():
        tables = make_evaluator(client, store).predict(data, torch.tensor([2, 1]), model)
    assert [table["client"] for table in tables] == [2, 1]
    for table in tables:
        y, outputs = reference_outputs(client, data, "test", model, store, table["client"])
        assert torch.equal(table["sample"], data.test.samples(table["client"]))
        assert torch.equal(table["target"], y)
        assert torch.equal(table["prediction"], outputs.argmax(1))
        torch.testing.assert_close(table["probability"], outputs.softmax(1).amax(1))


def test_predictions_of_copied_samples_name_the_original_samples():
    data, client = to_float64(make_clients()), Ditto(seeded(mlp))
    shared = replace(data, test=Part.from_pieces([data.test.samples(1)] * data.num_clients))
    with torch.no_grad():
        tables = make_evaluator(client, make_store(client)).predict(
            shared.copy_shared_samples(), torch.tensor([2, 0]), "global"
        )
    for table in tables:
        assert torch.equal(table["sample"], data.test.samples(1))
        assert torch.equal(table["target"], data.targets[table["sample"]])


def test_a_client_without_test_samples_gets_an_empty_table():
    arrays = classes([1, 1, 4, 4])
    data, client = to_float64(make_clients(arrays)), Ditto(seeded(mlp))
    assert len(data.test.samples(0)) == 0
    evaluator = make_evaluator(client, make_store(client))
    with torch.no_grad():
        (table,) = evaluator.predict(data, torch.tensor([0]), "personal")
    lengths = {len(table[name]) for name in ("sample", "target", "prediction", "probability")}
    assert lengths == {0}


def test_real_valued_predictions_are_the_outputs():
    x, y = torch.randn(30, 4), torch.randn(30, 3)
    owner = torch.arange(4).repeat_interleave(torch.tensor(SIZES))
    data = to_float64(make_clients(reals(x, y, owner)))
    client = Ditto(seeded(mlp), criterion=nn.MSELoss())
    store = make_store(client)
    with torch.no_grad():
        (table,) = make_evaluator(client, store).predict(data, torch.tensor([2]), "personal")
    assert "probability" not in table
    outputs = reference_outputs(client, data, "test", "personal", store, 2)[1]
    torch.testing.assert_close(table["prediction"], outputs)


def test_single_real_valued_output_is_a_number_per_sample():
    owner = torch.arange(4).repeat_interleave(torch.tensor(SIZES))
    data = to_float64(make_clients(reals(torch.randn(30, 4), torch.randn(30), owner)))
    client = Ditto(seeded(lambda: nn.Linear(4, 1)), criterion=nn.MSELoss())
    with torch.no_grad():
        (table,) = make_evaluator(client, make_store(client)).predict(
            data, torch.tensor([2]), "personal"
        )
    assert table["prediction"].shape == table["target"].shape == (len(data.test.samples(2)),)


# Within a fit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "kind"),
    covering(["32-true", "64-true", "bf16-mixed"], [FedAvg, Local, Ditto]),
)
def test_logged_metrics_equal_those_of_the_models(tmp_path, kind, precision):
    """Autocast may cache the weights of the previous client in mixed precision."""
    arrays = classes([20, 10, 40, 15], num_classes=3, seed=4)
    module = FederatedData(Given(arrays), val_fraction=0.3, test_fraction=0.3, seed=0)
    federation = pl_fed.Federation(seed=0)
    trainer = pl_fed.Trainer(
        federation,
        max_epochs=2,
        default_root_dir=tmp_path,
        precision=precision,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    client = kind(seeded(lambda: mlp(8)), optimizer=sgd(0.5), local_epochs=3)
    federation.sampler.cohort_size = 4
    trainer.fit(client, module)
    logged = trainer.callback_metrics
    data = federation.data
    for model in client.trained:
        losses = []
        for k in range(4):
            if model == "personal":
                row = federation.store.read("personal", torch.tensor([k]))[0]
                nn.utils.vector_to_parameters(row, client.personal_model.parameters())
            index = data.val.samples(k)
            with torch.no_grad(), trainer.precision_plugin.forward_context():
                outputs = client.model(model)(data.inputs[index])
                losses.append(nn.functional.cross_entropy(outputs, data.targets[index]).item())
        expected = sum(losses) / 4
        tolerance = 2e-3 if precision == "bf16-mixed" else 1e-6
        assert float(logged[f"val/{model}/loss"]) == pytest.approx(expected, abs=tolerance)
        assert max(losses) - min(losses) > 0.02  # the wrong client's model would show
    table = trainer.predict(client, module)[0][0]
    assert table["probability"].dtype == (torch.float64 if "64" in precision else torch.float32)


# Stacked


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=7),
    batch=st.sampled_from([1, 5, 16, 1024]),
    at_once=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_stacked_evaluation_equals_evaluation_one_by_one(sizes, batch, at_once, seed):
    """Clients may have no samples, and come in any order."""
    arrays = classes(sizes, seed=seed)
    data = to_float64(
        FederatedData(Given(arrays), val_fraction=0.0, test_fraction=0.4, seed=0).clients
    )
    client = Ditto(seeded(lambda: nn.Sequential(mlp(), nn.LayerNorm(3))))
    full = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed))
    store = make_store(client, len(sizes))
    with pytest.MonkeyPatch.context() as patch:
        plain = compute_metrics(client, data, "test", "personal", store, full, stacked=False)
        patch.setattr("pl_fed.evaluation.model_runner._STACK_BATCH", batch)
        row_bytes = client.row("global").data.nbytes
        patch.setattr("pl_fed.evaluation.model_runner._ROWS_BYTES", at_once * 2 * row_bytes)
        stacked = compute_metrics(client, data, "test", "personal", store, full, stacked=True)
    assert torch.equal(stacked.count, plain.count)
    assert torch.equal(stacked.correct, plain.correct)
    torch.testing.assert_close(stacked.loss_sum, plain.loss_sum, rtol=1e-12, atol=1e-12)
    assert int(plain.count.sum()) == int(data.test.sizes.sum())


def test_batch_norms_are_stacked_with_their_statistics():
    client = Ditto(seeded(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))))
    store, data = make_store(client), to_float64(make_clients())
    plain, stacked = (
        compute_metrics(client, data, "test", "personal", store, stacked=stacked)
        for stacked in (False, True)
    )
    torch.testing.assert_close(stacked.loss_sum, plain.loss_sum, rtol=1e-12, atol=1e-12)


def test_stacked_predictions_are_in_the_order_of_the_clients(monkeypatch):
    monkeypatch.setattr("pl_fed.evaluation.model_runner._STACK_BATCH", 4)
    data, client = to_float64(make_clients()), Ditto(seeded(mlp))
    store, asked = make_store(client), torch.tensor([3, 1, 2])
    with torch.no_grad():
        plain, stacked = (
            make_evaluator(client, store, stacked).predict(data, asked, "personal")
            for stacked in (False, True)
        )
    for expected, table in zip(plain, stacked, strict=True):
        assert expected["client"] == table["client"]
        for name in ("sample", "target", "prediction"):
            assert torch.equal(expected[name], table[name])
        torch.testing.assert_close(expected["probability"], table["probability"])


class Branching(nn.Module):
    """A net with a branch on the data, which vmap refuses."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        outputs = self.net(x)
        return outputs if float(x.sum()) > -1e9 else -outputs


class Listed(nn.Module):
    """A net that reads its weights from a list of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.layers = [(layer.weight, layer.bias) for layer in (self.first, self.last)]

    def forward(self, x):
        first, last = self.layers
        return nn.functional.linear(nn.functional.linear(x, *first).tanh(), *last)


@pytest.mark.parametrize("make", [Branching, Listed])
def test_net_that_does_not_stack_is_evaluated_one_by_one_and_reported_once(caplog, make):
    data, client = to_float64(make_clients()), Ditto(seeded(make))
    store = make_store(client)
    evaluator = make_evaluator(client, store, stacked=True)
    metrics = ClientMetrics(data.num_clients, data.num_classes)
    with caplog.at_level("INFO"), torch.no_grad():
        for part in ("test", "train"):
            evaluator.evaluate(data, part, EVERYONE, {"personal": metrics})
    records = [record for record in caplog.records if "evaluated one by one" in record.message]
    assert len(records) == 1
    assert evaluator.runner.stacked is False
    for k in range(4):
        expected = 0.0
        for part in ("test", "train"):
            y, outputs = reference_outputs(client, data, part, "personal", store, k)
            expected += nn.functional.cross_entropy(outputs, y, reduction="sum")
        torch.testing.assert_close(metrics.loss_sum[k], expected)


def test_stacked_evaluation_leaves_the_models_unchanged():
    data, client = to_float64(make_clients()), Ditto(seeded(mlp))
    store = make_store(client)
    version = client.row("personal").data._version
    compute_metrics(client, data, "test", "personal", store, stacked=True)
    compute_metrics(client, data, "test", "global", store)
    assert client.row("personal").data._version == version
    compute_metrics(client, data, "test", "personal", store, stacked=False)
    assert client.row("personal").data._version > version


@pytest.mark.parametrize(
    ("make", "stacks"),
    [
        (mlp, True),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.LazyLinear(3)), False),
        (lambda: nn.Sequential(nn.Conv1d(1, 2, 1).requires_grad_(False), nn.Linear(4, 3)), True),
    ],
)
def test_trained_convolutions_are_not_stacked_on_a_cpu(make, stacks):
    assert trains_convolutions(make()) != stacks


def test_losses_are_means_and_leave_the_client_in_training():
    data = to_float64(make_clients())
    client = Ditto(seeded(lambda: nn.Sequential(mlp(), nn.Dropout(0.5))))
    store = make_store(client)
    client.train()
    evaluator = make_evaluator(client, store)
    asked = torch.tensor([1, 2, 0])
    rows = make_round(client, store, asked).models["personal"]
    losses = evaluator.own_tables(data, "val", asked, "personal", rows).mean_losses
    assert client.training
    assert client.personal_model.training
    client.eval()
    assert losses[0].isnan()  # no validation samples
    for position, k in ((1, 2), (2, 0)):
        y, outputs = reference_outputs(client, data, "val", "personal", store, k)
        torch.testing.assert_close(losses[position], nn.functional.cross_entropy(outputs, y))


def test_clients_without_a_weighted_class_have_no_loss():
    data = to_float64(make_clients())
    weight = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    client = FedAvg(seeded(mlp), criterion=nn.CrossEntropyLoss(weight))
    store = make_store(client)
    index = data.test.samples(1)
    data.targets[index] = 1
    metrics = compute_metrics(client, data, "test", "global", store)
    losses = [
        nn.functional.cross_entropy(
            *reversed(reference_outputs(client, data, "test", "global", store, k)), weight
        )
        for k in (0, 2, 3)
    ]
    torch.testing.assert_close(metrics.compute()["loss"], torch.stack(losses).mean())
    assert metrics.per_client()["loss"].isnan().tolist() == [False, True, False, False]


# Hybrid models


def test_nan_loss_is_worse_than_any_loss():
    nan = math.nan
    none, right = torch.zeros(4, 1), torch.tensor([[1], [1], [1], [2]])
    has_loss = torch.ones(4, dtype=torch.bool)
    first = Tables(right, none, torch.tensor([nan, 1.0, nan, nan]), has_loss, torch.empty(4, 0))
    losses = torch.tensor([2.0, nan, nan, 0.0])
    second = Tables(torch.ones(4, 1), none, losses, has_loss, torch.empty(4, 0))
    assert prefer_second(first, second).tolist() == [True, False, True, False]


def hybrid_metrics(client, data, store, part, judge):
    names = ("global", "personal", "hybrid")
    metrics = {name: ClientMetrics(data.num_clients, data.num_classes) for name in names}
    with torch.no_grad():
        make_evaluator(client, store).evaluate(data, part, EVERYONE, metrics, {"hybrid": judge})
    return {name: metric.per_client() for name, metric in metrics.items()}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["val", "test"])
@pytest.mark.parametrize("seed", range(4))
def test_hybrid_model_is_the_better_model_of_a_client_on_validation_data(part, seed):
    data, client = to_float64(make_clients()), Ditto(seeded(mlp))
    store = make_store(client, seed=seed)
    judged, actual = (
        hybrid_metrics(client, data, store, judged_part, "val") for judged_part in ("val", part)
    )
    for k in range(4):
        own, common = (
            {name: values[k] for name, values in judged[m].items()} for m in ("personal", "global")
        )
        lead = own["accuracy"] - common["accuracy"]
        better = lead > 0 or (lead == 0 and own["loss"] <= common["loss"])
        takes = "personal" if better or own["samples"] == 0 else "global"
        for name, values in actual["hybrid"].items():
            assert values[k].equal(actual[takes][name][k]) or values[k].isnan()


def test_hybrid_model_chosen_by_test_data_is_the_best_model():
    data, client = to_float64(make_clients()), Ditto(seeded(mlp))
    actual = hybrid_metrics(client, data, make_store(client), "test", "test")
    best = torch.maximum(actual["personal"]["accuracy"], actual["global"]["accuracy"])
    assert actual["hybrid"]["accuracy"].equal(best)


def test_hybrid_model_of_real_valued_targets_is_chosen_by_loss():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=draw), torch.randn(30, 3, generator=draw)
    owner = torch.arange(4).repeat_interleave(torch.tensor(SIZES))
    data = to_float64(make_clients(reals(x, y, owner)))
    client = Ditto(seeded(mlp), criterion=nn.MSELoss())
    actual = hybrid_metrics(client, data, make_store(client), "test", "test")
    best = torch.minimum(actual["personal"]["loss"], actual["global"]["loss"])
    assert actual["hybrid"]["loss"].equal(best)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "selection", "fraction", "expected"),
    [
        (Ditto, "validation", 0.2, {"val": {"hybrid"}, "test": {"hybrid"}}),
        (Ditto, "test", 0.2, {"val": set(), "test": {"hybrid_by_test_data"}}),
        (Ditto, "validation", 0.0, {"val": set(), "test": set()}),
        (Ditto, None, 0.2, {"val": set(), "test": set()}),
        (FedAvg, "validation", 0.2, {"val": set(), "test": set()}),
        (Local, "validation", 0.2, {"val": set(), "test": set()}),
    ],
)
def test_evaluated_hybrid_models(kind, selection, fraction, expected):
    federation = pl_fed.Federation(model_selection=selection, seed=0)
    arrays = classes([40] * 10, seed=3)
    data = FederatedData(Given(arrays), val_fraction=fraction, test_fraction=0.4, seed=0)
    client = kind(seeded(mlp))
    federation.setup(client, data, "fit")
    for part, names in expected.items():
        assert set(federation.metrics(part)) - set(client.evaluated) == names


def test_unknown_selection_is_refused():
    with pytest.raises(ValueError, match="`model_selection` to be 'validation', 'test' or None"):
        pl_fed.Federation(model_selection="oracle")


@pytest.mark.parametrize("options", [{"weight": [1.0, 10.0, 0.1]}, {"ignore_index": 1}], ids=str)
def test_evaluated_losses_are_the_means_of_training(options):
    """Class weights apply to training and evaluation alike."""
    options = {k: torch.tensor(v).double() if k == "weight" else v for k, v in options.items()}
    client = Local(seeded(mlp), criterion=nn.CrossEntropyLoss(**options))
    data, store = to_float64(make_clients()), make_store(client)
    for model in ("global", "personal"):
        actual = compute_metrics(client, data, "test", model, store).per_client()["loss"]
        for k in range(4):
            targets, outputs = reference_outputs(client, data, "test", model, store, k)
            expected = client.criterion(outputs, targets).nan_to_num(0)
            torch.testing.assert_close(actual[k], expected)
    evaluator = make_evaluator(client, store)
    actual = evaluator.start_losses(
        data, EVERYONE, {2: lambda batch: batch._replace(targets=2 - batch.targets)}
    )
    for k in range(4):
        targets, outputs = reference_outputs(client, data, "train", "global", store, k)
        targets = 2 - targets if k == 2 else targets
        torch.testing.assert_close(actual[k], client.criterion(outputs, targets))


def test_clients_without_samples_do_not_prevent_stacking():
    client = Local(seeded(mlp))
    data, store = to_float64(make_clients()), make_store(client)
    evaluator = make_evaluator(client, store, stacked=True)
    rows = make_round(client, store, torch.tensor([1, 1])).models["personal"]
    tables = evaluator.own_tables(data, "val", torch.tensor([1, 1]), "personal", rows)
    assert tables.mean_losses.isnan().all()
    assert evaluator.runner.stacked
