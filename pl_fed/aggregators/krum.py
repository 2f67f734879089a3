"""Krum and multi-Krum.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui and J. Stainer, "Machine Learning with Adversaries:
Byzantine Tolerant Gradient Descent", NeurIPS 2017, arXiv 1703.02757::

    score(i) = Σ of ‖Δ_i − Δ_j‖² over the n − f − 2 uploads j ≠ i that are nearest to Δ_i
    Δ = the upload with the lowest score   (Krum),   the mean of the m with the lowest (multi-Krum)

Of equal scores the smallest client id goes first, as in the paper. The squared distances come from
one matrix of products in float64, which adds up over slices of the coordinates: two uploads are
told apart from about 1e-8 of their length on.

Departs from reference code only where it is told to: ``num_selected=None`` and
``without_neighbours="first"`` are Ditto's, ``num_selected=5, squared=False`` FLAME's.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.aggregators.counting import Counting
from pl_fed.arguments import check_choice, check_integers
from pl_fed.functional.aggregation import gram_matrix, mean_of, squared_distances
from pl_fed.functional.selection import krum_scores
from pl_fed.random import generator
from pl_fed.types import RoundContext


class Krum(Counting):
    """The upload that is nearest to its neighbours, or the mean of the few that are.

    ``"dropped"`` counts the others.

    Args:
        num_selected: How many uploads are averaged, the paper's m, at least 1; 1 is Krum, more is
            multi-Krum. ``None`` takes n − f.
        num_byzantine: How many byzantine uploads to count with, the paper's f, at least 0. ``None``
            takes the number that the server expects.
        squared: Whether distances are squared.
        without_neighbours: What happens if n − f − 2 < 1, where no score can be had: ``"error"``,
            or ``"first"`` for those that Ditto's code takes then, the first that it drew into the
            cohort: here any of the cohort, as given who is in it the order of its draw hardly
            depends on sizes.

    Shape:
        - ``uploads``: [n, d], n at least f + 3 (unless ``"first"`` is taken) and at least m,
          without NaN.
        - ``weights``: [n]; not read.
        - output: [d].

    Raises:
        ValueError: If an argument is out of range or there are too few uploads.

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
        """Merge uploads [n, d] into the best of them, or the mean of the best [d]."""
        n, byzantine = len(uploads), self.expected(context)
        selected = max(1, n - byzantine) if self.num_selected is None else self.num_selected
        self.require_uploads(uploads, selected)
        neighbours = n - byzantine - 2
        by_client = context.clients.to(uploads.device).argsort(stable=True)
        if neighbours >= 1:
            distances = squared_distances(context.sum(gram_matrix(uploads, by_client)))
            scores = krum_scores(distances if self.squared else distances.sqrt(), neighbours)
            best = by_client[scores.argsort(stable=True)][:selected]
        elif self.without_neighbours == "first":
            draw = generator(context.seed, "krum", context.round)
            best = by_client[torch.randperm(n, generator=draw)[:selected].to(uploads.device)]
        else:
            raise ValueError(
                f"Expected argument `uploads` to have at least {byzantine + 3} rows for Krum, which"
                f" looks at n − f − 2 neighbours with f = {byzantine}, but got {n}: a cohort must"
                " be larger, or have fewer byzantine clients."
            )
        context.note("dropped", n - selected)
        return mean_of(uploads, best)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: a forged upload near the honest ones may be chosen, and lies where it likes.

        What Krum promises is weaker: with 2 f + 2 < n its result is, in expectation, within a
        bounded angle of the true gradient.
        """
        return 0

    def breakdown(self, num_uploads: int) -> int:
        """Return the largest f with n ≥ 2 f + 3, or less if the arguments are of other numbers.

        More than n − f − 2 uploads may be each other's neighbours, and where more than n − f are
        selected a far one is among them.
        """
        most = max(0, (num_uploads - 3) // 2)
        if self.num_byzantine is not None:
            most = min(most, self.num_byzantine, num_uploads - self.num_byzantine - 2)
        if self.num_selected is not None:
            most = min(most, num_uploads - self.num_selected)
        return max(0, most)
