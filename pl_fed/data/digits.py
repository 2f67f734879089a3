"""Digits: handwritten digits that come with scikit-learn."""

import torch
from sklearn.datasets import load_digits

from pl_fed.data.source import Arrays, DataSource


class Digits(DataSource):
    """Handwritten digits: 1,797 images of 8×8 pixels in 10 classes, without a download.

    The test part of UCI's "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998),
    read from scikit-learn. Pixels are scaled to [0, 1].

    Example:
        >>> arrays = Digits().load()
        >>> arrays.inputs.shape, arrays.num_classes
        (torch.Size([1797, 1, 8, 8]), 10)
    """

    preparation = "pixels divided by 16"

    def load(self) -> Arrays:
        """Return images [1797, 1, 8, 8] in [0, 1] and labels."""
        bunch = load_digits()
        x = torch.from_numpy(bunch.images).to(torch.float32).unsqueeze(1) / 16
        return Arrays(x, torch.from_numpy(bunch.target).to(torch.int64), num_classes=10)
