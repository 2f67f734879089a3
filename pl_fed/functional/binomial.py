"""The binomial distribution."""

import math

import torch
from torch import Tensor


def binomial_probabilities(trials: int, probability: float) -> Tensor:
    """Return the binomial distribution, float64 [trials + 1].

    Args:
        trials: The number of trials.
        probability: The probability of a success, in (0, 1].

    Example:
        >>> binomial_probabilities(2, 0.5)
        tensor([0.2500, 0.5000, 0.2500], dtype=torch.float64)
    """
    successes = torch.arange(trials + 1, dtype=torch.float64)
    if probability == 1:
        return (successes == trials).double()
    orders = torch.lgamma(torch.tensor(trials + 1.0, dtype=torch.float64))
    orders = orders - torch.lgamma(successes + 1) - torch.lgamma(trials - successes + 1)
    logs = successes * math.log(probability) + (trials - successes) * math.log1p(-probability)
    return (orders + logs).exp()
