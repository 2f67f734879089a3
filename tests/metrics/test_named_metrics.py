"""Metrics of ``federation.metrics``: torchmetrics, computed per client."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from small_federations import mlp, seeded, shared_out
from tables import table_test
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryAveragePrecision,
    MulticlassF1Score,
    MultilabelF1Score,
)
from torchmetrics.regression import PearsonCorrCoef
from torchmetrics.utilities import prints

from pl_fed import Federation
from pl_fed.clients import Ditto, FedAvg
from pl_fed.data import Arrays
from pl_fed.evaluation.client_measures import measure
from pl_fed.metrics.named import metric_arguments, name_metrics
from pl_fed.samplers import All

SIZES = [40, 30, 20]
SINGLE_CLASS_CLIENT = 2  # the client with samples of one class only
IDS = torch.arange(len(SIZES))


def two_classes(only_positives=False):
    """Three clients with two classes; the last one has samples of class 1 only."""
    draw = torch.Generator().manual_seed(5)
    owner = IDS.repeat_interleave(torch.tensor(SIZES))
    x = torch.randn(sum(SIZES), 4, generator=draw)
    y = (x.sum(1) + torch.randn(sum(SIZES), generator=draw) > 0).long()
    y[(owner == SINGLE_CLASS_CLIENT) | only_positives] = 1
    return Arrays(x, y, owner, num_classes=2)


def evaluate(metrics, client=None, data=None, **settings):
    """Return the federation, its data and client, after an evaluation of the test data."""
    client = client or FedAvg(seeded(lambda: mlp(num_classes=2)))
    data = data or shared_out(two_classes(), test_fraction=0.5)
    federation = Federation(All(), metrics=metrics, seed=0, **settings)
    federation.setup(client, data, "test")
    federation.evaluate("test", IDS)
    return federation, client, data


def probabilities(client, data, client_id):
    batch = data.clients.batch(data.clients.test.samples(client_id))
    with torch.no_grad():
        logits = client.global_model(batch.inputs)
    return logits.softmax(1).double().numpy(), batch.targets.numpy()


@pytest.mark.parametrize("rank", [0, 1], ids=lambda rank: f"process {rank}")
def test_metrics_per_client_equal_an_independent_implementation(rank, monkeypatch):
    """torchmetrics warns of undefined values in the first process only; all must find them."""
    monkeypatch.setattr(prints.rank_zero_only, "rank", rank)
    metrics = [BinaryAUROC(), BinaryAveragePrecision(), MulticlassF1Score(2, average="macro")]
    federation, client, data = evaluate(metrics)
    actual = federation.metrics("test")["global"]
    table, values = actual.per_client(), actual.compute()
    areas = []
    for client_id in (0, 1):
        p, y = probabilities(client, data, client_id)
        areas.append(roc_auc_score(y, p[:, 1]))
        assert float(table["binary_auroc"][client_id]) == pytest.approx(areas[-1], abs=1e-6)
        precision = average_precision_score(y, p[:, 1])
        assert float(table["binary_average_precision"][client_id]) == pytest.approx(precision)
        f1 = f1_score(y, p.argmax(1), average="macro")
        assert float(table["multiclass_f1_score"][client_id]) == pytest.approx(f1)
    assert math.isnan(table["binary_auroc"][SINGLE_CLASS_CLIENT])
    assert float(values["binary_auroc_undefined"]) == 1
    assert float(values["multiclass_f1_score_undefined"]) == 0
    assert float(values["binary_auroc"]) == pytest.approx(np.mean(areas), abs=1e-6)
    assert float(values["binary_auroc_worst10"]) == pytest.approx(min(areas), abs=1e-6)
    assert prints.rank_zero_only.rank == rank


def test_metric_without_defined_values_is_only_counted():
    data = shared_out(two_classes(only_positives=True), test_fraction=0.5)
    federation, _, _ = evaluate([BinaryAUROC()], data=data)
    actual = federation.metrics("test")["global"].compute()
    assert {name for name in actual if "auroc" in name} == {"binary_auroc_undefined"}
    assert float(actual["binary_auroc_undefined"]) == 3


def test_further_metric_may_choose_hybrid_models():
    client = Ditto(seeded(lambda: mlp(num_classes=2)))
    federation, _, _ = evaluate({"auc": BinaryAUROC()}, client, monitor="auc")
    assert federation.monitored_metric == "auc"
    with pytest.raises(ValueError, match=r"monitor` to be one of accuracy, auc, loss .* 'f1'"):
        evaluate({"auc": BinaryAUROC()}, client, monitor="f1")


def test_configured_metrics_are_not_changed():
    """Clients use copies: an object may serve several federations."""
    metric = BinaryAUROC()
    evaluate([metric])
    assert metric.update_count == 0


@table_test(
    ("metric", "message"),
    [
        (
            MulticlassF1Score(2, average=None),
            r"Expected the metric `multiclass_f1_score` to give one number .* but got \[2\]: set",
        ),
        (
            MultilabelF1Score(5),
            r"Expected the metric `multilabel_f1_score` of the task Classification to take outputs"
            r" of shape \[3, 2\] and targets of shape \[3\] but that failed",
        ),
    ],
    ids=["several numbers", "another task"],
)
def test_unsuitable_metric_is_refused_before_training(metric, message):
    with pytest.raises(ValueError, match=message):
        evaluate([metric])


def test_names_are_keys_of_a_mapping_or_class_names():
    metric = PearsonCorrCoef()
    assert name_metrics({"r": metric}) == {"r": metric}
    assert name_metrics([metric]) == {"pearson_corr_coef": metric}
    assert name_metrics(None) == name_metrics([]) == {}
    with pytest.raises(ValueError, match="to have one PearsonCorrCoef but got two: give a mapping"):
        name_metrics([metric, PearsonCorrCoef()])
    with pytest.raises(TypeError, match="`metrics`"):
        name_metrics([3])
    with pytest.raises(TypeError, match=r"`metrics.r`"):
        name_metrics({"r": 3})


def test_binary_metrics_receive_one_probability_per_target():
    two_columns, one_column = torch.tensor([[0.2, 0.8], [0.6, 0.4]]), torch.tensor([[0.8], [0.4]])
    ids, floats = torch.tensor([1, 0]), torch.tensor([[1.0], [0.0]])
    for predictions, targets in (
        (two_columns, ids),
        (one_column, floats),
        (one_column.flatten(), ids),
    ):
        p, y = metric_arguments(BinaryAUROC(), predictions, targets)
        assert p.flatten().tolist() == pytest.approx([0.8, 0.4])
        assert p.shape == y.shape
        assert y.flatten().tolist() == [1, 0]
        assert y.dtype == torch.int64
    labels = torch.tensor([[1, 0], [0, 1]])
    p, y = metric_arguments(BinaryAUROC(), two_columns, labels)
    assert torch.equal(p, two_columns), "two labels of a sample are no two classes"
    assert metric_arguments(MulticlassF1Score(2), two_columns, ids) == (two_columns, ids)


def raise_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("fill", [raise_out_of_memory, lambda: torch.empty(1 << 50)])
def test_lack_of_memory_is_no_undefined_metric(fill):
    """torch has no class of its own for a lack of the CPU's memory."""

    class Full(BinaryAUROC):
        def compute(self):
            fill()

    scores, targets = torch.tensor([0.2, 0.8]), torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match="memory"):
        measure({"auroc": Full()}, scores, targets)
