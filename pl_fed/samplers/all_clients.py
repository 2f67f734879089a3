"""Full participation, as in FLAME.

S. Zhu, J. Zeng, S. Wang, Y. Sun, X. Li, Y. Yao and Z. Peng, "On ADMM in Heterogeneous Federated
Learning: Personalization, Robustness, and Fairness", arXiv 2407.16397.
"""

import torch
from torch import Tensor

from pl_fed.samplers.base import Sampler


class All(Sampler):
    """Full participation: every client takes part in every round, as in FLAME (arXiv 2407.16397).

    Shape:
        sizes [num_clients] (unused) → int64 [num_clients].

    Example:
        >>> All().sample(3, torch.ones(3), torch.Generator())
        tensor([0, 1, 2])
    """

    def size_of_cohort(self, num_clients: int) -> int:
        """Return ``num_clients``."""
        return num_clients

    def sample(self, num_clients: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Return the ids of all clients."""
        return torch.arange(num_clients)
