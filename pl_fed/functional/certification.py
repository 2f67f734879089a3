"""Certified robustness of a noisy model against backdoors (CRFL).

C. Xie, M. Chen, P.-Y. Chen and B. Li, "CRFL: Certifiably Robust Federated Learning against Backdoor
Attacks", ICML 2021, arXiv 2106.08283, with the formula of the authors' code. The smoothed
classifier returns the class that most noisy copies of the final model predict.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def count_votes(predictions: Tensor, num_classes: int) -> Tensor:
    """Return the number of votes of each class for each sample.

    Args:
        predictions: The classes that the models predict, int64 [models, samples].
        num_classes: The number of classes.

    Returns:
        int64 [samples, num_classes].

    Example:
        >>> count_votes(torch.tensor([[0, 2], [0, 1], [1, 2]]), 3)
        tensor([[2, 1, 0],
                [0, 1, 2]])
    """
    classes = torch.arange(num_classes, device=predictions.device)
    return (predictions[:, :, None] == classes).sum(0)


def top_shares(votes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of votes of the first and the second class, the paper's p_A and p_B.

    Args:
        votes: [samples, classes], at least two classes and one vote.

    Returns:
        Two tensors in [0, 1], float64 [samples].

    Example:
        >>> top_shares(torch.tensor([[9, 1, 0]]))
        (tensor([0.9000], dtype=torch.float64), tensor([0.1000], dtype=torch.float64))
    """
    shares = votes.double() / votes.sum(1, keepdim=True)
    top = shares.topk(2, dim=1).values
    return top[:, 0], top[:, 1]


def confidence_bounds(top: Tensor, second: Tensor, num_models: int, error: float) -> Tensor:
    """Return a lower bound on p_A and an upper bound on p_B, by Hoeffding's inequality.

    Each bound moves by √(ln(1 / α) / (2 M)) for M models and an error probability α. It stays in
    [0, 1].

    Args:
        top: Shares of votes of the first class, [samples].
        second: Shares of votes of the second class, [samples].
        num_models: M, at least 1.
        error: α in (0, 1), the probability that a bound is wrong.

    Returns:
        [2, samples].

    Example:
        >>> confidence_bounds(torch.tensor([0.9]), torch.tensor([0.1]), 1000, 0.001)
        tensor([[0.8412],
                [0.1588]])
    """
    margin = math.sqrt(math.log(1 / error) / (2 * num_models))
    return torch.stack([top - margin, second + margin]).clamp(0, 1)


def crfl_radius(
    top: Tensor,
    second: Tensor,
    *,
    bounds: Sequence[float],
    std: float,
    final_std: float,
    attacker_shares: Sequence[float],
    scale: float,
    lr: float,
    local_steps: int,
    poisoned_share: float,
    lipschitz: float,
) -> Tensor:
    """Return CRFL's certified radius: the largest norm of a trigger that changes no prediction.

    With R attackers, round t_adv of their attack, the last round T, and Φ of the normal
    distribution::

        RAD² = −ln(1 − (√p_A − √p_B)²) σ² / (2 R τ² L² Σ p_i² γ² η² (q/n)² Π_t (2 Φ(ρ_t / σ_t) − 1))

    The product has the rounds after t_adv; σ_t is σ, and σ_T in the last one.

    Args:
        top: p_A, the share of noisy models with the first class, [samples].
        second: p_B, the share of noisy models with the second class, [samples].
        bounds: ρ_t of the rounds after the attack, the last round included.
        std: σ, the noise of the training rounds, above 0.
        final_std: σ_T, the noise of the copies of the final model, above 0.
        attacker_shares: p_i, the weights of the attackers in the mean.
        scale: γ, the attackers' factor on their updates.
        lr: η, the local learning rate.
        local_steps: τ, the attackers' local steps in the round.
        poisoned_share: q / n, the share of poisoned samples of an attacker's batch.
        lipschitz: L, the Lipschitz constant of a gradient with respect to the sample, such as
            √(2 + 2 ρ + ρ²) for multi-class logistic regression with weights of norm ρ.

    Returns:
        The radius, [samples]: 0 where p_A ≤ p_B, and infinite where all models agree.

    Example:
        >>> crfl_radius(
        ...     torch.tensor([0.9]), torch.tensor([0.1]), bounds=[10.0] * 5, std=0.01,
        ...     final_std=0.01, attacker_shares=[1 / 20] * 2, scale=100, lr=0.001, local_steps=30,
        ...     poisoned_share=5 / 100, lipschitz=17**0.5,
        ... )
        tensor([0.0817])
    """
    contraction = 1.0
    for round, bound in enumerate(bounds):
        noise = final_std if round == len(bounds) - 1 else std
        contraction *= math.erf(bound / noise / math.sqrt(2))  # 2 Φ(x) − 1
    weights = math.fsum(share**2 for share in attacker_shares)
    growth = local_steps * lipschitz * scale * lr * poisoned_share
    loss = 2 * len(attacker_shares) * weights * growth**2 * contraction
    margin = (top.sqrt() - second.sqrt()).clamp(min=0)
    return (-torch.log1p(-margin.square())).sqrt() * std / math.sqrt(loss)
