"""Krum and multi-Krum: select the uploads nearest to their neighbours.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui and J. Stainer, "Machine Learning with Adversaries:
Byzantine Tolerant Gradient Descent", NeurIPS 2017, arXiv 1703.02757::

    score(i) = Σ of ‖Δ_i − Δ_j‖² over the n − f − 2 uploads j ≠ i that are nearest to Δ_i
    Δ = the upload with the lowest score   (Krum),   the mean of the m with the lowest (multi-Krum)

Among equal scores, the smallest client id comes first, as in the paper. The squared distances come
from one matrix of products in float64. It adds up over slices of the coordinates. Two uploads are
distinguishable if their distance is at least about 1e-7 of their length.

Variants of reference code: ``num_selected=None`` and ``without_neighbours="first"`` are Ditto's,
``num_selected=5, squared=False`` are FLAME's.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.aggregators.byzantine_count import ByzantineAwareAggregator
from pl_fed.arguments import check_choice, check_integers
from pl_fed.functional.aggregation import gram_matrix, squared_distances, subset_mean
from pl_fed.functional.selection import complement_mask, krum_scores
from pl_fed.random import generator
from pl_fed.types import RoundContext


class Krum(ByzantineAwareAggregator):
    """Krum: selects the upload nearest to its neighbours; multi-Krum averages the m nearest ones.

    Source: Blanchard et al., NeurIPS 2017. Breakdown point: f ≤ (n − 3) / 2. It logs the number of
    uploads that it does not select as ``"dropped"``.

    Args:
        num_selected: The number of uploads in the mean, the paper's m, at least 1. 1 is Krum, more
            is multi-Krum, and ``None`` uses n − f.
        num_byzantine: The assumed number of Byzantine uploads, the paper's f, at least 0. ``None``
            uses the number that the server expects.
        squared: Whether the scores add squared distances.
        without_neighbours: Behaviour if n − f − 2 < 1, where no score exists. ``"error"`` raises an
            error. ``"first"`` selects as Ditto's code: that takes the first clients of the cohort's
            draw. Here they are drawn at random from the cohort, because the order of Ditto's draw
            hardly depends on the sizes of the cohort's members.

    Shape:
        - ``uploads``: [n, d], n at least m, and at least f + 3 with ``"error"``; without NaN.
        - ``weights``: [n]; unused.
        - output: [d].

    Raises:
        ValueError: If an argument is out of range, or there are too few uploads.

    Example:
        >>> import torch
        >>> uploads = torch.tensor([[1.0], [1.5], [3.0], [100.0]])
        >>> context = RoundContext(num_byzantine=1, clients=torch.arange(4))
        >>> Krum()(uploads, torch.ones(4), context)
        tensor([1.])
        >>> Krum(num_selected=2)(uploads, torch.ones(4), context)
        tensor([1.2500])
        >>> Krum(num_byzantine=2, without_neighbours="first")(uploads, torch.ones(4), context)
        tensor([1.5000])
    """

    shards = True

    def __init__(
        self,
        num_selected: int | None = 1,
        num_byzantine: int | None = None,
        squared: bool = True,
        without_neighbours: Literal["error", "first"] = "error",
    ) -> None:
        super().__init__(num_byzantine)
        if num_selected is not None:
            check_integers(1, num_selected=num_selected)
        check_choice(("error", "first"), without_neighbours=without_neighbours)
        self.num_selected = num_selected
        self.squared = squared
        self.without_neighbours = without_neighbours

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the mean of the selected ones [d]."""
        n, byzantine = len(uploads), self.resolve_num_byzantine(context)
        num_selected = max(1, n - byzantine) if self.num_selected is None else self.num_selected
        self.require_uploads(uploads, num_selected)
        num_neighbours = n - byzantine - 2
        by_client = context.clients.to(uploads.device).argsort(stable=True)
        if num_neighbours >= 1:
            distances = squared_distances(context.sum(gram_matrix(uploads, by_client)))
            scores = krum_scores(distances if self.squared else distances.sqrt(), num_neighbours)
            selected = by_client[scores.argsort(stable=True)][:num_selected]
        elif self.without_neighbours == "first":
            draw = generator(context.seed, "krum", context.round)
            drawn = torch.randperm(n, generator=draw)[:num_selected]
            selected = by_client[drawn.to(uploads.device)]
        else:
            raise ValueError(
                f"Expected argument `uploads` to have at least {byzantine + 3} rows for Krum, which"
                f" uses n − f − 2 neighbours with f = {byzantine}, but got {n}: use a larger"
                " cohort, or fewer Byzantine clients."
            )
        context.reject_rows(complement_mask(selected, n))
        return subset_mean(uploads, selected)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: Krum may select a forged upload near the benign ones, with any values.

        Krum's own promise is weaker. With 2 f + 2 < n, the angle between its expected result and
        the true gradient is bounded.
        """
        return 0

    def breakdown(self, num_uploads: int) -> int:
        """Return the largest f with n ≥ 2 f + 3, or less if the arguments fix other numbers.

        Two limits follow from the arguments. More than n − f − 2 Byzantine uploads may be
        neighbours of each other, and a selection of more than n − f uploads contains a Byzantine
        one.
        """
        maximum = max(0, (num_uploads - 3) // 2)
        if self.num_byzantine is not None:
            maximum = min(maximum, self.num_byzantine, num_uploads - self.num_byzantine - 2)
        if self.num_selected is not None:
            maximum = min(maximum, num_uploads - self.num_selected)
        return max(0, maximum)
