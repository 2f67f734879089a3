"""Evaluation against plain loops: every model on its clients' samples, and then put back."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_federations import Given, classes, mlp, reals, seeded, sgd
from torch import nn

import pl_fed
from pl_fed.clients import Ditto, FedAvg, Local
from pl_fed.clients.contract import ClientRound, ModelRows
from pl_fed.clients.model_guard import ModelGuard
from pl_fed.data import FederatedData
from pl_fed.data.client_data import Part
from pl_fed.evaluation.evaluator import Evaluator, trains_convolutions
from pl_fed.evaluation.monitor import Tables, prefer_second
from pl_fed.metrics import ClientMetrics
from pl_fed.state import ClientStore

SIZES = [9, 2, 14, 5]
EVERYONE = torch.arange(4)


def data_of(arrays=None):
    """Clients of several sizes; the second has one test sample, and none to validate on."""
    arrays = classes(SIZES, seed=3) if arrays is None else arrays
    source = Given(arrays)
    return FederatedData(source, val_fraction=0.2, test_fraction=0.4, seed=0).clients


def store_of(client, num_clients=4, seed=5):
    """A store in which every client has a model of its own."""
    client.double().eval()
    defaults = client.state_defaults()
    store = ClientStore(num_clients, defaults)
    draw = torch.Generator().manual_seed(seed)
    for name, row in defaults.items():
        noise = torch.rand(num_clients, len(row), generator=draw, dtype=row.dtype)
        store.write(name, torch.arange(num_clients), row + noise)
    return store


def round_of(client, store, clients):
    """A round of clients that begin with what the store has."""
    size = torch.ones(len(clients), 1, dtype=torch.float64)
    broadcast = ModelRows(client.row("global").data, client.statistics("global").data)
    states = {name: store.read(name, clients) for name in store.defaults}
    return client.run_begin(ClientRound(clients, size, size, broadcast, states=states))


def evaluator_of(client, store, stacked=None):
    """An evaluator whose clients begin with what the store has."""
    evaluator = Evaluator(client, lambda ids: round_of(client, store, ids))
    evaluator.stacked = stacked
    return evaluator


def metrics_of(client, data, part, model, store, clients=EVERYONE, stacked=None):
    metrics = ClientMetrics(data.num_clients, data.num_classes)
    with torch.no_grad():
        evaluator_of(client, store, stacked).evaluate(data, part, clients, {model: metrics})
    return metrics


def by_hand(client, data, part, model, store, one):
    """Targets and outputs of one client, by a net that is loaded for it alone."""
    index = data.part(part).samples(one)
    if model == "personal":
        row = store.read("personal", torch.tensor([one]))[0]
        nn.utils.vector_to_parameters(row, client.personal_model.parameters())
    with torch.no_grad():
        return data.targets[index], client.model(model)(data.inputs[index].double())


def doubled(data):
    return data.to(torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("batch", [1024, 3, 1])
@pytest.mark.parametrize("part", ["train", "val", "test"])
@pytest.mark.parametrize("model", ["global", "personal"])
def test_sums_are_those_of_a_plain_loop(monkeypatch, batch, part, model):
    """Also where a client's samples are split over several batches, or share one with others'."""
    monkeypatch.setattr("pl_fed.evaluation.evaluator._BATCH", batch)
    data, client = doubled(data_of()), Ditto(seeded(mlp))
    store = store_of(client)
    metrics = metrics_of(client, data, part, model, store)
    for one in range(4):
        y, outputs = by_hand(client, data, part, model, store, one)
        hit = outputs.argmax(1) == y
        assert metrics.count[one].tolist() == y.bincount(minlength=3).tolist()
        assert metrics.correct[one].tolist() == y[hit].bincount(minlength=3).tolist()
        expected = nn.functional.cross_entropy(outputs, y, reduction="sum")
        torch.testing.assert_close(metrics.loss_sum[one], expected)


def test_a_client_without_samples_counts_nothing():
    data, client = doubled(data_of()), Ditto(seeded(mlp))
    assert len(data.val.samples(1)) == 0
    metrics = metrics_of(client, data, "val", "personal", store_of(client))
    assert metrics.count[1].sum() == 0
    assert metrics.per_client()["accuracy"][1].isnan()


def test_some_clients_in_any_order():
    data, client = doubled(data_of()), Ditto(seeded(mlp))
    store = store_of(client)
    everyone = metrics_of(client, data, "test", "personal", store)
    some = metrics_of(client, data, "test", "personal", store, torch.tensor([3, 0]))
    for one in (0, 3):
        assert torch.equal(some.correct[one], everyone.correct[one])
        torch.testing.assert_close(some.loss_sum[one], everyone.loss_sum[one])
    assert some.count[[1, 2]].sum() == 0


def test_real_valued_targets_have_all_figures_of_the_loss_and_no_accuracy():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=draw), torch.randn(30, 3, generator=draw)
    owner = torch.arange(4).repeat_interleave(torch.tensor(SIZES))
    data = doubled(data_of(reals(x, y, owner)))
    client = Ditto(seeded(mlp), criterion=nn.MSELoss())
    store = store_of(client)
    metrics = metrics_of(client, data, "test", "personal", store)
    for one in range(4):
        y, outputs = by_hand(client, data, "test", "personal", store, one)
        assert metrics.count[one].tolist() == [len(y)]
        torch.testing.assert_close(metrics.loss_sum[one], (outputs - y).square().mean(1).sum())
    figures = ("", "_weighted", "_std", "_var", "_worst10", "_best10", "_jain")
    assert set(metrics.compute()) == {f"loss{figure}" for figure in figures}


class StopError(Exception):
    """What the work space must survive."""


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_models_are_put_back(interrupted):
    client = Ditto(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    store = store_of(client)
    before = {name: value.clone() for name, value in client.state_dict().items()}
    try:
        with ModelGuard(client, ("global", "personal")):
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


def test_batch_norm_evaluates_with_the_clients_own_statistics():
    client = Ditto(seeded(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))))
    store, data = store_of(client), doubled(data_of())
    metrics = metrics_of(client, data, "test", "personal", store)
    for one in range(4):
        weight, bias, linear, constant = store.read("personal", torch.tensor([one]))[0].split(
            [4, 4, 12, 3]
        )
        mean, var = store.read("personal.statistics", torch.tensor([one]))[0].split([4, 4])
        index = data.test.samples(one)
        h = (data.inputs[index] - mean) / (var + 1e-5).sqrt() * weight + bias
        outputs = h @ linear.view(3, 4).T + constant
        expected = nn.functional.cross_entropy(outputs, data.targets[index], reduction="sum")
        torch.testing.assert_close(metrics.loss_sum[one], expected)


# Predictions


@pytest.mark.parametrize("model", ["global", "personal"])
def test_predictions_are_each_clients_own_in_its_order(model):
    data, client = doubled(data_of()), Ditto(seeded(mlp))
    store = store_of(client)
    with torch.no_grad():
        tables = evaluator_of(client, store).predict(data, torch.tensor([2, 1]), model)
    assert [table["client"] for table in tables] == [2, 1]
    for table in tables:
        y, outputs = by_hand(client, data, "test", model, store, table["client"])
        assert torch.equal(table["sample"], data.test.samples(table["client"]))
        assert torch.equal(table["target"], y)
        assert torch.equal(table["prediction"], outputs.argmax(1))
        torch.testing.assert_close(table["probability"], outputs.softmax(1).amax(1))


def test_predictions_name_the_data_sets_samples_where_clients_have_copies():
    data, client = doubled(data_of()), Ditto(seeded(mlp))
    shared = replace(data, test=Part.from_pieces([data.test.samples(1)] * data.num_clients))
    with torch.no_grad():
        tables = evaluator_of(client, store_of(client)).predict(
            shared.copy_shared_samples(), torch.tensor([2, 0]), "global"
        )
    for table in tables:
        assert torch.equal(table["sample"], data.test.samples(1))
        assert torch.equal(table["target"], data.targets[table["sample"]])


def test_a_client_without_test_samples_gets_an_empty_table():
    arrays = classes([1, 1, 4, 4])
    data, client = doubled(data_of(arrays)), Ditto(seeded(mlp))
    assert len(data.test.samples(0)) == 0
    evaluator = evaluator_of(client, store_of(client))
    with torch.no_grad():
        (table,) = evaluator.predict(data, torch.tensor([0]), "personal")
    lengths = {len(table[name]) for name in ("sample", "target", "prediction", "probability")}
    assert lengths == {0}


def test_real_valued_predictions_are_the_outputs():
    x, y = torch.randn(30, 4), torch.randn(30, 3)
    owner = torch.arange(4).repeat_interleave(torch.tensor(SIZES))
    data = doubled(data_of(reals(x, y, owner)))
    client = Ditto(seeded(mlp), criterion=nn.MSELoss())
    store = store_of(client)
    with torch.no_grad():
        (table,) = evaluator_of(client, store).predict(data, torch.tensor([2]), "personal")
    assert "probability" not in table
    outputs = by_hand(client, data, "test", "personal", store, 2)[1]
    torch.testing.assert_close(table["prediction"], outputs)


def test_one_real_valued_output_is_a_number_for_each_sample():
    owner = torch.arange(4).repeat_interleave(torch.tensor(SIZES))
    data = doubled(data_of(reals(torch.randn(30, 4), torch.randn(30), owner)))
    client = Ditto(seeded(lambda: nn.Linear(4, 1)), criterion=nn.MSELoss())
    with torch.no_grad():
        (table,) = evaluator_of(client, store_of(client)).predict(
            data, torch.tensor([2]), "personal"
        )
    assert table["prediction"].shape == table["target"].shape == (len(data.test.samples(2)),)


# Within a fit


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FedAvg, Ditto, Local])
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
def test_what_a_fit_logs_is_what_its_models_do(tmp_path, kind, precision):
    """In mixed precision too, where autocast may remember weights of the client before."""
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
        for one in range(4):
            if model == "personal":
                row = federation.store.read("personal", torch.tensor([one]))[0]
                nn.utils.vector_to_parameters(row, client.personal_model.parameters())
            index = data.val.samples(one)
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


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=7),
    batch=st.sampled_from([1, 5, 16, 1024]),
    at_once=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_stacked_is_one_by_one_whatever_the_sizes_and_pieces(sizes, batch, at_once, seed):
    """Also with clients that have no samples, and in any order of the clients."""
    arrays = classes(sizes, seed=seed)
    data = doubled(
        FederatedData(Given(arrays), val_fraction=0.0, test_fraction=0.4, seed=0).clients
    )
    client = Ditto(seeded(lambda: nn.Sequential(mlp(), nn.LayerNorm(3))))
    everyone = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed))
    store = store_of(client, len(sizes))
    with pytest.MonkeyPatch.context() as patch:
        plain = metrics_of(client, data, "test", "personal", store, everyone, stacked=False)
        patch.setattr("pl_fed.evaluation.evaluator._STACK_BATCH", batch)
        row_bytes = client.row("global").data.nbytes
        patch.setattr("pl_fed.evaluation.evaluator._ROWS_BYTES", at_once * 2 * row_bytes)
        stacked = metrics_of(client, data, "test", "personal", store, everyone, stacked=True)
    assert torch.equal(stacked.count, plain.count)
    assert torch.equal(stacked.correct, plain.correct)
    torch.testing.assert_close(stacked.loss_sum, plain.loss_sum, rtol=1e-12, atol=1e-12)
    assert int(plain.count.sum()) == int(data.test.sizes.sum())


def test_batch_norms_are_stacked_with_their_statistics():
    client = Ditto(seeded(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))))
    store, data = store_of(client), doubled(data_of())
    plain, stacked = (
        metrics_of(client, data, "test", "personal", store, stacked=each) for each in (False, True)
    )
    torch.testing.assert_close(stacked.loss_sum, plain.loss_sum, rtol=1e-12, atol=1e-12)


def test_stacked_predictions_are_in_the_clients_own_order(monkeypatch):
    monkeypatch.setattr("pl_fed.evaluation.evaluator._STACK_BATCH", 4)
    data, client = doubled(data_of()), Ditto(seeded(mlp))
    store, asked = store_of(client), torch.tensor([3, 1, 2])
    with torch.no_grad():
        plain, stacked = (
            evaluator_of(client, store, each).predict(data, asked, "personal")
            for each in (False, True)
        )
    for one, other in zip(plain, stacked, strict=True):
        assert one["client"] == other["client"]
        for name in ("sample", "target", "prediction"):
            assert torch.equal(one[name], other[name])
        torch.testing.assert_close(one["probability"], other["probability"])


class Branching(nn.Module):
    """A net with a branch on the data, which vmap refuses."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        outputs = self.net(x)
        return outputs if float(x.sum()) > -1e9 else -outputs


