"""Noisy copies of a net, whose majority vote is a smoothed classifier."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pl_fed.nets.modes import evaluation_mode
from pl_fed.nets.rows import RowLayout, trainable_parameters
from pl_fed.random import key, normal_row


def predict_with_noise(
    net: nn.Module,
    predict: Callable[[nn.Module], Tensor],
    *,
    std: float,
    num_models: int,
    seed: int = 0,
) -> Tensor:
    """Return the predictions of noisy copies of a net, in evaluation mode.

    Each copy has independent Gaussian noise on every trainable parameter. Running statistics have
    none. The net itself does not change.

    Args:
        net: The net.
        predict: Returns the predictions of a net, of equal shapes.
        std: The standard deviation of the noise, at least 0.
        num_models: The number of copies, at least 1.
        seed: The seed of the noise.

    Returns:
        The predictions, [num_models, ...].

    Example:
        >>> net, inputs = nn.Linear(2, 3), torch.ones(5, 2)
        >>> classes = predict_with_noise(
        ...     net, lambda noisy: noisy(inputs).argmax(1), std=0.01, num_models=4
        ... )
        >>> classes.shape
        torch.Size([4, 5])
    """
    parameters = trainable_parameters(net)
    layout = RowLayout.from_parameters(net)
    exact = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    predictions: list[Any] = []
    with torch.no_grad(), evaluation_mode(net):
        try:
            for model in range(num_models):
                noise = layout.views(std * normal_row(key(seed, "noisy copy", model), layout.numel))
                for name, parameter in parameters.items():
                    parameter.copy_(exact[name] + noise[name].to(parameter))
                predictions.append(predict(net))
        finally:
            for name, parameter in parameters.items():
                parameter.copy_(exact[name])
    return torch.stack(predictions)
