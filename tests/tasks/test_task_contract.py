"""Contract of every task; the suite detects a new file in ``pl_fed/tasks``, and asks for a case."""

import importlib
import pkgutil

import pytest
import torch
from torch import nn

import pl_fed.tasks
from pl_fed.evaluation.client_measures import ClientMeasures
from pl_fed.metrics.client_metrics import TAKEN_NAMES
from pl_fed.tasks import (
    Classification,
    CriterionTask,
    LanguageModelling,
    MultiLabel,
    Regression,
    Segmentation,
    Task,
    TokenClassification,
)
from pl_fed.tasks.metric_values import local_metrics
from pl_fed.types import Batch

DRAW = torch.Generator().manual_seed(0)
OUTPUTS, REALS = torch.randn(6, 3, generator=DRAW), torch.randn(6, 3, generator=DRAW)
IDS = torch.tensor([0, 2, 1, 1, 0, 2])
TOKENS = torch.randint(5, (6, 4), generator=DRAW)
TOKENS[torch.rand(TOKENS.shape, generator=DRAW) < 0.3] = -100
LOGITS = torch.randn(6, 4, 5, generator=DRAW)
PIXELS = torch.randint(3, (6, 2, 4), generator=DRAW)
PIXELS[torch.rand(PIXELS.shape, generator=DRAW) < 0.3] = 255
MAPS = torch.randn(6, 3, 2, 4, generator=DRAW)

CASES = {  # a task, outputs, targets, the data's number of classes
    "Classification": (Classification(), OUTPUTS, IDS, 3),
    "Classification, weights": (
        Classification(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]))),
        OUTPUTS,
        IDS,
        3,
    ),
    "CriterionTask": (CriterionTask(nn.SoftMarginLoss()), OUTPUTS, REALS.sign(), 0),
    "CriterionTask, pixels": (
        CriterionTask(nn.CrossEntropyLoss(ignore_index=1)),
        torch.randn(6, 3, 2, 2, generator=DRAW),
        torch.randint(3, (6, 2, 2), generator=DRAW),
        0,
    ),
    "LanguageModelling": (LanguageModelling(), LOGITS, TOKENS, 0),
    "LanguageModelling, shifted": (LanguageModelling(shift=True), LOGITS, TOKENS, 0),
    "TokenClassification": (TokenClassification(5), LOGITS, TOKENS, 0),
    "Segmentation": (Segmentation(3, ignore_index=255), MAPS, PIXELS, 0),
    "MultiLabel": (MultiLabel(), OUTPUTS, (REALS > 0).float(), 0),
    "Regression": (Regression(), OUTPUTS, REALS, 0),
    "Regression, L1": (Regression(nn.L1Loss()), OUTPUTS, REALS, 0),
}
STEPS = {"HuggingFace", "LightningTask"}  # of a net of their own: see test_hugging_face.py
every_case = pytest.mark.parametrize(
    ("task", "outputs", "targets", "classes"), CASES.values(), ids=CASES
)


def test_every_task_has_a_case():
    actual = set()
    for module in pkgutil.iter_modules(pl_fed.tasks.__path__):
        for name, kind in vars(importlib.import_module(f"pl_fed.tasks.{module.name}")).items():
            if isinstance(kind, type) and issubclass(kind, Task) and kind is not Task:
                actual.add(name)
    assert actual == {type(case[0]).__name__ for case in CASES.values()} | STEPS


@every_case
def test_loss_is_the_mean_over_unmasked_samples(task, outputs, targets, classes):
    expected = task.batch_loss(outputs[:4], targets[:4])
    mask = torch.arange(6) < 4
    actual = task.mean_loss(outputs, Batch(None, targets, mask))
    torch.testing.assert_close(actual, expected)
    garbage = torch.where(mask.view(-1, *[1] * (outputs.dim() - 1)), outputs, 1e6)
    torch.testing.assert_close(task.mean_loss(garbage, Batch(None, targets, mask)), expected)
    assert task.losses(outputs, targets).shape == (6,)
    assert task.is_sample_mean(outputs, targets)
    nothing = task.mean_loss(outputs, Batch(None, targets, torch.zeros(6, dtype=torch.bool)))
    assert float(nothing) == 0


@every_case
def test_losses_under_vmap_equal_those_of_single_clients(task, outputs, targets, classes):
    stacked = torch.stack([outputs, outputs.flip(0)]), torch.stack([targets, targets.flip(0)])
    actual = torch.vmap(task.losses)(*stacked)
    expected = [task.losses(outputs, targets), task.losses(outputs.flip(0), targets.flip(0))]
    torch.testing.assert_close(actual, torch.stack(expected))


@every_case
def test_metrics_are_one_number_per_client(task, outputs, targets, classes):
    for name, metric in local_metrics(task, torch.device("cpu")).items():
        assert name.isidentifier()
        assert name not in TAKEN_NAMES
        assert metric.higher_is_better in (True, False)
    sizes, owner = torch.tensor([2, 4]), torch.tensor([0, 1, 1, 0, 1, 1])
    measures = ClientMeasures(task, sizes, torch.device("cpu"))
    for some in (slice(0, 3), slice(3, 6)):
        measures.add(owner[some], outputs[some], targets[some])
    for k in range(2):
        for place, metric in enumerate(local_metrics(task, torch.device("cpu")).values()):
            metric.update(*task.metric_inputs(outputs[owner == k], targets[owner == k]))
            assert float(metric.compute()) == pytest.approx(float(measures.values[k, place]))


