"""Digits: handwritten digits that come with scikit-learn."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

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
        pixels, target = _read_digits()
        x = torch.from_numpy(pixels).to(torch.float32).reshape(-1, 1, 8, 8) / 16
        return Arrays(x, torch.from_numpy(target).to(torch.int64), num_classes=10)


def _read_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return pixels [1797, 64] and digits [1797].

    The file is read without an import of scikit-learn, which takes more than a second.
    """
    package = find_spec("sklearn")
    file = Path(str(package and package.origin)).parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        table = np.loadtxt(file, delimiter=",")
        return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits  # of a release with other files

    bunch = load_digits()
    return bunch.data, bunch.target
