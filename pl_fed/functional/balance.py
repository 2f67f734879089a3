"""Sharing out work."""

import torch
from torch import Tensor

_SLACK = 1.02  # what the busiest may do beyond the average before anything is moved


def balanced(work: Tensor, homes: Tensor, parts: int) -> Tensor:
    """Share pieces of work out over parts, each at its home where that is fair.

    All begin at home. As long as it makes the busiest part less busy, a piece moves from there to
    the idlest part: the one that comes nearest to half the difference, the first of equals.

    Args:
        work: How long each piece takes, in any unit, [n].
        homes: The part in which each would be at home, int64 [n].
        parts: Number of parts.

    Returns:
        The part that does each piece, int64 [n].

    Example:
        >>> balanced(torch.tensor([1, 1, 2, 4]), torch.tensor([0, 0, 0, 0]), parts=2)
        tensor([0, 0, 0, 1])
    """
    owners, work = homes.clone(), work.double()
    load = torch.zeros(parts, dtype=torch.float64).index_add_(0, owners, work)
    enough = _SLACK * load.mean()
    while len(work):
        busiest, idlest = int(load.argmax()), int(load.argmin())
        gap = load[busiest] - load[idlest]
        movable = (owners == busiest) & (work > 0) & (work < gap)
        if load[busiest] <= enough or not movable.any():
            break
        missed = (work - gap / 2).abs().masked_fill(~movable, torch.inf)
        moved = int(missed.argmin())
        owners[moved] = idlest
        load[busiest] -= work[moved]
        load[idlest] += work[moved]
    return owners
