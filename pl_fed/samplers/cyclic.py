"""Cyclic sampling: the clients take part in turn, group after group.

P. Kairouz, B. McMahan, S. Song, O. Thakkar, A. Thakurta and Z. Xu, "Practical and Private (Deep)
Learning without Sampling or Shuffling", ICML 2021, arXiv 2103.00039. Its restricted participation
makes correlated noise (DP-FTRL) possible: a client takes part at most once in so many rounds.
"""

import torch
from torch import Tensor

from pl_fed.arguments import check_integers
from pl_fed.samplers.base import Sampler


class Cyclic(Sampler):
    """Cyclic sampling: client k takes part in every round t with t mod groups = k mod groups.

    Source: Kairouz et al., ICML 2021.

    Args:
        groups: The number of groups, at least 1 and at most the number of clients.

    Shape:
        sizes [num_clients] (unused) → int64 [cohort]; groups differ by at most one client.

    Raises:
        TypeError: If ``groups`` is not an integer.
        ValueError: If ``groups`` is below 1. The methods raise it if there are fewer clients.

    Example:
        >>> sampler = Cyclic(groups=3)
        >>> [sampler.draw_round(t, 7, torch.ones(7), torch.Generator()).tolist() for t in range(4)]
        [[0, 3, 6], [1, 4], [2, 5], [0, 3, 6]]
    """

    has_fixed_size = False

    def __init__(self, groups: int = 10) -> None:
        check_integers(1, groups=groups)
        self.groups = groups

    def min_separation(self, num_clients: int) -> int:
        """Return the number of groups."""
        return self.groups

    def size_of_cohort(self, num_clients: int) -> int:
        """Return the size of the largest group; raise ``ValueError`` if a group is empty."""
        if self.groups > num_clients:
            raise ValueError(
                f"Expected argument `groups` to be at most the number of clients ({num_clients})"
                f" but got {self.groups}."
            )
        return -(-num_clients // self.groups)

    def sample(self, num_clients: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Return the first group."""
        return self.draw_round(0, num_clients, sizes, generator)

    def draw_round(
        self, round: int, num_clients: int, sizes: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the group of a round."""
        self.size_of_cohort(num_clients)  # refuses an empty group
        return torch.arange(round % self.groups, num_clients, self.groups)