def test_what_vmap_refuses_is_run_one_by_one_and_said_once(caplog):
    data, client = doubled(data_of()), Ditto(seeded(Branching))
    store = store_of(client)
    evaluator = evaluator_of(client, store, stacked=True)
    metrics = ClientMetrics(data.num_clients, data.num_classes)
    with caplog.at_level("INFO"), torch.no_grad():
        for part in ("test", "train"):
            evaluator.evaluate(data, part, EVERYONE, {"personal": metrics})
    said = [record for record in caplog.records if "evaluated one by one" in record.message]
    assert len(said) == 1
    assert evaluator.stacked is False
    for one in range(4):
        expected = 0.0
        for part in ("test", "train"):
            y, outputs = by_hand(client, data, part, "personal", store, one)
            expected += nn.functional.cross_entropy(outputs, y, reduction="sum")
        torch.testing.assert_close(metrics.loss_sum[one], expected)


def test_the_models_are_not_touched_where_they_are_stacked():
    data, client = doubled(data_of()), Ditto(seeded(mlp))
    store = store_of(client)
    version = client.row("personal").data._version
    metrics_of(client, data, "test", "personal", store, stacked=True)
    metrics_of(client, data, "test", "global", store)
    assert client.row("personal").data._version == version
    metrics_of(client, data, "test", "personal", store, stacked=False)
    assert client.row("personal").data._version > version


