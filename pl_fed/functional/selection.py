"""Selection of rows: by value, by their neighbours, by linkage, or as a set of small diameter.

All functions work on one number for each row or each pair of rows, in float64. The aggregators
compute these numbers from the rows.
"""

from bisect import bisect_left
from typing import Any

import numpy as np
import torch
from torch import Tensor

TIE = 1e-9  # the relative difference of equal numbers, above rounding


def ascending_order(values: Tensor, clients: Tensor) -> Tensor:
    """Return the order that sorts values; among equal values, the smallest client id comes first.

    Args:
        values: One value for each client, [n].
        clients: The ids of the clients, int64 [n].

    Returns:
        Positions, int64 [n].

    Example:
        >>> ascending_order(torch.tensor([2.0, 1.0, 1.0]), torch.tensor([0, 8, 3]))
        tensor([2, 1, 0])
    """
    by_client = clients.to(values.device).argsort(stable=True)
    return by_client[values[by_client].argsort(stable=True)]


def join_ties(values: Tensor, tolerance: float = TIE) -> Tensor:
    """Return numbers with one value, the smallest, for all that differ by rounding only.

    Neighbours in sorted order belong together if their relative difference is small.

    Args:
        values: At least 0, any shape.
        tolerance: The largest relative difference of neighbours that are equal.

    Example:
        >>> join_ties(torch.tensor([0.1 + 0.2, 1.0, 0.3], dtype=torch.float64)).tolist()
        [0.3, 1.0, 0.3]
    """
    ordered, order = values.flatten().sort(stable=True)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ~(ordered.diff() <= tolerance * ordered[:-1])
    positions = torch.arange(len(ordered), device=ordered.device)
    joined = torch.empty_like(ordered)
    joined[order] = ordered[torch.where(begins, positions, 0).cummax(0).values]
    return joined.view_as(values)


def complement_mask(positions: Tensor, num_rows: int) -> Tensor:
    """Return a mask of the rows that are not at these positions, bool [num_rows].

    Args:
        positions: Positions of rows, int64 [m].
        num_rows: The number of rows.

    Example:
        >>> complement_mask(torch.tensor([2, 0]), 4)
        tensor([False,  True, False,  True])
    """
    mask = torch.ones(num_rows, dtype=torch.bool, device=positions.device)
    mask[positions] = False
    return mask


def krum_scores(distances: Tensor, num_neighbours: int) -> Tensor:
    """Return Krum's score of each row: the sum of the distances to its nearest neighbours.

    Args:
        distances: Squared or not, with 0 on the diagonal, [n, n].
        num_neighbours: The number of neighbours in the sum, from 0 to n − 1.

    Returns:
        Shape [n].

    Example:
        >>> krum_scores(torch.tensor([[0.0, 1.0, 4.0], [1.0, 0.0, 9.0], [4.0, 9.0, 0.0]]), 1)
        tensor([1., 1., 4.])
    """
    return distances.sort(dim=1).values[:, 1 : 1 + num_neighbours].sum(1)


def select_by_krum(distances: Tensor, num_byzantine: int, count: int) -> Tensor:
    """Return the rows that repeated Krum selects, one after the other, without replacement.

    With r rows left, Krum uses r − f − 2 neighbours, and at least one. Among scores that are equal
    but for rounding, it selects the first row.

    Args:
        distances: Squared distances, with 0 on the diagonal, [n, n].
        num_byzantine: Krum's f.
        count: The number of rows to select.

    Returns:
        Positions in ascending order, int64 [count].

    Example:
        >>> rows = torch.tensor([0.0, 1.0, 2.0, 3.0, 50.0])
        >>> select_by_krum((rows[:, None] - rows).square(), num_byzantine=1, count=3)
        tensor([0, 1, 2])
    """
    n = len(distances)
    nearest, order = distances.sort(dim=1)
    rows = torch.arange(n, device=order.device)
    remaining = torch.ones_like(rows, dtype=torch.bool)
    candidates = order != rows[:, None]  # in row i: the remaining rows by distance, without i
    for num_remaining in range(n, n - count, -1):
        num_neighbours = max(1, num_remaining - num_byzantine - 2)
        neighbours = candidates & (candidates.cumsum(1) <= num_neighbours)
        scores = torch.where(neighbours, nearest, 0).sum(1)
        scores.clamp_(max=torch.finfo(scores.dtype).max)
        best = torch.where(remaining, join_ties(scores), torch.inf).argmin()
        remaining &= rows != best
        candidates &= order != best
    return (~remaining).nonzero().flatten()


