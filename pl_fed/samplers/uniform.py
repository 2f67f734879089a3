"""Uniform sampling: the standard cohort of federated averaging.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson and B. Agüera y Arcas, "Communication-Efficient
Learning of Deep Networks from Decentralized Data", AISTATS 2017, arXiv 1602.05629, Algorithm 1.
FedTilt (arXiv 2503.13537) draws 10 of 100 clients in this way.
"""

import torch
from torch import Tensor

from pl_fed.samplers._distinct import draw_distinct, is_sparse_cohort
from pl_fed.samplers.fixed_cohort import FixedCohort


class Uniform(FixedCohort):
    """Uniform sampling: draws distinct clients, and all sets of clients are equally likely.

    Source: McMahan et al., AISTATS 2017, Algorithm 1. If the cohort is at most a tenth of more than
    10,000 clients, the time of a draw does not depend on the number of clients.

    Args:
        cohort_size: Clients per round, at least 1 and at most the number of clients. ``None`` for
            10, or all clients if there are fewer.

    Shape:
        sizes [num_clients] (unused) → int64 [cohort_size].

    Raises:
        TypeError: If ``cohort_size`` is not an integer.
        ValueError: If ``cohort_size`` is below 1. The methods raise it if ``cohort_size`` is above
            the number of clients.

    Example:
        >>> sampler = Uniform(cohort_size=3)
        >>> len(sampler.sample(8, torch.ones(8), torch.Generator().manual_seed(0)))
        3
    """

    def sample(self, num_clients: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cohort."""
        cohort_size = self.size_of_cohort(num_clients)
        if is_sparse_cohort(cohort_size, num_clients):

            def draw(count: int) -> Tensor:
                """Draw clients with replacement."""
                return torch.randint(num_clients, (count,), generator=generator)

            return draw_distinct(cohort_size, draw).sort().values
        return torch.randperm(num_clients, generator=generator)[:cohort_size].sort().values