@every_case
def test_predictions_have_one_row_per_sample(task, outputs, targets, classes):
    columns = task.predictions(outputs)
    assert "prediction" in columns
    assert {len(column) for column in columns.values()} == {6}


@every_case
def test_matching_data_and_nets_are_accepted(task, outputs, targets, classes):
    task.check_targets(targets, classes)
    task.check_outputs(outputs, targets, classes)
    assert task.num_classes(classes) == classes


REFUSED = {
    "no classes": (lambda: Classification().check_targets(REALS, 0), "task Classification .* none"),
    "ids": (lambda: Regression().check_targets(IDS, 3), "real-valued targets .*torch.int64"),
    "no labels": (
        lambda: MultiLabel().check_targets(REALS, 0),
        "targets of 0 and 1, .* but got -?",
    ),
    "a tuple": (
        lambda: Regression().check_outputs((OUTPUTS,), REALS, 0),
        "`net` to return a tensor but got tuple",
    ),
    "other labels": (
        lambda: MultiLabel().check_outputs(OUTPUTS, REALS[:, :2], 0),
        r"a number for each label, shape \[6, 2\], but got \[6, 3\]",
    ),
    "other numbers": (
        lambda: Regression().check_outputs(OUTPUTS, REALS[:, :2], 0),
        r"as many numbers as there are targets, shape \[6, 2\], but got \[6, 3\]",
    ),
    "no pixels": (
        lambda: Segmentation(3).check_targets(IDS, 3),
        "a class for each pixel, integers",
    ),
    "an unknown class": (
        lambda: Segmentation(3).check_targets(PIXELS, 0),
        "class ids from 0 to 2, or -100 .* but got 0 to 255: set",
    ),
    "another size": (
        lambda: Segmentation(3, 255).check_outputs(MAPS[..., :3], PIXELS, 0),
        r"shape \[6, 3, 2, 4\], but got \[6, 3, 2, 3\]",
    ),
    "no tokens": (lambda: LanguageModelling().check_targets(IDS, 3), "token ids as targets"),
    "logits of one token": (
        lambda: LanguageModelling().check_outputs(LOGITS[:, 0], TOKENS, 0),
        r"with batch and length \[6, 4\], but got \[6, 5\]",
    ),
    "probabilities": (
        lambda: MultiLabel(nn.BCELoss()),
        "MultiLabel to take logits but got BCELoss",
    ),
    "a threshold": (lambda: MultiLabel(threshold=1), r"`threshold` to be in \(0, 1\) but got"),
    "a sum": (lambda: CriterionTask(nn.MSELoss(reduction="sum")), '`reduction="mean"`, as'),
}


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_mismatches_are_reported_in_one_sentence(call, words):
    with pytest.raises(ValueError, match=f"^Expected .*{words}"):
        call()


def test_metrics_of_a_language_model_equal_their_definitions():
    """Perplexity, accuracy and loss over the positions with a token, by a loop over them."""
    for shift in (False, True):
        task = LanguageModelling(shift=shift)
        losses, hits = [], []
        for sequence, tokens in zip(LOGITS, TOKENS):
            for position in range(4 - shift):
                token = int(tokens[position + shift])
                if token != -100:
                    losses.append(-float(sequence[position].double().log_softmax(0)[token]))
                    hits.append(int(sequence[position].argmax()) == token)
        loss = torch.tensor(losses, dtype=torch.float64).mean()
        assert float(task.batch_loss(LOGITS, TOKENS)) == pytest.approx(float(loss))
        measures = ClientMeasures(task, torch.tensor([6]), torch.device("cpu"))
        measures.add(torch.zeros(6, dtype=torch.int64), LOGITS, TOKENS)
        actual = dict(zip(measures.metrics, measures.values[0].tolist()))
        assert actual["perplexity"] == pytest.approx(float(loss.exp()))
        assert actual["token_accuracy"] == pytest.approx(sum(hits) / len(hits))


def test_metrics_of_a_segmentation_equal_their_definitions():
    task = Segmentation(3, ignore_index=255)
    measures = ClientMeasures(task, torch.tensor([6]), torch.device("cpu"))
    measures.add(torch.zeros(6, dtype=torch.int64), MAPS, PIXELS)
    actual = dict(zip(measures.metrics, measures.values[0].tolist()))
    labelled = PIXELS != 255
    predicted, true = MAPS.argmax(1)[labelled], PIXELS[labelled]
    both = torch.stack([((predicted == c) & (true == c)).sum() for c in range(3)]).double()
    sizes = predicted.bincount(minlength=3) + true.bincount(minlength=3)
    assert actual["mean_iou"] == pytest.approx(float((both / (sizes - both)).mean()))
    assert actual["dice"] == pytest.approx(float((2 * both / sizes).mean()))
    assert actual["pixel_accuracy"] == pytest.approx(float((predicted == true).double().mean()))


def test_undefined_metric_is_nan():
    measures = ClientMeasures(Regression(), torch.tensor([1, 3]), torch.device("cpu"))
    measures.add(torch.tensor([0, 1, 1, 1]), REALS[:4, :1] + 1, REALS[:4, :1])
    places = list(measures.metrics)
    assert measures.values[:, places.index("mae")].tolist() == pytest.approx([1, 1])
    assert measures.values[:, places.index("r2")].isnan().tolist() == [True, False]
