"""What every sampler of clients promises."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from pl_fed.recorded import Recorded


class Sampler(Recorded, ABC):
    """Chooses the cohort: the clients that take part in a round.

    All randomness comes from the given generator, which the federation keys by (seed, round): so a
    cohort does not depend on the rounds before it, on the engine, or on the number of processes.

    Example:
        >>> class FirstOnly(Sampler):
        ...     def size_of_cohort(self, num_clients):
        ...         return 1
        ...     def sample(self, num_clients, sizes, generator):
        ...         return torch.zeros(1, dtype=torch.int64)
        >>> FirstOnly().sample(3, torch.ones(3), torch.Generator())
        tensor([0])
    """

    @abstractmethod
    def size_of_cohort(self, num_clients: int) -> int:
        """Return how many clients take part in a round of a federation of ``num_clients``.

        Raises:
            ValueError: If the federation is too small; so this is found before training begins.
        """

    @abstractmethod
    def sample(self, num_clients: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cohort.

        Args:
            num_clients: Number of clients of the federation.
            sizes: Number of training samples of each client, [num_clients].
            generator: Source of all randomness.

        Returns:
            Distinct client ids in ascending order, int64 [size_of_cohort(num_clients)].

        Raises:
            ValueError: If the federation is too small.
        """

    def draw(self, num_clients: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cohort that :meth:`sample` gives, in whatever order.

        Raises:
            ValueError: If it is none: of another size, or of ids that are not those of clients.
        """
        cohort = self.sample(num_clients, sizes, generator)
        number = self.size_of_cohort(num_clients)
        known = torch.as_tensor(cohort)
        whole = known.dtype == torch.int64 and known.shape == (number,)
        ids = set(known.tolist()) if whole else set()
        if len(ids) < number or min(ids, default=0) < 0 or max(ids, default=0) >= num_clients:
            raise ValueError(
                f"Expected argument `sampler` to draw {number} different ids of 0 to"
                f" {num_clients - 1}, int64 [{number}], but {type(self).__name__} drew"
                f" {known.tolist()} ({known.dtype})."
            )
        return known
