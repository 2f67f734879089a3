"""The contract of samplers."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from pl_fed.configurable import Configurable


class Sampler(Configurable, ABC):
    """Sampler: draws the cohort of a round, the clients that take part.

    All randomness comes from the ``generator`` argument. The federation keys it by (seed, round).
    Therefore a cohort does not depend on earlier rounds, on the engine, or on the number of
    processes.

    Example:
        >>> class FirstOnly(Sampler):
        ...     def size_of_cohort(self, num_clients):
        ...         return 1
        ...     def sample(self, num_clients, sizes, generator):
        ...         return torch.zeros(1, dtype=torch.int64)
        >>> FirstOnly().sample(3, torch.ones(3), torch.Generator())
        tensor([0])
    """

    has_fixed_size: bool = True
    """Whether all cohorts have the same size. Otherwise ``size_of_cohort`` is the expected size,
    and a cohort may be empty."""

    @abstractmethod
    def size_of_cohort(self, num_clients: int) -> int:
        """Return the size of a cohort in a federation of ``num_clients`` clients.

        Raises:
            ValueError: If the federation is too small. The federation calls this method before
                training, so that the error comes early.
        """

    @abstractmethod
    def sample(self, num_clients: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cohort.

        Args:
            num_clients: Number of clients of the federation.
            sizes: Number of training samples of each client, [num_clients].
            generator: Source of all randomness.

        Returns:
            Distinct client ids in ascending order, int64 [size_of_cohort(num_clients)]; of any
            length without :attr:`has_fixed_size`.

        Raises:
            ValueError: If the federation is too small.
        """

    def size_probabilities(self, num_clients: int) -> Tensor | None:
        """Return the probability of each size of a cohort, from 0, float64 [num_clients + 1].

        ``None`` for cohorts of one size, or of an unknown distribution.
        """
        return None

    def min_separation(self, num_clients: int) -> int:
        """Return the number of consecutive rounds in which a client takes part at most once."""
        return 1

    def draw_round(
        self, round: int, num_clients: int, sizes: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the checked cohort of a round.

        Args:
            round: The round, from 0; only samplers that take the clients in turn read it.
            num_clients: Number of clients of the federation.
            sizes: Number of training samples of each client, [num_clients].
            generator: Source of all randomness.
        """
        return self.draw(num_clients, sizes, generator)

    def draw(self, num_clients: int, sizes: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cohort of :meth:`sample`, and check it; its order is free.

        Args:
            num_clients: Number of clients of the federation.
            sizes: Number of training samples of each client, [num_clients].
            generator: Source of all randomness.

        Raises:
            ValueError: If the cohort has another size, or contains anything but distinct client
                ids.
        """
        return self.check_cohort(self.sample(num_clients, sizes, generator), num_clients)

    def check_cohort(self, drawn: Tensor, num_clients: int) -> Tensor:
        """Return a drawn cohort as a tensor; refuse anything but distinct client ids.

        Args:
            drawn: The cohort, of :meth:`sample` or of a subclass's :meth:`draw_round`.
            num_clients: Number of clients of the federation.

        Raises:
            ValueError: If the cohort has another size, or contains anything but distinct client
                ids.
        """
        cohort = torch.as_tensor(drawn)
        size = self.size_of_cohort(num_clients) if self.has_fixed_size else cohort.numel()
        is_valid = cohort.dtype == torch.int64 and cohort.shape == (size,)
        ids = set(cohort.tolist()) if is_valid else set()
        if len(ids) < size or min(ids, default=0) < 0 or max(ids, default=0) >= num_clients:
            raise ValueError(
                f"Expected argument `sampler` to draw {size} different ids of 0 to"
                f" {num_clients - 1}, int64 [{size}], but {type(self).__name__} drew"
                f" {cohort.tolist()} ({cohort.dtype})."
            )
        return cohort