@pytest.mark.parametrize(
    ("make", "stacks"),
    [
        (mlp, True),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.LazyLinear(3)), False),
        (lambda: nn.Sequential(nn.Conv1d(1, 2, 1).requires_grad_(False), nn.Linear(4, 3)), True),
    ],
)
def test_convolutions_that_are_trained_do_not_pay_on_a_cpu(make, stacks):
    assert trains_convolutions(make()) != stacks


def test_losses_are_means_and_leave_the_client_in_training():
    data = doubled(data_of())
    client = Ditto(seeded(lambda: nn.Sequential(mlp(), nn.Dropout(0.5))))
    store = store_of(client)
    client.train()
    evaluator = evaluator_of(client, store)
    asked = torch.tensor([1, 2, 0])
    rows = round_of(client, store, asked).models["personal"]
    losses = evaluator.losses(data, "val", asked, "personal", rows)
    assert client.training
    assert client.personal_model.training
    client.eval()
    assert losses[0].isnan()  # no validation samples
    for position, one in ((1, 2), (2, 0)):
        y, outputs = by_hand(client, data, "val", "personal", store, one)
        torch.testing.assert_close(losses[position], nn.functional.cross_entropy(outputs, y))


# The better one of two models


def test_a_loss_that_is_nan_is_worse_than_any():
    nan = math.nan
    none, right = torch.zeros(4, 1), torch.tensor([[1], [1], [1], [2]])
    one = Tables(right, none, torch.tensor([nan, 1.0, nan, nan]), torch.empty(4, 0))
    losses = torch.tensor([2.0, nan, nan, 0.0])
    other = Tables(torch.ones(4, 1), none, losses, torch.empty(4, 0))
    assert prefer_second(one, other).tolist() == [True, False, True, False]


