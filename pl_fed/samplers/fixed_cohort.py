"""The base class of samplers with a constant cohort size."""

from pl_fed.arguments import check_integers
from pl_fed.samplers.base import Sampler

_DEFAULT = 10  # clients


class FixedCohort(Sampler):
    """Base class of samplers that draw a constant number of clients in every round.

    A subclass implements ``sample``.

    Args:
        cohort_size: Clients per round, at least 1 and at most the number of clients. ``None`` for
            10, or all clients if there are fewer.

    Raises:
        TypeError: If ``cohort_size`` is not an integer.
        ValueError: If ``cohort_size`` is below 1. The methods raise it if ``cohort_size`` is above
            the number of clients.

    Example:
        >>> import torch
        >>> class First(FixedCohort):
        ...     def sample(self, num_clients, sizes, generator):
        ...         return torch.arange(self.size_of_cohort(num_clients))
        >>> First(cohort_size=2).sample(5, torch.ones(5), torch.Generator())
        tensor([0, 1])
    """

    def __init__(self, cohort_size: int | None = None) -> None:
        if cohort_size is not None:
            check_integers(1, cohort_size=cohort_size)
        self.cohort_size = cohort_size

    def size_of_cohort(self, num_clients: int) -> int:
        """Return ``cohort_size``; raise ``ValueError`` if the federation has fewer clients."""
        if self.cohort_size is None:
            return min(_DEFAULT, num_clients)
        if self.cohort_size > num_clients:
            raise ValueError(
                "Expected argument `cohort_size` to be at most the number of clients "
                f"({num_clients}) but got {self.cohort_size}."
            )
        return self.cohort_size
