"""Colour skew: a different tint of the images on each client.

As in coloured MNIST (M. Arjovsky, L. Bottou, I. Gulrajani and D. Lopez-Paz, "Invariant risk
minimization", arXiv 1907.02893, section 5), but the colour depends on the client, not on the label.
"""

import torch
from torch import Tensor

from pl_fed.arguments import check_shares
from pl_fed.random import generator
from pl_fed.skews.base import Skew, require_images


class Colors(Skew):
    """Colour skew: each client multiplies each colour channel of its images by a random number.

    Images of one channel only become darker. To give them three channels first, add
    ``torchvision.transforms.v2.Grayscale(3)`` to ``data.transforms``.

    Args:
        strength: Strength of the skew, in [0, 1]. The numbers are uniform on [1 − strength, 1].

    Shape:
        inputs [samples, channels, height, width].

    Raises:
        ValueError: If ``strength`` is out of range, or inputs are not images.

    Example:
        >>> Colors(0.5).change(torch.ones(1, 3, 1, 1), client=2, num_clients=4, seed=0).flatten()
        tensor([0.9470, 0.8219, 0.9280])
    """

    def __init__(self, strength: float = 0.5) -> None:
        check_shares(strength=strength)
        self.strength = strength

    def change(self, x: Tensor, client: int, num_clients: int, seed: int) -> Tensor:
        """Return the tinted images."""
        require_images(x, self)
        tint = 1 - self.strength * torch.rand(
            x.shape[1], generator=generator(seed, "colors", client)
        )
        return x * tint.to(x)[:, None, None]
