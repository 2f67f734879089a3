"""Weiszfeld's algorithm for the geometric median, on the Gram matrix of the rows alone.

Every iterate is a weighted mean of the rows. Therefore its weights describe it fully, and n × n
products suffice for rows of any length.
"""

import torch  # noqa: F401
from torch import Tensor

_MAX_STEPS = 20_000
_TOLERANCE = 1e-12


def weiszfeld(
    products: Tensor,
    shares: Tensor,
    smoothing: float,
    num_steps: int | None = None,
    start_at_zero: bool = False,
) -> Tensor:
    """Return the weights of the rows' geometric median as a weighted mean of the rows.

    A step is w_k ∝ α_k / max(ν, ‖z − x_k‖) with z = Σ_k w_k x_k.

    Args:
        products: The Gram matrix of the rows x_k, finite, float64 [n, n].
        shares: The weights α_k in the total distance, at least 0, with sum 1, [n].
        smoothing: ν > 0, in the unit of the rows' norm.
        num_steps: The number of steps, at least 1. ``None`` continues until no distance changes by
            more than 1e-12 of itself or of the median distance, at most 20,000 times.
        start_at_zero: Whether z starts at 0, instead of the mean.

    Returns:
        The weights w, at least 0, with sum 1, float64 [n].

    Example:
        >>> rows = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)
        >>> weights = weiszfeld(rows @ rows.T, torch.ones(3) / 3, smoothing=1e-6)
        >>> torch.round(weights @ rows, decimals=4)
        tensor([1.], dtype=torch.float64)
    """
    device, products = products.device, products.cpu()  # the steps are too small for a GPU
    shares = shares.to(products)
    centred = _centre_on_medoid(products, shares)
    distances = products.diagonal().sqrt() if start_at_zero else _distances(centred, shares)
    for _ in range(_MAX_STEPS if num_steps is None else num_steps):
        closeness = shares / distances.clamp(min=smoothing)
        weights = closeness / closeness.sum()
        # The nearest row becomes the origin. The mean stays near it, and around another origin
        # their distance would be a small difference of large numbers.
        nearest = distances.argmin()
        before, distances = distances, _distances(_centre_on_row(centred, nearest), weights)
        if num_steps is None and _has_converged(before, distances, smoothing):
            break
    return weights.to(device)


def _has_converged(before: Tensor, distances: Tensor, smoothing: float) -> bool:
    """Return whether no distance changes by more than the tolerance.

    The tolerance is relative to the distance itself, or to the median distance if it is larger.
    """
    scale = distances.clamp(min=max(smoothing, float(distances.median())))
    return bool(((distances - before).abs() <= _TOLERANCE * scale).all())


def _centre_on_medoid(products: Tensor, shares: Tensor) -> Tensor:
    """Return the products of the rows minus their medoid, the row nearest to all by shares.

    If the geometric median is a row, it is the medoid, and distances to it are exact. Rows that
    are far away do not spoil the distances between the others.
    """
    norms = products.diagonal()
    distances = (norms[:, None] + norms - 2 * products).clamp(min=0).sqrt()
    medoid = (distances @ shares).argmin()
    return _centre_on_row(products, medoid)


def _centre_on_row(products: Tensor, row: Tensor) -> Tensor:
    """Return the products of the rows minus one of them."""
    column = products[:, row]
    return products - column[:, None] - column + column[row]


def _distances(products: Tensor, weights: Tensor) -> Tensor:
    """Return the distance of each row from the weighted mean of all rows, from their products."""
    along = products @ weights
    return (products.diagonal() - 2 * along + weights @ along).clamp(min=0).sqrt()
