"""Tilted means: values between the mean, the largest and the smallest of some values.

T. Li, A. Beirami, M. Sanjabi and V. Smith, "Tilted Empirical Risk Minimization", ICLR 2021, arXiv
2007.01162::

    R(t; v) = (1/t) log( Σ_i p_i e^{t v_i} ),   p_i = weight_i / Σ_j weight_j

R is the mean at t = 0, the largest value at t = ∞ and the smallest value at t = −∞. Its gradient is
the tilted weights, p_i e^{t v_i} / Σ_j p_j e^{t v_j}. The two-level loss is from B. Zhang, L. Mares
De La Cruz and B. Wang, "FedTilt: Towards Multi-Level Fairness-Preserving and Robust Federated
Learning", arXiv 2503.13537, section III-C, footnote 3.

The exponents are differences to the dominant value. Therefore nothing overflows or loses digits,
for any tilt and any size of the values. All functions compute in float32 or wider, and return the
type of the computation.
"""

import torch
from torch import Tensor

_SMALL, _LARGE = 1e-30, 1e30  # in float32, tilts beyond these bounds act as 0 and ∞
_EQUAL = 1e-9  # values with a smaller relative difference share the maximum


def tilted_mean(values: Tensor, tilt: float, weights: Tensor | None = None, dim: int = 0) -> Tensor:
    """Return the tilted mean along a dimension.

    Args:
        values: Any shape. Values of weight 0 may be NaN or infinite.
        tilt: t, any number except NaN: 0, negative and infinite tilts are valid.
        weights: The weight of each value, at least 0, or a bool mask; all equal by default. The
            shape broadcasts with the shape of the values.
        dim: The dimension.

    Returns:
        The broadcast shape without the dimension. If all weights are 0, the result and its gradient
        are 0. If several values share the maximum, they share the gradient of a tilt of ∞.

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
    is_empty = ~counts.any(dim, keepdim=True)  # without weights, all values count as 0
    values = torch.where(counts, values, 0)
    counts, weights = counts | is_empty, torch.where(is_empty, 1, weights)
    shares = weights / weights.sum(dim, keepdim=True)
    if abs(tilt) < _SMALL:
        return (shares * values).sum(dim)
    if tilt > 0:
        extreme = torch.where(counts, values, -torch.inf).amax(dim, keepdim=True)
    else:
        extreme = torch.where(counts, values, torch.inf).amin(dim, keepdim=True)
    if abs(tilt) > _LARGE:
        return extreme.squeeze(dim)
    extreme = extreme.detach()
    exponents = tilt * torch.where(counts, values - extreme, 0)  # at most 0
    return extreme.squeeze(dim) + _log_mean_exp(exponents, shares, dim) / tilt


def _log_mean_exp(exponents: Tensor, shares: Tensor, dim: int) -> Tensor:
    """Return log Σ shares · e^exponents, for exponents of at most 0 with a maximum of 0.

    If all exponents are near 0, so is the result, and logsumexp alone would keep no digit of it.
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
    """Return FedTilt's two-level tilted loss: tilted by λ within each class, by τ over classes.

    ``R(τ, λ) = (1/τ) log( Σ_k |D_k| e^{τ R_k} / |D| )``, ``R_k = (1/λ) log( mean over D_k of e^{λ
    l} )``. The weight of a class is its number of samples; a class without samples has no weight.
    For τ = λ, the result is the tilted mean of all samples.

    Args:
        losses: The losses of the samples, shape [samples].
        classes: The classes of the samples, int64 [samples].
        num_classes: Number of classes; samples of classes beyond this number do not count.
        tau: τ, the tilt over classes.
        lam: λ, the tilt within a class.
        weights: The weight of each sample, [samples], or a bool mask; 1 by default.

    Returns:
        A scalar. If all weights are 0, the result and its gradient are 0.

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
    class_weights = torch.where(members, weights[:, None], 0)
    class_losses = tilted_mean(losses[:, None], lam, class_weights)
    return tilted_mean(class_losses, tau, class_weights.sum(0))


def tilted_weights(values: Tensor, tilt: float) -> Tensor:
    """Return the tilted weights e^{t v_i} / Σ_j e^{t v_j}, the gradient of the tilted mean.

    Args:
        values: Finite, shape [n].
        tilt: t. 0 gives equal weights. ∞ gives all weight to the largest value, −∞ to the smallest;
            values that equal it up to rounding share the weight.

    Returns:
        Shape [n], at least 0, with sum 1.

    Example:
        >>> tilted_weights(torch.tensor([2.0, 0.0, 2.0]), torch.inf)
        tensor([0.5000, 0.0000, 0.5000])
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    if abs(tilt) < _SMALL:
        return torch.full_like(values, 1 / max(1, len(values)))
    extreme = values.amax() if tilt > 0 else values.amin()
    if abs(tilt) > _LARGE:
        is_extreme = torch.isclose(values, extreme, rtol=_EQUAL, atol=0).to(values.dtype)
        return is_extreme / is_extreme.sum()
    return (tilt * (values - extreme)).softmax(0)
