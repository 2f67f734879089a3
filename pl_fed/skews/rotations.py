"""Rotation skew: a different angle of the images on each client.

A. Ghosh, J. Chung, D. Yin and K. Ramchandran. "An efficient framework for clustered federated
learning". NeurIPS 2020. arXiv 2006.04088: rotated MNIST, with angles of 0, 90, 180 and 270 degrees.
"""

import torch
from torch import Tensor

from pl_fed.arguments import check_finite
from pl_fed.skews.base import Skew, require_images


class Rotations(Skew):
    """Rotation skew: all images of a client are rotated by the same angle.

    Rotations of square images by multiples of 90 degrees are exact. Other rotations interpolate
    bilinearly, and fill pixels from outside the image with 0. The rotation therefore precedes the
    normalisation.

    Args:
        degrees: The angles, counter-clockwise; client i has ``degrees[i % len(degrees)]``.
            ``None`` for 0, 90, 180 and 270.

    Shape:
        inputs [samples, channels, height, width].

    Raises:
        ValueError: If ``degrees`` is empty or not finite, or inputs are not images.

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
        """Return the rotated images."""
        require_images(x, self)
        angle = self.degrees[client % len(self.degrees)]
        quarter_turns = angle % 360 / 90
        if quarter_turns == int(quarter_turns) and x.shape[2] == x.shape[3]:
            return torch.rot90(x, int(quarter_turns), (2, 3))
        from torchvision.transforms.v2 import functional as images  # slow to import

        bilinear = images.InterpolationMode.BILINEAR
        rotated: Tensor = images.rotate(x, angle, interpolation=bilinear)
        return rotated
