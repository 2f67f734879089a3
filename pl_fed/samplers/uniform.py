"""The usual cohort: some clients at random, each as likely as another.

H. Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas,
"Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
arXiv:1602.05629, algorithm 1. FedTilt (arXiv:2503.13537) takes 10 of 100 clients in this way.
"""

import torch
from torch import Tensor

from pl_fed.samplers._distinct import first_distinct, is_few_of_many
from pl_fed.samplers.fixed_cohort import FixedCohort


class Uniform(FixedCohort):
    """Take ``cohort_size`` distinct clients, all sets of that size being equally likely.

    A small cohort (at most a tenth) of more than 10,000 clients is drawn in a time that does not
    depend on their number.

    Args:
        cohort_size: Clients per round, >= 1 and at most the number of clients.

    Shape:
        sizes [num_clients] (not looked at) → int64 [cohort_size].

    Raises:
        ValueError: If ``cohort_size`` is below 1; by the methods, if it is above the number of
            clients.

    Example:
        >>> sampler = Uniform(cohort_size=3)
        >>> len(sampler.sample(8, torch.ones(8), torch.Generator().manual_seed(0)))
        3
    """

    def sample(self, num_clients: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cohort (see :class:`Sampler`)."""
        cohort_size = self.size_of_cohort(num_clients)
        if is_few_of_many(cohort_size, num_clients):

            def draw(count: int) -> Tensor:
                return torch.randint(num_clients, (count,), generator=generator)

            return first_distinct(cohort_size, draw).sort().values
        return torch.randperm(num_clients, generator=generator)[:cohort_size].sort().values
