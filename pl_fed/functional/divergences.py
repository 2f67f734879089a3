"""How far a model is from another in what it does: Fisher information, and divergences of outputs.

J. Kirkpatrick et al. "Overcoming catastrophic forgetting in neural networks". PNAS 2017. arXiv
1612.00796 (the diagonal of the Fisher information as weights of squared distances).
H. Jiang et al. "SMART: Robust and efficient fine-tuning for pre-trained natural language models
through principled regularized optimization". ACL 2020. arXiv 1911.03437 (the symmetrized
Kullback-Leibler divergence of predictions).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pl_fed.functional.losses import masked_mean

Parameters = Mapping[str, Tensor]


def diagonal_fisher(
    sample_loss: Callable[[Parameters, Tensor, Tensor], Tensor],
    parameters: Parameters,
    x: Tensor,
    y: Tensor,
    mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the diagonal of the empirical Fisher information: mean over samples of (∂ℓ_i/∂w_j)².

    Args:
        sample_loss: The loss of ONE sample, given parameters, its input and its target.
        parameters: Where it is differentiated, by name.
        x: Inputs [batch, ...].
        y: Targets [batch, ...].
        mask: Which samples count, bool [batch]; ``None`` for all.

    Returns:
        Tensors of the parameters' shapes, by name; 0 where no sample counts.

    Example:
        >>> def half_square(at, x, y):
        ...     return (at["w"] * x - y).square() / 2
        >>> at = {"w": torch.tensor(1.0)}
        >>> diagonal_fisher(half_square, at, torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
        {'w': tensor(8.5000)}
    """

    def gradient(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = torch.func.grad(sample_loss)(dict(parameters), x, y)
        return found

    counts = torch.ones(len(x), dtype=torch.bool, device=x.device) if mask is None else mask
    number = counts.sum().clamp(min=1)
    fisher = {}
    for name, each in torch.vmap(gradient)(x, y).items():
        counted = counts.view(-1, *([1] * (each.dim() - 1)))
        fisher[name] = torch.where(counted, each.square(), 0).sum(0) / number
    return fisher


def weighted_squared_distance(one: Parameters, other: Parameters, weights: Parameters) -> Tensor:
    """Return Σ_j weight_j (a_j − c_j)² over all tensors of a model.

    Example:
        >>> w = {"w": torch.tensor([1.0, 2.0])}
        >>> weighted_squared_distance(w, {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 0.5])})
        tensor(5.)
    """
    parts = [(weights[name] * (one[name] - other[name]).square()).sum() for name in one]
    return torch.stack(parts).sum()


def symmetrized_divergence(logits: Tensor, others: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean over samples of KL(p ‖ q) + KL(q ‖ p) = Σ_c (p_c − q_c) (log p_c − log q_c).

    Args:
        logits: Those of p, shape [batch, classes].
        others: Those of q, likewise.
        mask: Which samples count, bool [batch]; ``None`` for all.

    Example:
        >>> one, other = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0]])
        >>> symmetrized_divergence(one, other)
        tensor(0.)
    """
    p, q = logits.log_softmax(1), others.log_softmax(1)
    return masked_mean(((p.exp() - q.exp()) * (p - q)).sum(1), mask)
