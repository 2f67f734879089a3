"""Full participation, as in FLAME.

Shengkun Zhu, Jinshan Zeng, Sheng Wang, Yuan Sun, Xiaodong Li, Yuan Yao, Zhiyong Peng, "On ADMM in
Heterogeneous Federated Learning: Personalization, Robustness, and Fairness", arXiv:2407.16397.
"""

import torch
from torch import Tensor

from pl_fed.samplers.base import Sampler


class All(Sampler):
    """Take every client in every round.

    Shape:
        sizes [num_clients] (not looked at) → int64 [num_clients].

    Example:
        >>> All().sample(3, torch.ones(3), torch.Generator())
        tensor([0, 1, 2])
    """

    def size_of_cohort(self, num_clients: int) -> int:
        """Return ``num_clients`` (see :class:`Sampler`)."""
        return num_clients

    def sample(self, num_clients: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Return all clients (see :class:`Sampler`)."""
        return torch.arange(num_clients)
