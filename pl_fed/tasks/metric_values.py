"""The value of a metric for one client."""

import re
import warnings
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torchmetrics.utilities import prints

UNDEFINED_ERRORS = (RuntimeError, ValueError, IndexError)
"""Errors of metrics that are undefined for some samples, for example R² of one sample."""

_UNDEFINED_VALUE = re.compile("should be meaningless|is undefined|required to compute")


def raise_lack_of_memory(error: Exception) -> None:
    """Raise an error again if a device had no memory left: then the metric is not undefined."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error


def compute_metric(metric: Any) -> Any:
    """Return the value of a metric or collection; NaN if torchmetrics warns that it is undefined.

    For example, torchmetrics returns 0 for the AUROC of samples of one class, with a warning, in
    the first process only.

    Args:
        metric: A metric, or a collection of metrics with a dict of values.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> metric = MeanMetric()
        >>> metric.update(3.0)
        >>> compute_metric(metric)
        tensor(3.)
    """
    in_every_process = mock.patch.object(prints.rank_zero_only, "rank", 0)
    with warnings.catch_warnings(record=True) as caught, in_every_process:
        warnings.simplefilter("always")
        value = metric.compute()
    undefined = any(_UNDEFINED_VALUE.search(str(warning.message)) for warning in caught)
    if not undefined:
        return value
    if isinstance(value, dict):
        return {name: _nan_like(entry) for name, entry in value.items()}
    return _nan_like(value)


def keep_local(metric: Any) -> None:
    """Stop a metric from communicating: processes evaluate different clients."""
    metric.distributed_available_fn = _is_not_distributed


def _nan_like(value: Any) -> Any:
    return value * torch.nan if isinstance(value, Tensor) else torch.nan


def _is_not_distributed() -> bool:
    return False