def majority_component(distances: Tensor) -> Tensor:
    """Return the smallest component of single linkage with more than half of the rows.

    Let τ be the smallest distance such that the graph of all pairs at most τ apart has a connected
    component of more than n / 2 rows. The function returns this component. It equals the cluster of
    HDBSCAN with a minimum cluster size of n // 2 + 1, with the distances themselves as mutual
    reachability, and with a single cluster allowed.

    Args:
        distances: Symmetric, without NaN, [n, n].

    Returns:
        A mask of the rows, bool [n].

    Example:
        >>> rows = torch.tensor([0.0, 1.0, 2.5, 7.0, 8.0])
        >>> majority_component((rows[:, None] - rows).abs())
        tensor([ True,  True,  True, False, False])
    """
    component = np.arange(len(distances))
    edges = sorted(_find_spanning_edges(distances.cpu().numpy()))
    for edge, next_edge in zip(edges, [*edges[1:], None]):
        length, first, second = edge
        component[component == component[second]] = component[first]
        is_last_of_length = next_edge is None or next_edge[0] > length
        if is_last_of_length and 2 * np.bincount(component).max() > len(component):
            break
    is_member = component == np.bincount(component).argmax()
    return torch.from_numpy(is_member).to(distances.device)


def _find_spanning_edges(distances: np.ndarray[Any, Any]) -> list[tuple[float, int, int]]:
    """Return the edges of a minimum spanning tree as (length, row, row), by Prim's algorithm."""
    n, newest, edges = len(distances), 0, []
    outside, nearest, reach = np.ones(n, bool), np.zeros(n, int), np.full(n, np.inf)
    for _ in range(n - 1):
        outside[newest] = False
        closer = outside & (distances[newest] < reach)
        reach[closer], nearest[closer] = distances[newest][closer], newest
        candidates = outside.nonzero()[0]
        newest = int(candidates[reach[candidates].argmin()])
        edges.append((float(reach[newest]), int(nearest[newest]), newest))
    return edges


def closest_set(distances: Tensor, num_excluded: int) -> Tensor:
    """Return the set of rows with the smallest diameter, the largest distance between two rows.

    Among sets of equal diameter, the first in lexicographic order wins. The search takes about a
    dozen times 2^``num_excluded`` steps.

    Args:
        distances: Squared or not, symmetric, with 0 on the diagonal, [n, n].
        num_excluded: The number of rows outside the set, below n.

    Returns:
        Positions in ascending order, int64 [n − num_excluded].

    Example:
        >>> rows = torch.tensor([0.0, 1.0, 5.0, 7.0])
        >>> closest_set((rows[:, None] - rows).abs(), num_excluded=2)
        tensor([0, 1])
    """
    n, matrix = len(distances), distances.tolist()
    diameters = sorted({distance for row in matrix for distance in row})

    def exclude_beyond(diameter: float) -> int | None:
        """Return rows to exclude, as bits, so that the others have at most this diameter."""
        far = [sum(1 << k for k in range(n) if row[k] > diameter) for row in matrix]
        return _find_exclusions(far, row=0, excluded=0, budget=num_excluded)

    smallest = bisect_left(
        diameters, True, key=lambda diameter: exclude_beyond(diameter) is not None
    )
    excluded = exclude_beyond(diameters[smallest]) or 0
    members = [row for row in range(n) if not excluded >> row & 1]
    return torch.tensor(members[: n - num_excluded], device=distances.device)


def _find_exclusions(far: list[int], row: int, excluded: int, budget: int) -> int | None:
    """Return the rows to exclude, as bits, so that no two remaining rows are far apart.

    A row excludes all rows that are far from it, or is excluded itself. The search prefers to
    keep the row.

    Args:
        far: For each row, the rows that are far from it, as bits.
        row: The first undecided row.
        excluded: The rows that are excluded so far, as bits.
        budget: The number of rows that may still be excluded.

    Returns:
        The excluded rows as bits, or ``None`` if the budget is too small.
    """
    while row < len(far) and (excluded >> row & 1 or not far[row] & ~excluded):
        row += 1
    if row == len(far):
        return excluded
    conflicts = far[row] & ~excluded
    result, num_conflicts = None, conflicts.bit_count()
    if num_conflicts <= budget:
        result = _find_exclusions(far, row + 1, excluded | conflicts, budget - num_conflicts)
    if result is None and budget:
        result = _find_exclusions(far, row + 1, excluded | 1 << row, budget - 1)
    return result
