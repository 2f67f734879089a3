"""Tilted means: between the mean, the largest and the smallest of some values.

T. Li, A. Beirami, M. Sanjabi and V. Smith. "Tilted empirical risk minimization". ICLR 2021.
arXiv 2007.01162::

    R(t; v) = (1/t) log( Σ_i p_i e^{t v_i} ),   p_i = weight_i / Σ_j weight_j

is the mean at t = 0, the largest value at t = ∞ and the smallest at t = −∞. Its gradient is the
tilted weights, p_i e^{t v_i} / Σ_j p_j e^{t v_j}. The two levels are those of B. Zhang, L. Mares De
La Cruz and B. Wang, "FedTilt: Towards Multi-Level Fairness-Preserving and Robust Federated
Learning", section III-C, footnote 3.

Exponents are taken of differences to the value that counts most, so that none overflows and none
loses digits, whatever the tilt and the size of the values. All computes in float32 at least, and
returns what it computed in.
"""

import torch
from torch import Tensor

_SMALL, _LARGE = 1e-30, 1e30  # tilts beyond are 0 and ∞: float32 could not tell
_EQUAL = 1e-9  # relative difference below which values are both the largest


def tilted_mean(values: Tensor, tilt: float, weights: Tensor | None = None, dim: int = 0) -> Tensor:
    """Return the tilted mean along a dimension.

    Args:
        values: Any shape. Those that do not count may be anything, NaN and infinity too.
        tilt: t, any number: 0, negative and infinite ones too. One that is not NaN.
        weights: How much each value counts for, at least 0; a bool mask will do. Of a shape that
            is broadcast with that of the values. All count alike by default.
        dim: The dimension.

    Returns:
        The common shape without the dimension; 0, with gradient 0, where nothing counts. Where
        several values are the largest, the gradient of a tilt of ∞ is shared among them.

    Example:
        >>> losses = torch.tensor([0.0, 1.0, 5.0])
        >>> [round(float(tilted_mean(losses, t)), 3) for t in (-torch.inf, -1.0, 0.0, 1.0, 200.0)]
        [0.0, 0.78, 2.0, 3.926, 4.995]
        >>> tilted_mean(losses, torch.inf, torch.tensor([True, True, False]))
        tensor(1.)
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    values, weights = torch.broadcast_tensors(values, weights)
    counts = weights > 0
    nothing = ~counts.any(dim, keepdim=True)  # then all count, with the value 0
    values = torch.where(counts, values, 0)
    counts, weights = counts | nothing, torch.where(nothing, 1, weights)
    shares = weights / weights.sum(dim, keepdim=True)
    if abs(tilt) < _SMALL:
        return (shares * values).sum(dim)
    if tilt > 0:
        most = torch.where(counts, values, -torch.inf).amax(dim, keepdim=True)
    else:
        most = torch.where(counts, values, torch.inf).amin(dim, keepdim=True)
    if abs(tilt) > _LARGE:
        return most.squeeze(dim)
    most = most.detach()
    exponents = tilt * torch.where(counts, values - most, 0)  # at most 0
    return most.squeeze(dim) + _log_mean_exp(exponents, shares, dim) / tilt


def _log_mean_exp(exponents: Tensor, shares: Tensor, dim: int) -> Tensor:
    """Return log Σ shares · e^exponents of exponents that are at most 0, one of them 0.

    Where all are near 0 so is the result, of which logsumexp would keep no digit.
    """
    near = (shares * exponents.clamp(min=-1).expm1()).sum(dim).log1p()
    far = (exponents + shares.log()).logsumexp(dim)
    return torch.where(exponents.detach().amin(dim) > -1, near, far)


def tilted_loss(
    losses: Tensor,
    classes: Tensor,
    num_classes: int,
    tau: float,
    lam: float,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the two-level tilted loss of samples: tilted by λ in each class, by τ over classes.

    ``R(τ, λ) = (1/τ) log( Σ_k |D_k| e^{τ R_k} / |D| )``, ``R_k = (1/λ) log( mean over D_k of
    e^{λ l} )``: classes weigh as much as they have samples, and one without samples does not count.
    With τ = λ it is the tilted mean of all samples.

    Args:
        losses: Shape [samples].
        classes: The class of each, int64 [samples].
        num_classes: How many classes there are; samples of a class beyond do not count.
        tau: τ, the tilt over classes.
        lam: λ, the tilt within a class.
        weights: How much of a sample each counts for, [samples], or a bool mask; one by default.

    Returns:
        A scalar; 0, with gradient 0, where nothing counts.

    Example:
        >>> losses, classes = torch.tensor([1.0, 3.0, 4.0, 9.0]), torch.tensor([0, 0, 1, 2])
        >>> mask = torch.tensor([True, True, True, False])
        >>> tilted_loss(losses, classes, 3, tau=torch.inf, lam=0.0, weights=mask)
        tensor(4.)
        >>> tilted_loss(losses, classes, 3, tau=0.0, lam=torch.inf, weights=mask)
        tensor(3.3333)
    """
    losses = losses.to(torch.promote_types(losses.dtype, torch.float32))
    weights = torch.ones_like(losses) if weights is None else weights.to(losses.dtype)
    members = classes[:, None] == torch.arange(num_classes, device=classes.device)
    own = torch.where(members, weights[:, None], 0)
    return tilted_mean(tilted_mean(losses[:, None], lam, own), tau, own.sum(0))


def tilted_weights(values: Tensor, tilt: float) -> Tensor:
    """Return e^{t v_i} / Σ_j e^{t v_j}, the gradient of the tilted mean.

    Args:
        values: Finite, shape [n].
        tilt: t: 0 gives equal weights; ∞ all weight to the largest value, −∞ to the smallest,
            shared out among those that equal it but for rounding.

    Returns:
        Shape [n], not negative, with the sum 1.

    Example:
        >>> tilted_weights(torch.tensor([2.0, 0.0, 2.0]), torch.inf)
        tensor([0.5000, 0.0000, 0.5000])
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    if abs(tilt) < _SMALL:
        return torch.full_like(values, 1 / max(1, len(values)))
    most = values.amax() if tilt > 0 else values.amin()
    if abs(tilt) > _LARGE:
        equal = torch.isclose(values, most, rtol=_EQUAL, atol=0).to(values.dtype)
        return equal / equal.sum()
    return (tilt * (values - most)).softmax(0)
