"""Draws without replacement, in a time independent of the number of clients."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

_LARGE_FEDERATION = 10_000  # clients


def is_sparse_cohort(cohort_size: int, num_clients: int) -> bool:
    """Return whether a cohort is so small that draws of single clients are faster.

    Other cohorts need an operation on all clients. The choice changes the drawn clients, so it is
    part of the meaning of a seed.
    """
    return num_clients > _LARGE_FEDERATION and cohort_size <= num_clients // 10


def draw_distinct(count: int, draw: Callable[[int], Tensor], tries: int | None = None) -> Tensor:
    """Return the first distinct ids of a sequence of independent draws.

    Args:
        count: The number of ids.
        draw: Returns the given number of further draws, int64 [n].
        tries: The largest number of calls of ``draw``, each for ``2 * count`` draws. ``None``
            continues until there are enough ids.

    Returns:
        At most ``count`` ids, in the order of their first draw.
    """
    ids: dict[int, None] = {}
    for _ in itertools.count() if tries is None else range(tries):
        ids.update(dict.fromkeys(draw(2 * count).tolist()))
        if len(ids) >= count:
            break
    return torch.tensor(list(ids)[:count], dtype=torch.int64)