def hybrid_of(client, data, store, part, judge):
    names = ("global", "personal", "hybrid")
    metrics = {name: ClientMetrics(data.num_clients, data.num_classes) for name in names}
    with torch.no_grad():
        evaluator_of(client, store).evaluate(data, part, EVERYONE, metrics, {"hybrid": judge})
    return {name: metric.per_client() for name, metric in metrics.items()}


@pytest.mark.parametrize("part", ["val", "test"])
@pytest.mark.parametrize("seed", range(4))
def test_the_hybrid_model_is_for_each_client_the_one_that_does_better_on_validation_data(
    part, seed
):
    data, client = doubled(data_of()), Ditto(seeded(mlp))
    store = store_of(client, seed=seed)
    judged, found = (hybrid_of(client, data, store, each, "val") for each in ("val", part))
    for one in range(4):
        own, common = ({k: v[one] for k, v in judged[m].items()} for m in ("personal", "global"))
        lead = own["accuracy"] - common["accuracy"]
        better = lead > 0 or (lead == 0 and own["loss"] <= common["loss"])
        takes = "personal" if better or own["samples"] == 0 else "global"
        for name, values in found["hybrid"].items():
            assert values[one].equal(found[takes][name][one]) or values[one].isnan()


def test_it_may_be_chosen_by_test_data_and_is_never_worse_then():
    data, client = doubled(data_of()), Ditto(seeded(mlp))
    found = hybrid_of(client, data, store_of(client), "test", "test")
    best = torch.maximum(found["personal"]["accuracy"], found["global"]["accuracy"])
    assert found["hybrid"]["accuracy"].equal(best)


