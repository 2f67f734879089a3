"""Diabetes: a regression data set that comes with scikit-learn."""

import torch

from pl_fed.arguments import check_at_most, check_integers
from pl_fed.data.source import Arrays, DataSource

_MEAN, _STD = 152.0, 77.0  # of the targets, rounded


class Diabetes(DataSource):
    """Diabetes data: ten measurements of each of 442 patients, without a download.

    The target y is the progression of the disease after a year, from 25 to 346. It is scaled to
    (y − 152) / 77. Each client is an age group. Source: B. Efron, T. Hastie, I. Johnstone and R.
    Tibshirani, "Least angle regression", Annals of Statistics 32, 2004; read from scikit-learn.

    Args:
        num_groups: Number of age groups of about equal size, 1 to 40.

    Example:
        >>> arrays = Diabetes().load()
        >>> arrays.inputs.shape, arrays.targets.shape, len(arrays.client.unique())
        (torch.Size([442, 10]), torch.Size([442, 1]), 10)
    """

    preparation = "measurements centred and scaled to a standard deviation of 1"

    def __init__(self, num_groups: int = 10) -> None:
        check_integers(1, num_groups=num_groups)
        check_at_most(40, num_groups=num_groups)
        self.num_groups = num_groups

    def load(self) -> Arrays:
        """Return measurements [442, 10], targets [442, 1] and age groups [442]."""
        from sklearn.datasets import load_diabetes  # slow to import

        bunch = load_diabetes()
        measurements = torch.from_numpy(bunch.data).to(torch.float32) * len(bunch.data) ** 0.5
        targets = (torch.from_numpy(bunch.target).to(torch.float32)[:, None] - _MEAN) / _STD
        rank = measurements[:, 0].argsort(stable=True).argsort()
        return Arrays(measurements, targets, client=rank * self.num_groups // len(rank))
