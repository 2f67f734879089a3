"""A random sample of clients, for validations that are too long over all clients."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pl_fed.random import key, random_bits

_LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class ClientSample:
    """Client sample: clients drawn without replacement, all sets equally likely.

    The draw depends on the seed and on the clients with samples only. Therefore each validation of
    a run sees the same clients, also after a resume, and differences between rounds come from the
    models alone. A smaller sample is a part of a larger one.

    Attributes:
        is_drawn: Whether each client is in the sample, bool [clients].
        share: Share of the drawn clients among the clients with samples.

    Example:
        >>> sample = ClientSample.draw(2, torch.tensor([5, 0, 5, 5, 5]), seed=0)
        >>> int(sample.is_drawn.sum()), bool(sample.is_drawn[1]), sample.share
        (2, False, 0.5)
    """

    is_drawn: Tensor
    share: float

    @classmethod
    def draw(cls, number: int | float, sizes: Tensor, seed: int) -> "ClientSample":
        """Return a sample of the clients with samples.

        Args:
            number: Number of clients as an int, or share of the clients with samples as a float,
                rounded up. A larger number than that of the clients draws all of them.
            sizes: Number of samples of each client, int64 [clients].
            seed: The seed of the federation.
        """
        candidates = int((sizes > 0).sum())
        if isinstance(number, float):
            number = max(1, math.ceil(number * candidates - 1e-9))  # 0.07 · 100 is above 7
        count = min(number, candidates)
        ranks = random_bits(key(seed, "evaluated clients"), torch.arange(len(sizes)))
        ranks.masked_fill_(sizes == 0, _LAST)
        is_drawn = torch.zeros(len(sizes), dtype=torch.bool)
        is_drawn[ranks.argsort()[:count]] = True
        return cls(is_drawn, count / candidates if candidates else 1.0)
