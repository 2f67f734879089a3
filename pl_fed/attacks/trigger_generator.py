"""Generators of triggers: small autoencoders from inputs to changes of inputs."""

from itertools import pairwise

import torch
from torch import Tensor, nn

_CHANNELS = (16, 32, 64, 128)
_FACTOR = 2 ** len(_CHANNELS)  # by which the convolutions shrink an image


class TriggerGenerator(nn.Module):
    """Trigger generator: an autoencoder with outputs in (−1, 1) of the shape of its inputs.

    For images, four convolutions with kernels of 4 and strides of 2 lead to 16, 32, 64 and 128
    channels, and four transposed ones back. Images are padded with zeros to multiples of 16 pixels.
    For other inputs, linear layers lead from all numbers of a sample to 128 and 64 numbers, and
    back. Each normalisation is over one sample, so that no output depends on other samples.

    Args:
        shape: Shape of one sample: [channels, height, width] for images, or any other.

    Shape:
        - input: one sample of ``shape`` for each row, [batch, ...].
        - output: as the input.

    Example:
        >>> TriggerGenerator(torch.Size([3, 28, 28]))(torch.zeros(2, 3, 28, 28)).shape
        torch.Size([2, 3, 28, 28])
    """

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.is_image = len(shape) == 3
        if self.is_image:
            self.layers = _build_convolutions(shape[0])
        else:
            numel = shape.numel()
            self.layers = nn.Sequential(
                *(nn.Linear(numel, 128), nn.LayerNorm(128), nn.ReLU()),
                *(nn.Linear(128, 64), nn.LayerNorm(64), nn.ReLU()),
                *(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU()),
                *(nn.Linear(128, numel), nn.Tanh()),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return a change for each sample, in (−1, 1)."""
        if not self.is_image:
            change: Tensor = self.layers(x.flatten(1))
            return change.view_as(x)
        height, width = x.shape[-2:]
        padded = nn.functional.pad(x, (0, -width % _FACTOR, 0, -height % _FACTOR))
        output: Tensor = self.layers(padded)
        return output[..., :height, :width]


def _build_convolutions(channels: int) -> nn.Sequential:
    """Return the convolutional autoencoder for images with some channels."""
    sizes = (channels, *_CHANNELS)
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Conv2d(before, after, 4, 2, 1), nn.GroupNorm(1, after), nn.ReLU()]
    for before, after in pairwise(sizes[:0:-1]):
        layers += [nn.ConvTranspose2d(before, after, 4, 2, 1), nn.GroupNorm(1, after), nn.ReLU()]
    layers += [nn.ConvTranspose2d(sizes[1], channels, 4, 2, 1), nn.Tanh()]
    return nn.Sequential(*layers)
