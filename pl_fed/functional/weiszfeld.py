"""Weiszfeld's algorithm for the geometric median, on the products of the rows alone.

Every step gives a mean of the rows, so that its weights say all, and n × n products suffice,
however long the rows are.
"""

import torch  # noqa: F401
from torch import Tensor

_MOST_STEPS = 20_000
_STANDSTILL = 1e-12


def weiszfeld(
    products: Tensor,
    shares: Tensor,
    smoothing: float,
    num_steps: int | None = None,
    from_zero: bool = False,
) -> Tensor:
    """Return the weights with which the mean of the rows is their geometric median.

    A step is w_k ∝ α_k / max(ν, ‖z − x_k‖) with z = Σ_k w_k x_k.

    Args:
        products: The Gram matrix of the rows x_k, finite, float64 [n, n].
        shares: α_k, how much each row counts, at least 0, with sum 1, [n].
        smoothing: ν > 0, in the units of the rows' norm.
        num_steps: How many steps are made, at least 1. ``None`` goes on until no distance changes
            by more than 1e-12 of itself or of the median distance, or 20,000 times.
        from_zero: Whether z is 0 in the beginning, instead of the mean.

    Returns:
        w, at least 0, with sum 1, float64 [n].

    Example:
        >>> rows = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)
        >>> weights = weiszfeld(rows @ rows.T, torch.ones(3) / 3, smoothing=1e-6)
        >>> torch.round(weights @ rows, decimals=4)
        tensor([1.], dtype=torch.float64)
    """
    device, products = products.device, products.cpu()  # many steps, each far too small for a GPU
    shares = shares.to(products)
    around = _around_the_medoid(products, shares)
    away = products.diagonal().sqrt() if from_zero else _distances(around, shares)
    for _ in range(_MOST_STEPS if num_steps is None else num_steps):
        nearer = shares / away.clamp(min=smoothing)
        weights = nearer / nearer.sum()
        # the row that was nearest is the origin: the mean stays near it, and their distance would
        # else be a small difference of large numbers
        before, away = away, _distances(_around(around, away.argmin()), weights)
        if num_steps is None and _still(before, away, smoothing):
            break
    return weights.to(device)


def _still(before: Tensor, away: Tensor, smoothing: float) -> bool:
    """Whether no distance changes by more than a little of itself, or of the median one."""
    scale = away.clamp(min=max(smoothing, float(away.median())))
    return bool(((away - before).abs() <= _STANDSTILL * scale).all())


def _around_the_medoid(products: Tensor, shares: Tensor) -> Tensor:
    """Return the products of the rows less the one that is nearest to all, as far as they count.

    Where the geometric median is a row, it is this one, and distances to it are exact; nor do rows
    that lie far off spoil the distances between the others.
    """
    norms = products.diagonal()
    distances = (norms[:, None] + norms - 2 * products).clamp(min=0).sqrt()
    medoid = (distances @ shares).argmin()
    return _around(products, medoid)


def _around(products: Tensor, row: Tensor) -> Tensor:
    """Return the products of the rows less one of them."""
    column = products[:, row]
    return products - column[:, None] - column + column[row]


def _distances(products: Tensor, weights: Tensor) -> Tensor:
    """Return how far each row is from the mean of all with some weights, given their products."""
    along = products @ weights
    return (products.diagonal() - 2 * along + weights @ along).clamp(min=0).sqrt()
