"""Shared parts of the nets: a check of dropout probabilities, and TensorFlow's initial weights."""

from torch import nn


def check_dropout(**arguments: float) -> None:
    """Raise ``ValueError`` unless each argument is a probability below 1."""
    for name, value in arguments.items():
        if not 0 <= value < 1:
            raise ValueError(f"Expected argument `{name}` to be in [0, 1) but got {value}.")


def initialize_as_tensorflow(net: nn.Module) -> None:
    """Set Glorot-uniform weights and zero biases in convolutions and linear layers, in place."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
