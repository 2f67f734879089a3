"""Draws without replacement that do not look at every client."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

_MANY_CLIENTS = 10_000


def is_few_of_many(cohort_size: int, num_clients: int) -> bool:
    """Return whether a cohort is to be drawn client by client, for speed.

    Smaller federations are drawn as a whole: in which way is part of a run's seed.
    """
    return num_clients > _MANY_CLIENTS and cohort_size <= num_clients // 10


def first_distinct(count: int, draw: Callable[[int], Tensor], tries: int | None = None) -> Tensor:
    """Return the first distinct ids of a sequence of independent draws.

    Args:
        count: How many are wanted.
        draw: Gives so many more draws, int64 [n].
        tries: How often to draw ``2 * count`` more before giving up; ``None`` goes on.

    Returns:
        At most ``count`` ids, in the order in which they were drawn.
    """
    found: dict[int, None] = {}
    for _ in itertools.count() if tries is None else range(tries):
        found.update(dict.fromkeys(draw(2 * count).tolist()))
        if len(found) >= count:
            break
    return torch.tensor(list(found)[:count], dtype=torch.int64)
