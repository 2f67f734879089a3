"""Fairness measures: equal accuracy over the clients of a federation, and over the classes.

Over clients: the mean of the worst and the best tenth and the population variance, as in T. Li, M.
Sanjabi, A. Beirami and V. Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020, arXiv
1905.10497; and Jain's index, from R. Jain, D.-M. Chiu and W. Hawe, "A Quantitative Measure of
Fairness and Discrimination for Resource Allocation in Shared Computer Systems", DEC TR-301, 1984.
Over classes: the client data fairness of B. Zhang, L. Mares De La Cruz and B. Wang, "FedTilt:
Towards Multi-Level Fairness-Preserving and Robust Federated Learning", arXiv 2503.13537.
Further figures over clients, such as Gini's, are in :mod:`pl_fed.functional.inequality`.
"""

import torch
from torch import Tensor


def worst_mean(values: Tensor, percent: int = 10) -> Tensor:
    """Return the mean over the clients with the smallest values.

    Args:
        values: One value for each client, shape [clients].
        percent: Share of the clients, 1 to 100. The number of clients is rounded up.

    Raises:
        ValueError: If there is no client, or ``percent`` is out of range.

    Example:
        >>> worst_mean(torch.tensor([0.5, 0.1, 0.9, 0.3]), percent=50)
        tensor(0.2000)
    """
    worst = values.topk(_tail_size(values, percent), largest=False).values.mean()
    return torch.where(values.isnan().any(), torch.nan, worst)  # topk sorts NaN as the largest


def best_mean(values: Tensor, percent: int = 10) -> Tensor:
    """Return the mean over the clients with the largest values.

    Args:
        values: One value for each client, shape [clients].
        percent: Share of the clients, 1 to 100. The number of clients is rounded up.

    Raises:
        ValueError: If there is no client, or ``percent`` is out of range.

    Example:
        >>> best_mean(torch.tensor([0.5, 0.1, 0.9, 0.3]))
        tensor(0.9000)
    """
    return values.topk(_tail_size(values, percent)).values.mean()


def jain_index(values: Tensor) -> Tensor:
    """Return Jain's index (Σ a)² / (n Σ a²): 1 for equal values, 1/n if one client has everything.

    It is undefined, and NaN, if a value is negative, because such a value is no share of a sum, and
    if all values are 0.

    Args:
        values: One value for each client, shape [clients].

    Raises:
        ValueError: If there is no client.

    Example:
        >>> jain_index(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        tensor(0.2500)
    """
    _require_clients(values)
    largest = values.max()
    shares = values / torch.where(largest == 0, 1, largest)  # their squares do not underflow
    index = shares.sum().square() / (len(shares) * shares.square().sum())
    return torch.where((values.min() < 0) | (largest == 0), torch.nan, index)


def population_var(values: Tensor) -> Tensor:
    """Return the population variance (1/n) Σ (a − mean a)²: the clients are not a sample.

    Args:
        values: One value for each client, shape [clients].

    Raises:
        ValueError: If there is no client.

    Example:
        >>> population_var(torch.tensor([1.0, 3.0]))
        tensor(1.)
    """
    return _variance(values).to(values.dtype)


def standard_error(values: Tensor, share: float) -> Tensor:
    """Return the standard error of the mean of clients drawn without replacement.

    It is √((1 − f) s² / n) for n drawn values with the unbiased variance s², and 0 if all clients
    are drawn (W. G. Cochran, "Sampling Techniques", third edition, 1977, equation 2.20).

    Args:
        values: The values of the drawn clients, shape [clients]; NaN for fewer than two.
        share: The drawn share f of all clients, in [0, 1].

    Example:
        >>> standard_error(torch.tensor([0.0, 1.0]), share=0.5)
        tensor(0.3536)
    """
    if len(values) < 2:
        return values.new_tensor(torch.nan)
    return ((1 - share) * _variance(values) / (len(values) - 1)).sqrt().to(values.dtype)


def population_std(values: Tensor) -> Tensor:
    """Return the population standard deviation: the square root of :func:`population_var`.

    Args:
        values: One value for each client, shape [clients].

    Raises:
        ValueError: If there is no client.

    Example:
        >>> population_std(torch.tensor([1.0, 5.0]))
        tensor(2.)
    """
    return _variance(values).sqrt().to(values.dtype)


def class_std(correct: Tensor, count: Tensor) -> Tensor:
    """Return the population standard deviation of each client's accuracies over its classes.

    Classes without samples of the client do not count.

    Args:
        correct: Number of correct predictions by class, shape [clients, classes].
        count: Number of samples by class, shape [clients, classes].

    Returns:
        float64 [clients]; NaN for a client without samples.

    Example:
        >>> class_std(torch.tensor([[4, 1, 0]]), torch.tensor([[4, 2, 0]]))
        tensor([0.2500], dtype=torch.float64)
    """
    present = count > 0
    classes = present.sum(dim=1, keepdim=True)
    accuracy = correct.double() / count.clamp(min=1)
    mean = torch.where(present, accuracy, 0.0).sum(dim=1, keepdim=True) / classes
    squares = torch.where(present, (accuracy - mean).square(), 0.0).sum(dim=1)
    return (squares / classes.squeeze(1)).sqrt()


def _variance(values: Tensor) -> Tensor:
    """Return the population variance in float64: squares of large float32 numbers overflow."""
    _require_clients(values)
    return values.double().var(correction=0)


def _require_clients(values: Tensor) -> None:
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(
            "Expected argument `values` to be of shape [clients] with at least one client "
            f"but got shape {list(values.shape)}."
        )


def _tail_size(values: Tensor, percent: int) -> int:
    """Return ⌈percent · n / 100⌉ in integers; in floats, 0.07 · 100 is above 7."""
    _require_clients(values)
    if not 1 <= percent <= 100:
        raise ValueError(f"Expected argument `percent` to be in [1, 100] but got {percent}.")
    return -(-len(values) * percent // 100)
