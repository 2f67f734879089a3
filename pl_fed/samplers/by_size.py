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

from pl_fed.samplers._distinct import first_distinct, is_few_of_many
from pl_fed.samplers.fixed_cohort import FixedCohort


class BySize(FixedCohort):
    """Take ``cohort_size`` distinct clients in proportion to their numbers of training samples.

    A small cohort (at most a tenth) of more than 10,000 clients is drawn sample by sample, which
    has the same law and does not look at every client; ``sizes`` must not be changed in place then.

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

    def __init__(self, cohort_size: int = 10) -> None:
        super().__init__(cohort_size)
        self._ends: tuple[Tensor, Tensor] | None = None  # the last sizes, and their running sums

    def sample(self, num_clients: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cohort (see :class:`Sampler`)."""
        cohort_size = self.size_of_cohort(num_clients)
        if sizes.shape != (num_clients,):
            raise ValueError(
                f"Expected argument `sizes` to be of shape [{num_clients}] but got "
                f"{list(sizes.shape)}."
            )
        if is_few_of_many(cohort_size, num_clients):
            chosen = self._draw_few(cohort_size, sizes, generator)
        else:
            chosen = torch.empty(0, dtype=torch.int64)
        if len(chosen) < cohort_size:
            chosen = torch.cat([chosen, _draw_others(cohort_size, chosen, sizes, generator)])
        return chosen.sort().values

    def _draw_few(self, cohort_size: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Draw samples and take their clients: fewer than wanted if a few own nearly all."""
        if self._ends is None or self._ends[0] is not sizes:
            self._ends = (sizes, sizes.to(torch.int64).cumsum(0))
        ends = self._ends[1]
        total = int(ends[-1])

        def draw(count: int) -> Tensor:
            samples = torch.randint(total, (count,), generator=generator)
            return torch.searchsorted(ends, samples, right=True)

        return first_distinct(cohort_size, draw, tries=8 if total else 0)


def _draw_others(
    cohort_size: int, chosen: Tensor, sizes: Tensor, generator: torch.Generator
) -> Tensor:
    """Draw the rest of a cohort, looking at every client."""
    num_with_samples = int((sizes > 0).sum())
    if cohort_size > num_with_samples:
        raise ValueError(
            "Expected argument `cohort_size` to be at most the number of clients with samples "
            f"({num_with_samples}) but got {cohort_size}."
        )
    weights = sizes.to(torch.float64, copy=True)
    weights[chosen] = 0
    return weights.multinomial(cohort_size - len(chosen), generator=generator)
