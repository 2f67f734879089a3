"""Rotated clients.

A. Ghosh, J. Chung, D. Yin and K. Ramchandran. "An efficient framework for clustered federated
learning". NeurIPS 2020. arXiv 2006.04088: rotated MNIST, with turns of 0, 90, 180 and 270 degrees.
"""

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as images

from pl_fed.arguments import check_finite
from pl_fed.skews.base import Skew, require_images


class Rotations(Skew):
    """Turn all images of a client by one angle; the angles go round among the clients.

    Quarter turns of square images are exact; others are bilinear, and what comes in from outside is
    0, so that it is done before inputs are normalised.

    Args:
        degrees: The angles, counter-clockwise: client i has the (i mod number)-th.

    Shape:
        inputs [samples, channels, height, width].

    Raises:
        ValueError: If there is no angle, one is not finite, or inputs are no images.

    Example:
        >>> x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
        >>> Rotations().change(x, client=1, num_clients=4, seed=0)
        tensor([[[[2., 4.],
                  [1., 3.]]]])
    """

    def __init__(self, degrees: list[float] | None = None) -> None:
        self.degrees = [0.0, 90.0, 180.0, 270.0] if degrees is None else list(degrees)
        if not self.degrees:
            raise ValueError("Expected argument `degrees` to hold at least one angle but got [].")
        check_finite(**{f"degrees[{i}]": angle for i, angle in enumerate(self.degrees)})

    def change(self, x: Tensor, client: int, num_clients: int, seed: int) -> Tensor:
        """Return the turned images."""
        require_images(x, self)
        angle = self.degrees[client % len(self.degrees)]
        quarters = angle % 360 / 90
        if quarters == int(quarters) and x.shape[2] == x.shape[3]:
            return torch.rot90(x, int(quarters), (2, 3))
        bilinear = images.InterpolationMode.BILINEAR
        turned: Tensor = images.rotate(x, angle, interpolation=bilinear)
        return turned
