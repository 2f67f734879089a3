"""A shared part of the nets: TensorFlow's initial weights."""

from torch import nn


def initialize_as_tensorflow(net: nn.Module) -> None:
    """Set Glorot-uniform weights and zero biases in convolutions and linear layers, in place."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
