"""Ditto's sampler: clients with more training samples take part more often.

T. Li, S. Hu, A. Beirami and V. Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, arXiv 2012.04221. The paper says "randomly selects". The reference code
draws by size, and averages the updates without weights.

The sampler draws clients one after the other. Every draw is in proportion to the number of training
samples among the remaining clients: the distribution of
``numpy.random.Generator.choice(..., replace=False, p=...)``. Therefore, in a cohort of two or more,
the probability of a client is not exactly proportional to its size.

Departs from the reference code: there only the round seeds the draw, so that every seed has equal
cohorts. Here the generator also depends on the seed of the federation.
"""

import torch
from torch import Tensor

from pl_fed.samplers._distinct import draw_distinct, is_sparse_cohort
from pl_fed.samplers.fixed_cohort import FixedCohort


class BySize(FixedCohort):
    """Sampling by size: draws distinct clients in proportion to their numbers of training samples.

    Source: the reference code of Ditto (Li et al., ICML 2021). With more than 10,000 clients and a
    cohort of at most a tenth, the sampler draws single training samples, and takes their clients.
    The distribution is unchanged, and a draw needs no pass over all clients. Do not change
    ``sizes`` in place between rounds.

    Args:
        cohort_size: Clients per round, at least 1 and at most the number of clients with samples.
            ``None`` for 10, or all clients if there are fewer.

    Shape:
        sizes [num_clients] → int64 [cohort_size].

    Raises:
        TypeError: If ``cohort_size`` is not an integer.
        ValueError: If ``cohort_size`` is below 1. The methods raise it if ``cohort_size`` is above
            the number of clients, or of clients with samples, or if ``sizes`` is not of shape
            [num_clients].

    Example:
        >>> sizes = torch.tensor([100, 0, 0, 100])
        >>> BySize(cohort_size=2).sample(4, sizes, torch.Generator().manual_seed(0))
        tensor([0, 3])
    """

    def __init__(self, cohort_size: int | None = None) -> None:
        super().__init__(cohort_size)
        self._ends: tuple[Tensor, Tensor] | None = None  # the last sizes and their cumulative sums

    def sample(self, num_clients: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cohort."""
        cohort_size = self.size_of_cohort(num_clients)
        if sizes.shape != (num_clients,):
            raise ValueError(
                f"Expected argument `sizes` to be of shape [{num_clients}] but got "
                f"{list(sizes.shape)}."
            )
        if is_sparse_cohort(cohort_size, num_clients):
            cohort = self._draw_by_samples(cohort_size, sizes, generator)
        else:
            cohort = torch.empty(0, dtype=torch.int64)
        if len(cohort) < cohort_size:
            cohort = torch.cat([cohort, _draw_remainder(cohort_size, cohort, sizes, generator)])
        return cohort.sort().values

    def _draw_by_samples(
        self, cohort_size: int, sizes: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Draw training samples and return their clients.

        If few clients own nearly all samples, there may be fewer than ``cohort_size`` clients.
        """
        if self._ends is None or self._ends[0] is not sizes:
            self._ends = (sizes, sizes.to(torch.int64).cumsum(0))
        ends = self._ends[1]
        total = int(ends[-1])

        def draw(count: int) -> Tensor:
            """Draw the clients of training samples, with replacement."""
            samples = torch.randint(total, (count,), generator=generator)
            return torch.searchsorted(ends, samples, right=True)

        return draw_distinct(cohort_size, draw, tries=8 if total else 0)


def _draw_remainder(
    cohort_size: int, drawn: Tensor, sizes: Tensor, generator: torch.Generator
) -> Tensor:
    """Draw the remaining clients of a cohort, by an operation on all clients."""
    num_with_samples = int((sizes > 0).sum())
    if cohort_size > num_with_samples:
        raise ValueError(
            "Expected argument `cohort_size` to be at most the number of clients with samples "
            f"({num_with_samples}) but got {cohort_size}."
        )
    weights = sizes.to(torch.float64, copy=True)
    weights[drawn] = 0
    return weights.multinomial(cohort_size - len(drawn), generator=generator)
