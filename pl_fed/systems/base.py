"""The contract of distributions of clients' speed, bandwidth and availability."""

from abc import ABC, abstractmethod

from torch import Tensor

from pl_fed.configurable import Configurable


class Distribution(Configurable, ABC):
    """Distribution: gives each client a number, such as its speed, by the quantile function.

    pl_fed draws a share in (0, 1) for each client, keyed by the seed, the purpose and the client.
    The number is the quantile of that share. It stays the same in all rounds.

    Example:
        >>> import torch
        >>> class TwoKinds(Distribution):
        ...     def quantiles(self, shares):
        ...         return torch.where(shares < 0.5, 1.0, 10.0)
        >>> TwoKinds().quantiles(torch.tensor([0.2, 0.7])).tolist()
        [1.0, 10.0]
    """

    @abstractmethod
    def quantiles(self, shares: Tensor) -> Tensor:
        """Return the quantiles of some shares.

        Args:
            shares: Numbers in (0, 1), float64 [clients].

        Returns:
            float64 [clients].
        """
