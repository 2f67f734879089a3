"""The default task for a criterion and data."""

from torch import Tensor, nn

from pl_fed.tasks.classification import Classification
from pl_fed.tasks.criterion import CriterionTask
from pl_fed.tasks.multi_label import MultiLabel
from pl_fed.tasks.regression import Regression
from pl_fed.trees import Tree

_MULTI_LABEL_LOSSES = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
_REGRESSION_LOSSES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


def find_task_class(criterion: nn.Module, targets: Tree, data_classes: int) -> type[CriterionTask]:
    """Return the class of the default task for a criterion and data.

    Args:
        criterion: The loss.
        targets: All targets.
        data_classes: Number of classes; 0 unless each target is a class id.

    Returns:
        ``Classification`` for class ids; ``MultiLabel`` for zeros and ones with a multi-label loss
        of ``torch.nn``; ``Regression`` for real values with a regression loss of ``torch.nn``;
        otherwise ``CriterionTask``, with the loss as its only metric.

    Example:
        >>> import torch
        >>> find_task_class(nn.L1Loss(), torch.zeros(3, 1), 0).__name__
        'Regression'
    """
    if data_classes:
        return Classification
    if isinstance(targets, Tensor) and targets.is_floating_point():
        if isinstance(criterion, _MULTI_LABEL_LOSSES) and _is_binary(targets):
            return MultiLabel
        if isinstance(criterion, _REGRESSION_LOSSES):
            return Regression
    return CriterionTask


def _is_binary(targets: Tensor) -> bool:
    return bool(((targets == 0) | (targets == 1)).all())
