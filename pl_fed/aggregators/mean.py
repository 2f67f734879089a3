"""The mean: federated averaging.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson and B. Agüera y Arcas, "Communication-Efficient
Learning of Deep Networks from Decentralized Data", AISTATS 2017, arXiv 1602.05629::

    Δ = Σ_k p_k Δ_k,   p_k = n_k / Σ_j n_j  (``samples``)   or   1/n  (``uniform``)

Departs from the paper: the default is ``uniform``, as in Ditto's Algorithm 1 and in FLAME. It goes
with a cohort that is drawn in proportion to the clients' sizes; ``samples`` goes with a uniform
draw. Large clients would count twice if both went by size. Running statistics (BatchNorm's) are
averaged as the parameters are.
"""

from typing import Literal

from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_choice
from pl_fed.functional.aggregation import merging_dtype, weighted_mean
from pl_fed.types import RoundContext


class Mean(Aggregator):
    """Mean of the uploads. One adversarial upload can move it anywhere.

    Args:
        weighting: ``"uniform"`` counts each client once, ``"samples"`` each training sample.

    Shape:
        - ``uploads``: [n, d], n at least 1.
        - ``weights``: [n]; read with ``"samples"`` only.
        - output: [d].

    Raises:
        ValueError: If ``weighting`` is neither of the two, or there is no upload.

    Example:
        >>> import torch
        >>> uploads, samples = torch.tensor([[1.0], [5.0]]), torch.tensor([3, 1])
        >>> Mean()(uploads, samples, RoundContext())
        tensor([3.])
        >>> Mean("samples")(uploads, samples, RoundContext())
        tensor([2.])
    """

    def __init__(self, weighting: Literal["uniform", "samples"] = "uniform") -> None:
        super().__init__()
        check_choice(("uniform", "samples"), weighting=weighting)
        self.weighting = weighting

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into their mean [d]."""
        self.require_uploads(uploads)
        if self.weighting == "samples":
            return weighted_mean(uploads, weights)
        return uploads.mean(dim=0, dtype=merging_dtype(uploads))

    def mass(self, weights: Tensor) -> float:
        """Return the number of clients, or of their samples."""
        return float(weights.double().sum()) if self.weighting == "samples" else len(weights)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: the mean has no breakdown point."""
        return 0


def counts_samples(aggregator: Aggregator) -> bool:
    """Return whether what merges uploads in the end is a mean by samples."""
    last = aggregator.last
    return isinstance(last, Mean) and last.weighting == "samples"
