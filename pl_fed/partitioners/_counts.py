"""Samples of the clients from a table of sample counts [classes, clients].

A split by labels is determined by such a table and a random generator. The partitioners differ in
their tables only, and share the functions of this module.
"""

import torch
from torch import Tensor


def class_indices(labels: Tensor, classes: Tensor) -> list[Tensor]:
    """Return the indices of each class's samples, in the order of the data set."""
    return [(labels == label).nonzero().flatten() for label in classes]


def apportion(total: int, weights: Tensor, generator: torch.Generator) -> Tensor:
    """Distribute ``total`` over clients in proportion to ``weights``, by largest remainders.

    Args:
        total: The number to distribute, >= 0.
        weights: Real numbers >= 0, not all zero, [clients]. A client with weight 0 gets nothing.
        generator: Breaks ties, so that the position of a client does not matter.

    Returns:
        int64 [clients] with the sum ``total``. It differs from the exact shares by less than 1.

    Example:
        >>> apportion(7, torch.tensor([2.0, 1.0, 0.0]), torch.Generator())
        tensor([5, 2, 0])
    """
    weights = weights.to(torch.float64)
    quotas = total * (weights / weights.sum())
    counts = quotas.floor().to(torch.int64)
    order = torch.randperm(len(weights), generator=generator)
    order = order[(quotas - counts)[order].argsort(descending=True, stable=True)]
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def draw(pools: list[Tensor], counts: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Draw samples of each class for each client; clients may share samples.

    Args:
        pools: The indices of each class's samples.
        counts: Numbers of samples, int64 [classes, clients], each at most the size of the class.
        generator: Draws each client's samples, without replacement.

    Returns:
        One ascending int64 index tensor per client.
    """
    return [
        torch.cat(
            [
                pool[torch.randperm(len(pool), generator=generator)[:count]]
                for pool, count in zip(pools, client_counts)
            ]
        )
        .sort()
        .values
        for client_counts in counts.T.tolist()
    ]


def deal(pools: list[Tensor], counts: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Distribute the samples of each class over the clients at random; all sets are disjoint.

    Args:
        pools: The indices of each class's samples.
        counts: Numbers of samples, int64 [classes, clients]; row c sums to ``len(pools[c])``.
        generator: Assigns the samples of a class to clients.

    Returns:
        One ascending int64 index tensor per client.
    """
    pieces = [
        pool[torch.randperm(len(pool), generator=generator)].split(row)
        for pool, row in zip(pools, counts.tolist(), strict=True)
    ]
    return [torch.cat(client_pieces).sort().values for client_pieces in zip(*pieces, strict=True)]
