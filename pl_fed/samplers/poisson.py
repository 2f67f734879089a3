"""Poisson sampling: every client decides by its own coin whether it takes part in a round.

Y. Zhu and Y.-X. Wang, "Poisson Subsampled Rényi Differential Privacy", ICML 2019. H. B. McMahan, D.
Ramage, K. Talwar and L. Zhang, "Learning Differentially Private Recurrent Language Models", ICLR
2018, arXiv 1710.06963, Algorithm 1 ("select users with probability q").

The coins of two clients, and of two rounds, are independent. The theorems of amplification by
Poisson sampling need exactly this.
"""

import torch
from torch import Tensor

from pl_fed.functional.binomial import binomial_probabilities
from pl_fed.samplers.base import Sampler


class Poisson(Sampler):
    """Poisson sampling: each client takes part with the same probability, independently.

    The cohorts have different sizes, and may be empty. Their expected size is ``rate`` times the
    number of clients.

    Source: McMahan et al., ICLR 2018, Algorithm 1.

    Args:
        rate: The probability that a client takes part in a round, in (0, 1].

    Shape:
        sizes [num_clients] (unused) → int64 [cohort], with a random length.

    Raises:
        TypeError: If ``rate`` is not a number.
        ValueError: If ``rate`` is not in (0, 1].

    Example:
        >>> sampler = Poisson(rate=0.5)
        >>> sampler.size_of_cohort(8)  # expected
        4
        >>> len(sampler.sample(8, torch.ones(8), torch.Generator().manual_seed(3)))
        5
    """

    has_fixed_size = False

    def __init__(self, rate: float = 0.1) -> None:
        expected = f"Expected argument `rate` to be a number in (0, 1] but got {rate!r}"
        if isinstance(rate, bool) or not isinstance(rate, int | float):
            raise TypeError(f"{expected}: set, for example, 0.1.")
        if not 0 < rate <= 1:
            raise ValueError(f"{expected}: set, for example, 0.1.")
        self.rate = float(rate)

    def size_of_cohort(self, num_clients: int) -> int:
        """Return the expected size of a cohort, rounded, and at least 1."""
        return max(1, round(self.rate * num_clients))

    def size_probabilities(self, num_clients: int) -> Tensor:
        """Return the binomial distribution of a cohort's size, float64 [num_clients + 1]."""
        return binomial_probabilities(num_clients, self.rate)

    def sample(self, num_clients: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Return the ids of the clients whose coin selects them."""
        coins: Tensor = torch.rand(num_clients, generator=generator, dtype=torch.float64)
        cohort: Tensor = (coins < self.rate).nonzero().flatten()
        return cohort
