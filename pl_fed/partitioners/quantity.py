"""Quantity skew: the clients' numbers of samples differ, their class distributions do not.

Dirichlet: Shengkun Zhu et al., "On ADMM in Heterogeneous Federated Learning: Personalization,
Robustness, and Fairness" (FLAME), arXiv:2407.16397, section VI, and Qinbin Li et al., "Federated
Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022, arXiv:2102.02079::

    sizes ∝ q,   q ~ Dir(β) over the clients

Lognormal: Tian Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020,
arXiv:1812.06127 (sizes follow a power law)::

    sizes ∝ exp(σ z_k),   z_k ~ N(0, 1)

Departs from FLAME's code, unless ``overlapping`` is set: there client k draws max(100, ⌊q_k n⌋)
samples independently of other clients. Clients then share samples; a training sample of one client
may be a test sample of another. Here the split is disjoint and complete.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pl_fed.arguments import check_at_most, check_choice, check_integers, check_positive
from pl_fed.partitioners._counts import apportion, deal
from pl_fed.partitioners.base import Partitioner, check_concentration, check_size, check_split


class Quantity(Partitioner):
    """Quantity skew: shuffled samples, cut into parts of random sizes.

    The split ignores the labels, so they may be real values.

    Args:
        law: Distribution of the sizes: ``"dirichlet"`` or ``"lognormal"``.
        beta: β > 0 of the Dirichlet distribution. The smaller it is, the more the sizes differ.
        sigma: σ of the lognormal distribution, in (0, 100]; draws overflow above 100. The larger it
            is, the more the sizes differ.
        min_size: Least number of samples of a client, >= 1. A client below it gets ``min_size``
            samples; other clients share the remainder in the drawn proportions.
        overlapping: Draw each client's samples from all samples, as FLAME's code does (with
            ``min_size: 100``), so that clients share samples.

    Shape:
        labels [n, ...], n at least number of clients times ``min_size``.

    Raises:
        ValueError: If an argument is out of range; by :meth:`split`, if there are too few samples.

    Example:
        >>> parts = Quantity(beta=0.5).split(torch.zeros(100), 4, torch.Generator().manual_seed(0))
        >>> sum(len(part) for part in parts)
        100
    """

    def __init__(
        self,
        law: Literal["dirichlet", "lognormal"] = "dirichlet",
        beta: float = 0.5,
        sigma: float = 1.0,
        min_size: int = 1,
        overlapping: bool = False,
    ) -> None:
        check_choice(("dirichlet", "lognormal"), law=law)
        check_concentration(beta)
        check_positive(sigma=sigma)
        check_at_most(100, sigma=sigma)
        check_integers(1, min_size=min_size)
        self.law = law
        self.beta = beta
        self.sigma = sigma
        self.min_size = min_size
        self.overlapping = overlapping

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """Return the samples of each client (see :class:`Partitioner`)."""
        check_split(labels, num_clients)
        check_size(len(labels), num_clients, self.min_size)
        shares = self._shares(num_clients, generator)
        if self.overlapping:
            sizes = (shares * len(labels)).floor().long().clamp(self.min_size, len(labels))
            return [
                torch.randperm(len(labels), generator=generator)[:size].sort().values
                for size in sizes.tolist()
            ]
        sizes = self._sizes(len(labels), shares, generator)
        return deal([torch.arange(len(labels))], sizes[None], generator)

    def _shares(self, num_clients: int, generator: torch.Generator) -> Tensor:
        """Return each client's share of the samples, [clients]."""
        draw = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=generator)))
        if self.law == "dirichlet":
            return torch.from_numpy(draw.dirichlet(np.full(num_clients, self.beta)))
        weights = torch.from_numpy(draw.lognormal(0.0, self.sigma, num_clients))
        return weights / weights.sum()

    def _sizes(self, total: int, shares: Tensor, generator: torch.Generator) -> Tensor:
        """Return the sizes, int64 [clients], with sum ``total`` and at least ``min_size`` each."""
        is_minimal = torch.zeros(len(shares), dtype=torch.bool)
        while True:  # clients with the minimal size reduce other sizes, maybe below the minimum
            sizes = torch.full((len(shares),), self.min_size)
            remainder = total - self.min_size * int(is_minimal.sum())
            sizes[~is_minimal] = apportion(remainder, shares[~is_minimal], generator)
            is_below = sizes < self.min_size
            if not is_below.any():
                return sizes
            is_minimal |= is_below
