"""Noisy copies of a net, whose majority vote is a smoothed classifier."""

from collections.abc import Generator

import torch
from torch import nn

from pl_fed.nets.modes import evaluation_mode
from pl_fed.nets.rows import RowLayout, trainable_parameters
from pl_fed.random import key, normal_row


def noisy_copies(
    net: nn.Module, *, std: float, num_models: int, seed: int = 0
) -> Generator[nn.Module]:
    """Yield noisy copies of a net, one after the other, in evaluation mode and without gradients.

    Each copy has independent Gaussian noise on every trainable parameter. Running statistics have
    none. All copies are the net itself, which has its own parameters again after the last one, and
    when the generator is closed.

    Args:
        net: The net.
        std: The standard deviation of the noise, at least 0.
        num_models: The number of copies, at least 1.
        seed: The seed of the noise.

    Example:
        >>> net, inputs = nn.Linear(2, 3), torch.ones(5, 2)
        >>> classes = [copy(inputs).argmax(1) for copy in noisy_copies(net, std=0.01, num_models=4)]
        >>> len(classes)
        4
    """
    parameters = trainable_parameters(net)
    layout = RowLayout.from_parameters(net)
    exact = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad(), evaluation_mode(net):
        try:
            for model in range(num_models):
                noise = layout.views(std * normal_row(key(seed, "noisy copy", model), layout.numel))
                for name, parameter in parameters.items():
                    parameter.copy_(exact[name] + noise[name].to(parameter))
                yield net
        finally:
            for name, parameter in parameters.items():
                parameter.copy_(exact[name])
