"""The task of a criterion and of data, where none is given."""

from torch import Tensor, nn

from pl_fed.tasks.base import Task
from pl_fed.tasks.classification import Classification
from pl_fed.tasks.criterion import CriterionTask
from pl_fed.tasks.multi_label import MultiLabel
from pl_fed.tasks.regression import Regression
from pl_fed.trees import Tree

_OF_LABELS = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
_OF_NUMBERS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


def task_of(criterion: nn.Module, targets: Tree, data_classes: int) -> Task:
    """Return the task that a criterion and the data tell.

    Args:
        criterion: The loss.
        targets: All targets.
        data_classes: Number of classes, if each target is a class id; else 0.

    Returns:
        Classification of class ids; MultiLabel of zeros and ones with a binary cross entropy;
        Regression of real values with a loss of ``torch.nn`` for such; else a task whose only
        metric is the loss.

    Example:
        >>> import torch
        >>> type(task_of(nn.L1Loss(), torch.zeros(3, 1), 0)).__name__
        'Regression'
    """
    if data_classes:
        return Classification(criterion)
    if isinstance(targets, Tensor) and targets.is_floating_point():
        if isinstance(criterion, _OF_LABELS) and bool(((targets == 0) | (targets == 1)).all()):
            return MultiLabel(criterion)
        if isinstance(criterion, _OF_NUMBERS):
            return Regression(criterion)
    return CriterionTask(criterion)
