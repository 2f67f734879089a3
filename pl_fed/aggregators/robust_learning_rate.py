"""Robust learning rate (RLR): step back on the coordinates where the clients' signs disagree.

M. S. Özdayi, M. Kantarcioglu and Y. R. Gel, "Defending against Backdoors in Federated Learning with
a Robust Learning Rate", AAAI 2021, arXiv 2007.03767. With A the mean, the median, or the sign of
the sum of the signs of the uploads::

    Δ_j = A_j    if |Σ_k sign(Δ_kj)| ≥ θ,    −A_j   otherwise     for each coordinate j

A coordinate without agreement moves against A. It does not stand still. sign(0) = 0 is no vote. The
paper recommends f + 1 ≤ θ ≤ n − f for f attackers, so that attackers alone never agree.

As in the authors' code: A, and the votes.

Departs from it:

- Its mean weighs clients by samples, which is ``weighting: samples`` here.
- Its θ has no default: 4 for 10 clients with one attacker, 8 for 40 clients with four. BackFed's is
  8 for 10 clients. Here the default is the smallest θ of the paper, f + 1.
- It accepts θ > n, which reverses the whole update. Here such a θ needs a larger cohort.
- Its option ``noise`` adds Gaussian noise to A; its option ``clip`` bounds the clients' updates.
  :class:`~pl_fed.aggregators.WeakDP` around this aggregator does both, with the noise after the
  change of signs, which has the same distribution.
"""

from typing import Literal

import torch  # noqa: F401
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_choice, check_integers
from pl_fed.functional.aggregation import (
    coordinate_median,
    merge_columns,
    merging_dtype,
    weighted_mean,
)
from pl_fed.types import RoundContext


class RobustLearningRate(Aggregator):
    """Robust learning rate (RLR): reverses the update on coordinates without agreement on the sign.

    Source: Özdayi et al., AAAI 2021. Breakdown point: 0 with the mean, and f < n / 2 with the
    median. Clients with very different data disagree often. Then θ = f + 1 is high enough.

    Args:
        threshold: θ, the smallest absolute sum of signs that counts as agreement, at least 1.
            ``None`` uses f + 1 for the number f of Byzantine uploads that the server expects.
        statistic: A: ``"mean"``, ``"median"``, or ``"sign"``, the sign of the sum of signs. A step
            of ``"sign"`` has the length √d: set a small learning rate of the server's optimizer.
        weighting: Weights of the mean: ``"uniform"``, or ``"samples"`` for the clients' numbers of
            training samples. Votes have no weights.

    Shape:
        - ``uploads``: [n, d], n at least θ.
        - ``weights``: [n]; used with ``"samples"`` only.
        - output: [d].

    Raises:
        ValueError: If an argument is out of range, or there are fewer uploads than θ.

    Example:
        >>> uploads = torch.tensor([[3.0, -2.0], [1.0, 4.0], [2.0, 4.0]])
        >>> RobustLearningRate(threshold=2)(uploads, torch.ones(3), RoundContext())
        tensor([ 2., -2.])
    """

    shards = True

    def __init__(
        self,
        threshold: int | None = None,
        statistic: Literal["mean", "median", "sign"] = "mean",
        weighting: Literal["uniform", "samples"] = "uniform",
    ) -> None:
        super().__init__()
        if threshold is not None:
            check_integers(1, threshold=threshold)
        check_choice(("mean", "median", "sign"), statistic=statistic)
        check_choice(("uniform", "samples"), weighting=weighting)
        self.threshold = threshold
        self.statistic = statistic
        self.weighting = weighting

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into one row [d], reversed where the signs disagree."""
        threshold = context.num_byzantine + 1 if self.threshold is None else self.threshold
        self.require_uploads(uploads, threshold)
        votes = merge_columns(uploads, lambda chunk: chunk.to(merging_dtype(chunk)).sign().sum(0))
        if self.statistic == "sign":
            merged = votes.sign()
        elif self.statistic == "median":
            merged = coordinate_median(uploads)
        elif self.weighting == "samples":
            merged = weighted_mean(uploads, weights)
        else:
            merged = uploads.mean(0, dtype=merging_dtype(uploads))
        return merged.where(votes.abs() >= threshold, -merged)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: one upload may decide the sign of a coordinate."""
        return 0

    def breakdown(self, num_uploads: int) -> int:
        """Return the largest minority with the median, and 0 otherwise.

        A sign of the step does not change its length. The length of ``"sign"`` is √d at most, but
        it may be many times the length of the benign uploads.
        """
        return max(0, (num_uploads - 1) // 2) if self.statistic == "median" else 0
