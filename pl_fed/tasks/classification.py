"""Classification: each sample has one class."""

from typing import Any

from torch import Tensor, nn

from pl_fed.tasks.base import as_floats, check_tensor
from pl_fed.tasks.criterion import CriterionTask
from pl_fed.trees import Tree


class Classification(CriterionTask):
    """Classification: the net predicts the class of each sample.

    The task has no metric of its own. :class:`pl_fed.metrics.ClientMetrics` counts correct samples
    by class. From these, it computes accuracy and its fairness over clients and over classes.

    Args:
        criterion: The loss; cross entropy by default. See :class:`CriterionTask`.

    Shape:
        - outputs: logits [batch, classes]; the predicted class has the largest logit.
        - targets: class ids, int64 [batch].

    Example:
        >>> import torch
        >>> Classification().predictions(torch.tensor([[0.0, 0.0, 5.0]]))["prediction"]
        tensor([2])
    """

    def __init__(self, criterion: nn.Module | None = None) -> None:
        super().__init__(nn.CrossEntropyLoss() if criterion is None else criterion)

    def num_classes(self, data_classes: int) -> int:
        """Return the data's number of classes."""
        return data_classes

    def metric_inputs(self, outputs: Tree, targets: Tree) -> tuple[Any, Any]:
        """Return the probabilities of the classes, [samples, classes], and the class ids."""
        return as_floats(outputs).softmax(1), targets

    def predictions(self, outputs: Tree) -> dict[str, Tensor]:
        """Return the predicted class of each sample, and its probability."""
        probability, prediction = as_floats(outputs).softmax(1).max(1)
        return {"prediction": prediction, "probability": probability}

    def check_targets(self, targets: Tree, data_classes: int) -> None:
        """Refuse data without classes."""
        if not data_classes:
            raise ValueError(
                "Expected the data to have a class id for each sample for the task Classification"
                " but got none: set `model.init_args.task` to pl_fed.tasks.Regression or"
                " pl_fed.tasks.MultiLabel, or set `model.init_args.criterion`."
            )

    def check_outputs(self, outputs: Tree, targets: Tree, data_classes: int) -> None:
        """Refuse a net unless it returns one number for each class."""
        check_tensor(outputs)
        samples = len(targets)
        if list(outputs.shape) != [samples, data_classes]:
            text = (
                f"Expected argument `net` to return one number for each of the {data_classes}"
                f" classes, shape [batch, {data_classes}], but got {list(outputs.shape)} for"
                f" {samples} samples: the data's labels go up to {data_classes - 1}"
            )
            if list(outputs.shape) == [samples, 1] and data_classes > 2:
                text += ". For a regression, give real-valued targets: in a table of integers, set"
                text += " `data.dataset.classes: false`"
            raise ValueError(f"{text}.")
        super().check_outputs(outputs, targets, data_classes)