def test_hybrid_real_valued_targets_are_judged_by_their_loss():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=draw), torch.randn(30, 3, generator=draw)
    owner = torch.arange(4).repeat_interleave(torch.tensor(SIZES))
    data = doubled(data_of(reals(x, y, owner)))
    client = Ditto(seeded(mlp), criterion=nn.MSELoss())
    found = hybrid_of(client, data, store_of(client), "test", "test")
    best = torch.minimum(found["personal"]["loss"], found["global"]["loss"])
    assert found["hybrid"]["loss"].equal(best)


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
def test_which_hybrid_models_there_are(kind, selection, fraction, expected):
    federation = pl_fed.Federation(model_selection=selection, seed=0)
    arrays = classes([40] * 10, seed=3)
    data = FederatedData(Given(arrays), val_fraction=fraction, test_fraction=0.4, seed=0)
    client = kind(seeded(mlp))
    federation.setup(client, data, "fit")
    for part, names in expected.items():
        assert set(federation.metrics(part)) - set(client.evaluated) == names


def test_an_unknown_selection_is_refused():
    with pytest.raises(ValueError, match='`model_selection` to be "validation", "test" or None'):
        pl_fed.Federation(model_selection="oracle")


@pytest.mark.parametrize("options", [{"weight": [1.0, 10.0, 0.1]}, {"ignore_index": 1}], ids=str)
def test_losses_are_means_as_training_takes_them(options):
    """By the weights of classes: what clients descend is what is measured, and weighed by."""
    options = {k: torch.tensor(v).double() if k == "weight" else v for k, v in options.items()}
    client = Local(seeded(mlp), criterion=nn.CrossEntropyLoss(**options))
    data, store = doubled(data_of()), store_of(client)
    for model in ("global", "personal"):
        found = metrics_of(client, data, "test", model, store).per_client()["loss"]
        for one in range(4):
            targets, outputs = by_hand(client, data, "test", model, store, one)
            expected = client.criterion(outputs, targets).nan_to_num(0)
            torch.testing.assert_close(found[one], expected)
    evaluator = evaluator_of(client, store)
    found = evaluator.start_losses(
        data, EVERYONE, {2: lambda batch: batch._replace(targets=2 - batch.targets)}
    )
    for one in range(4):
        targets, outputs = by_hand(client, data, "train", "global", store, one)
        targets = 2 - targets if one == 2 else targets
        torch.testing.assert_close(found[one], client.criterion(outputs, targets))


def test_clients_without_samples_leave_the_others_stacked():
    client = Local(seeded(mlp))
    data, store = doubled(data_of()), store_of(client)
    evaluator = evaluator_of(client, store, stacked=True)
    rows = round_of(client, store, torch.tensor([1, 1])).models["personal"]
    losses = evaluator.losses(data, "val", torch.tensor([1, 1]), "personal", rows)
    assert losses.isnan().all()
    assert evaluator.stacked
