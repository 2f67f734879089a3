"""Distances between the functions of two models: Fisher information and output divergences.

J. Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017, arXiv
1612.00796 (the diagonal of the Fisher information as weights of squared distances).
H. Jiang et al., "SMART: Robust and efficient fine-tuning for pre-trained natural language models
through principled regularized optimization", ACL 2020, arXiv 1911.03437 (the symmetrized
Kullback-Leibler divergence of predictions).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pl_fed.functional.losses import masked_mean

Parameters = Mapping[str, Tensor]
_MIN_LOG = -1e30  # replaces the logarithm of a probability of 0


def diagonal_fisher(
    sample_loss: Callable[[Parameters, Tensor, Tensor], Tensor],
    parameters: Parameters,
    x: Tensor,
    y: Tensor,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the diagonal of the empirical Fisher information: mean over samples of (∂ℓ_i/∂w_j)².

    Args:
        sample_loss: The loss of ONE sample as a function of parameters, its input and its target.
        parameters: The point of differentiation, as tensors by name.
        x: Inputs [batch, ...].
        y: Targets [batch, ...].
        mask: Samples that enter the mean, bool [batch]; ``None`` selects all.
        weights: The weight of each sample, [batch]; 1 by default. The losses already contain their
            weights.

    Returns:
        Tensors of the parameters' shapes, by name; 0 if no sample has a weight.

    Example:
        >>> def half_square(at, x, y):
        ...     return (at["w"] * x - y).square() / 2
        >>> at = {"w": torch.tensor(1.0)}
        >>> diagonal_fisher(half_square, at, torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
        {'w': tensor(8.5000)}
    """

    def gradient(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the gradient of one sample's loss."""
        gradients: dict[str, Tensor] = torch.func.grad(sample_loss)(dict(parameters), x, y)
        return gradients

    counts = torch.ones(len(x), dtype=torch.bool, device=x.device) if mask is None else mask
    weights = counts.to(torch.get_default_dtype()) if weights is None else weights
    counts = counts & (weights > 0)
    divisor, total = torch.where(counts, weights, 1), torch.where(counts, weights, 0).sum()
    fisher = {}
    for name, gradients in torch.vmap(gradient)(x, y).items():
        shape = (-1, *([1] * (gradients.dim() - 1)))
        scaled = gradients.square() / divisor.view(shape)
        squares = torch.where(counts.view(shape), scaled, 0).sum(0)
        fisher[name] = squares / torch.where(total == 0, 1, total)
    return fisher


def weighted_squared_distance(
    parameters: Parameters, centre: Parameters, weights: Parameters
) -> Tensor:
    """Return Σ_j weight_j (a_j − c_j)², summed over all tensors of a model.

    Args:
        parameters: The tensors a by name.
        centre: The tensors c by name.
        weights: The weight of each number, by name.

    Example:
        >>> w = {"w": torch.tensor([1.0, 2.0])}
        >>> weighted_squared_distance(w, {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 0.5])})
        tensor(5.)
    """
    parts = [
        (weights[name] * (tensor - centre[name]).square()).sum()
        for name, tensor in parameters.items()
    ]
    return torch.stack(parts).sum()


def symmetrized_divergence(logits: Tensor, others: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean over samples of KL(p ‖ q) + KL(q ‖ p) = Σ_c (p_c − q_c) (log p_c − log q_c).

    Args:
        logits: The logits of p, shape [batch, classes, ...]; the mean includes further dimensions.
        others: The logits of q, in the shape of ``logits``.
        mask: Samples that enter the mean, bool [batch]; ``None`` selects all.

    Example:
        >>> first, second = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0]])
        >>> symmetrized_divergence(first, second)
        tensor(0.)
    """
    wide = torch.promote_types(logits.dtype, torch.float32)  # narrow types lose small differences
    p, q = (values.to(wide).log_softmax(1).clamp(min=_MIN_LOG) for values in (logits, others))
    divergences = ((p.exp() - q.exp()) * (p - q)).sum(1)
    if divergences.dim() > 1:
        divergences = divergences.flatten(1).mean(1)
    return masked_mean(divergences, mask)
