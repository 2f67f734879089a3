"""Multi-label classification: each sample has any number of labels."""

from typing import Any

from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score, BinaryRecall

from pl_fed.arguments import check_interval
from pl_fed.tasks.base import as_floats, check_tensor
from pl_fed.tasks.criterion import CriterionTask
from pl_fed.trees import Tree, describe


class MultiLabel(CriterionTask):
    """Multi-label classification: the net predicts the set of labels of each sample.

    The metrics of a client are over all pairs of a sample and a label: ``f1``, the harmonic mean of
    precision and recall; ``recall``, the share of true labels that the net predicts; and
    ``label_accuracy``, the share of correct pairs.

    Args:
        criterion: The loss; the binary cross entropy by default. See :class:`CriterionTask`.
        threshold: Threshold of the probability, in (0, 1). The net predicts labels above it.

    Raises:
        ValueError: If the criterion takes probabilities, as ``torch.nn.BCELoss`` does, or
            ``threshold`` is not in (0, 1).

    Shape:
        - outputs: logits [batch, labels].
        - targets: 0 or 1 as floating-point numbers, [batch, labels].

    Example:
        >>> import torch
        >>> MultiLabel().predictions(torch.tensor([[-1.0, 2.0]]))["prediction"]
        tensor([[False,  True]])
    """

    def __init__(self, criterion: nn.Module | None = None, threshold: float = 0.5) -> None:
        if isinstance(criterion, nn.BCELoss):  # metrics would read probabilities as logits
            raise ValueError(
                "Expected argument `criterion` of MultiLabel to take logits but got BCELoss, which"
                " takes probabilities: leave it out, and the sigmoid at the end of the net, too."
            )
        super().__init__(nn.BCEWithLogitsLoss() if criterion is None else criterion)
        check_interval("(0, 1)", threshold=threshold)
        self.threshold = threshold

    def metrics(self) -> MetricCollection:
        """Return ``f1``, ``recall`` and ``label_accuracy``."""
        return MetricCollection(
            {
                "f1": BinaryF1Score(self.threshold, validate_args=False),
                "recall": BinaryRecall(self.threshold, validate_args=False),
                "label_accuracy": BinaryAccuracy(self.threshold, validate_args=False),
            }
        )

    def metric_inputs(self, outputs: Tree, targets: Tree) -> tuple[Any, Any]:
        """Return the probability and the truth of each label, [samples, labels]."""
        return as_floats(outputs).sigmoid(), targets.long()

    def predictions(self, outputs: Tree) -> dict[str, Tensor]:
        """Return the predicted labels, bool [samples, labels]."""
        return {"prediction": as_floats(outputs).sigmoid() > self.threshold}

    def check_targets(self, targets: Tree, data_classes: int) -> None:
        """Refuse targets that are not 0 or 1."""
        if isinstance(targets, Tensor) and targets.is_floating_point():
            if bool(((targets == 0) | (targets == 1)).all()):
                return
            wrong = str(targets[(targets != 0) & (targets != 1)][0].item())
        else:
            wrong = describe(targets)
        raise ValueError(
            "Expected the data to have targets of 0 and 1, floating-point [samples, labels], for"
            f" the task MultiLabel but got {wrong}."
        )

    def check_outputs(self, outputs: Tree, targets: Tree, data_classes: int) -> None:
        """Refuse a net unless it returns one number for each label."""
        check_tensor(outputs)
        super().check_outputs(outputs, targets, data_classes)
        if outputs.shape != targets.shape:
            raise ValueError(
                f"Expected argument `net` to return a number for each label, shape"
                f" {list(targets.shape)}, but got {list(outputs.shape)}."
            )
