"""The cohort of Ditto: clients with more data are more likely to take part.

Tian Li, Shengyuan Hu, Ahmad Beirami, Virginia Smith, "Ditto: Fair and Robust Federated Learning
Through Personalization", ICML 2021, arXiv:2012.04221. The paper says "randomly selects"; the
sampling by size is in the reference code, which goes with it in averaging the updates without
weights.

Clients are drawn one after the other, each time in proportion to the number of training samples
among those not yet drawn: the law of ``numpy.random.Generator.choice(..., replace=False, p=...)``.
So a client's chance to be in the cohort is not exactly proportional to its size once there are two
or more.

Departs from the reference code, which seeds the draw with the round alone, so that every seed has
the same cohorts; here the generator carries the seed of the federation too.
"""

import torch
from torch import Tensor

from pl_fed.samplers.fixed_cohort import FixedCohort


class BySize(FixedCohort):
    """Take ``cohort_size`` distinct clients in proportion to their numbers of training samples.

    Args:
        cohort_size: Clients per round, >= 1 and at most the number of clients that have samples.

    Shape:
        sizes [num_clients] → int64 [cohort_size].

    Raises:
        ValueError: If ``cohort_size`` is below 1; by the methods, if it is above the number of
            clients, or of those with samples, or if ``sizes`` is not of shape [num_clients].

    Example:
        >>> sizes = torch.tensor([100, 0, 0, 100])
        >>> BySize(cohort_size=2).sample(4, sizes, torch.Generator().manual_seed(0))
        tensor([0, 3])
    """

    def sample(self, num_clients: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cohort (see :class:`Sampler`)."""
        cohort_size = self.size_of_cohort(num_clients)
        if sizes.shape != (num_clients,):
            raise ValueError(
                f"Expected argument `sizes` to be of shape [{num_clients}] but got "
                f"{list(sizes.shape)}."
            )
        num_with_samples = int((sizes > 0).sum())
        if cohort_size > num_with_samples:
            raise ValueError(
                "Expected argument `cohort_size` to be at most the number of clients with samples "
                f"({num_with_samples}) but got {cohort_size}."
            )
        weights = sizes.to(torch.float64)
        return weights.multinomial(cohort_size, generator=generator).sort().values
