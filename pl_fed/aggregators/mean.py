"""Mean: federated averaging.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson and B. Agüera y Arcas, "Communication-Efficient
Learning of Deep Networks from Decentralized Data", AISTATS 2017, arXiv 1602.05629::

    Δ = Σ_k p_k Δ_k,   p_k = n_k / Σ_j n_j  (``samples``)   or   1/n  (``uniform``)

Departs from the paper: the default is ``uniform``, as in Ditto's Algorithm 1 and in FLAME. Combine
``uniform`` with a cohort drawn in proportion to the clients' sizes, and ``samples`` with a uniform
draw. If both use the sizes, large clients count twice. Running statistics (BatchNorm's) are
averaged like the parameters.
"""

from typing import Literal

from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_choice
from pl_fed.functional.aggregation import merging_dtype, weighted_mean
from pl_fed.types import RoundContext


class Mean(Aggregator):
    """Mean of the uploads (FedAvg), uniform or weighted by training samples.

    Source: McMahan et al., AISTATS 2017. Breakdown point: 0; one Byzantine upload can move the mean
    anywhere.

    Args:
        weighting: ``"uniform"`` weights all clients equally, ``"samples"`` by their numbers of
            training samples.

    Shape:
        - ``uploads``: [n, d], n at least 1.
        - ``weights``: [n]; used with ``"samples"`` only.
        - output: [d].

    Raises:
        ValueError: If ``weighting`` is another word, or there is no upload.

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
        """Return the number of clients, or their number of samples with ``"samples"``."""
        return float(weights.double().sum()) if self.weighting == "samples" else len(weights)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: the mean has no breakdown point."""
        return 0


def weights_by_samples(aggregator: Aggregator) -> bool:
    """Return whether the final aggregator is a mean weighted by samples."""
    final = aggregator.final_aggregator
    return isinstance(final, Mean) and final.weighting == "samples"
