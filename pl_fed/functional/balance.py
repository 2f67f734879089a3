"""Distribution of work over processes."""

import torch
from torch import Tensor

_SLACK = 1.02  # work moves only if the largest load exceeds the mean load by this factor


def balance_work(work: Tensor, homes: Tensor, parts: int) -> Tensor:
    """Distribute pieces of work over parts; each piece stays in its home part if that is fair.

    All pieces start in their home parts. As long as it reduces the largest load, one piece moves
    from the busiest part to the idlest part. Its work is the nearest to half the difference of the
    two loads; among equals, the first piece moves.

    Args:
        work: The duration of each piece, in any unit, [n].
        homes: The home part of each piece, int64 [n].
        parts: Number of parts.

    Returns:
        The part that does each piece, int64 [n].

    Example:
        >>> balance_work(torch.tensor([1, 1, 2, 4]), torch.tensor([0, 0, 0, 0]), parts=2)
        tensor([0, 0, 0, 1])
    """
    owners, work = homes.clone(), work.double()
    load = torch.zeros(parts, dtype=torch.float64).index_add_(0, owners, work)
    tolerated = _SLACK * load.mean()
    while len(work):
        busiest, idlest = int(load.argmax()), int(load.argmin())
        gap = load[busiest] - load[idlest]
        movable = (owners == busiest) & (work > 0) & (work < gap)
        if load[busiest] <= tolerated or not movable.any():
            break
        deviation = (work - gap / 2).abs().masked_fill(~movable, torch.inf)
        piece = int(deviation.argmin())
        owners[piece] = idlest
        load[busiest] -= work[piece]
        load[idlest] += work[piece]
    return owners
