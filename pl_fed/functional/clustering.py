"""Clustering of a few points: k-means with many starts, and the number of clusters.

The gap statistic is due to R. Tibshirani, G. Walther and T. Hastie, "Estimating the number of
clusters in a data set via the gap statistic", J. R. Statist. Soc. B 63, 2001.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_NUM_STARTS = 10
_MAX_STEPS = 100
_ROUNDING = 1e-12  # share of the dispersion of one cluster below which a dispersion is rounding


def count_clusters(points: Array, largest: int, num_references: int, draw: Any) -> int:
    """Return the number of clusters by the gap statistic.

    With W_k the sum of squared distances to the k centres, and B sets of reference points, uniform
    in the box of the points::

        Gap(k) = ln(mean of W_k of the references) − ln W_k
        s_k = std(ln W_k of the references) √(1 + 1/B)

    The result is the smallest k with Gap(k) ≥ Gap(k + 1) − s_{k+1}. Departs from the paper: there
    the first term is the mean of the logarithms; FLDetector's code has the logarithm of the mean.

    Args:
        points: Shape [n, c], n at least 1.
        largest: The largest number of clusters, at least 1. At most n − 1 count.
        num_references: B, at least 1.
        draw: The random generator of NumPy.

    Example:
        >>> points = np.array([[0.0], [0.1], [0.2], [5.0], [5.1]])
        >>> count_clusters(points, 4, 10, np.random.default_rng(0))
        2
    """
    points = _rescale(points)
    low, high = points.min(0), points.max(0)
    if (low == high).all():
        return 1
    references = draw.uniform(low, high, (num_references, *points.shape))
    sets = np.concatenate([points[None], references])
    smallest, previous = 0.0, -np.inf
    largest = min(largest, len(points) - 1)
    for count in range(1, largest + 1):
        dispersions = find_clusters(sets, count, draw)[1]
        smallest = smallest or _ROUNDING * dispersions[0]
        dispersions = dispersions.clip(smallest)
        gap = np.log(dispersions[1:].mean()) - np.log(dispersions[0])
        error = np.log(dispersions[1:]).std() * np.sqrt(1 + 1 / num_references)
        if previous >= gap - error:
            return count - 1
        previous = gap
    return max(1, largest)


def find_clusters(sets: Array, count: int, draw: Any) -> tuple[Array, Array]:
    """Return k-means clusters of several sets of points, each the best of ten starts.

    Starts are those of k-means++ (Arthur and Vassilvitskii, SODA 2007).

    Args:
        sets: Sets of points, [b, n, c].
        count: The number of clusters k, from 1 to n.
        draw: The random generator of NumPy.

    Returns:
        The cluster of each point, from 0 to k − 1, [b, n], and the sum of the squared distances to
        the centres, [b].

    Example:
        >>> points = np.array([[[0.0], [0.1], [5.0]]])
        >>> labels, dispersions = find_clusters(points, 2, np.random.default_rng(0))
        >>> bool(labels[0, 0] == labels[0, 1] != labels[0, 2]), dispersions.round(3)
        (True, array([0.005]))
    """
    points = np.repeat(sets, _NUM_STARTS, axis=0)
    centres = _draw_centres(points, count, draw)
    labels = _measure_squares(points, centres).argmin(2)
    for _ in range(_MAX_STEPS):
        members = (labels[..., None] == np.arange(count)).astype(float)
        sizes = members.sum(1)[..., None]
        means = np.einsum("bnk,bnc->bkc", members, points) / sizes.clip(1)
        centres = np.where(sizes > 0, means, centres)
        distances = _measure_squares(points, centres)
        before, labels = labels, distances.argmin(2)
        if (labels == before).all():
            break
    dispersions = distances.min(2).sum(1).reshape(len(sets), _NUM_STARTS)
    best = dispersions.argmin(1)
    chosen = np.arange(len(sets)) * _NUM_STARTS + best
    return labels[chosen], dispersions.min(1)


def _draw_centres(points: Array, count: int, draw: Any) -> Array:
    """Return the first centres of k-means++, [b, k, c]."""
    sets = np.arange(len(points))
    centres: Array = points[sets, draw.integers(points.shape[1], size=len(points))][:, None]
    for _ in range(count - 1):
        total = _measure_squares(points, centres).min(2).cumsum(1)
        thresholds = draw.random((len(points), 1)) * total[:, -1:]
        drawn = (total <= thresholds).sum(1).clip(max=points.shape[1] - 1)
        centres = np.concatenate([centres, points[sets, drawn][:, None]], axis=1)
    return centres


def _measure_squares(points: Array, centres: Array) -> Array:
    """Return the squared distances of points [b, n, c] to centres [b, k, c]: [b, n, k]."""
    squares: Array = np.square(points[:, :, None] - centres[:, None]).sum(3)
    return squares


def _rescale(points: Array) -> Array:
    """Return points in float64, moved and scaled so that their box has a longest side of 1."""
    points = np.asarray(points, dtype=np.float64)
    points = points - points.min(0)
    scaled: Array = points / (points.max() or 1.0)
    return scaled
