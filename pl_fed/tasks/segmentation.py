"""Semantic segmentation: each pixel has one class."""

from typing import Any

from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassF1Score,
    MulticlassJaccardIndex,
)

from pl_fed.arguments import check_integers
from pl_fed.tasks.base import check_tensor
from pl_fed.tasks.criterion import CriterionTask
from pl_fed.trees import Tree, describe


class Segmentation(CriterionTask):
    """Semantic segmentation: the net predicts the class of each pixel.

    The loss is the cross entropy, averaged over the labelled pixels of a batch. The metrics of a
    client are ``mean_iou``, the mean intersection over union of the classes (Jaccard index);
    ``dice``, the mean Dice score (F1) of the classes; and ``pixel_accuracy``, the share of correct
    pixels. The means are over the classes that occur in the client's predictions or targets.

    Args:
        num_classes: Number of classes, at least 2.
        ignore_index: Target of pixels without a label; the loss and the metrics leave them out.
        criterion: The loss; the cross entropy by default. See :class:`CriterionTask`.

    Shape:
        - outputs: logits [batch, classes, height, width], or further dimensions, as for volumes.
        - targets: class ids, int64 [batch, height, width].

    Raises:
        ValueError: If ``num_classes`` is below 2.

    Example:
        >>> import torch
        >>> logits, targets = torch.zeros(1, 2, 1, 3), torch.tensor([[[0, 1, 255]]])
        >>> Segmentation(2, ignore_index=255).batch_loss(logits, targets)
        tensor(0.6931)
    """

    def __init__(
        self, num_classes: int, ignore_index: int = -100, criterion: nn.Module | None = None
    ) -> None:
        check_integers(2, num_classes=num_classes)
        if criterion is None:
            criterion = nn.CrossEntropyLoss(ignore_index=ignore_index)
        super().__init__(criterion)
        self.classes = num_classes
        self.ignore_index = ignore_index

    def metrics(self) -> MetricCollection:
        """Return ``dice``, ``mean_iou`` and ``pixel_accuracy``."""
        settings: dict[str, Any] = {
            "num_classes": self.classes,
            "ignore_index": self.ignore_index,
            "validate_args": False,
        }
        return MetricCollection(
            {
                "mean_iou": MulticlassJaccardIndex(average="macro", **settings),
                "dice": MulticlassF1Score(average="macro", **settings),
                "pixel_accuracy": MulticlassAccuracy(average="micro", **settings),
            },
            compute_groups=False,
        )

    def metric_inputs(self, outputs: Tree, targets: Tree) -> tuple[Any, Any]:
        """Return the predicted and the true class of each pixel."""
        return outputs.argmax(1), targets

    def predictions(self, outputs: Tree) -> dict[str, Tensor]:
        """Return the predicted class of each pixel, int64 [samples, height, width]."""
        return {"prediction": outputs.argmax(1)}

    def check_targets(self, targets: Tree, data_classes: int) -> None:
        """Refuse targets that are not a class for each pixel."""
        is_map = isinstance(targets, Tensor) and targets.dim() > 1
        if not is_map or targets.is_floating_point():
            raise ValueError(
                "Expected the data to have a class for each pixel, integers [samples, height,"
                f" width], for the task Segmentation but got {describe(targets)}."
            )
        labels = targets[targets != self.ignore_index]
        if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < self.classes):
            raise ValueError(
                f"Expected the targets to be class ids from 0 to {self.classes - 1}, or"
                f" {self.ignore_index} for pixels without a label, but got {int(labels.min())} to"
                f" {int(labels.max())}: set `model.init_args.task.init_args.num_classes` and"
                " `ignore_index`."
            )

    def check_outputs(self, outputs: Tree, targets: Tree, data_classes: int) -> None:
        """Refuse a net unless it returns one number for each class of each pixel."""
        check_tensor(outputs)
        expected = [targets.shape[0], self.classes, *targets.shape[1:]]
        if list(outputs.shape) != expected:
            raise ValueError(
                "Expected argument `net` to return one number for each class of each pixel, shape"
                f" {expected}, but got {list(outputs.shape)}."
            )
