"""Image data sets that torchvision loads: MNIST, Fashion-MNIST and CIFAR-10."""

import os
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pl_fed.data.folders import loading_error
from pl_fed.data.source import TEST, TRAIN, Arrays, DataSource


class TorchvisionImages(DataSource):
    """Base class of data sets that torchvision reads from a folder.

    Args:
        root: The folder that torchvision calls root. ``None`` uses the environment variable
            ``PL_FED_DATA``, or ``data``.
        download: Whether to download missing files.
    """

    num_classes = 10

    def __init__(self, root: str | None = None, download: bool = False) -> None:
        self.root = root if root is not None else os.environ.get("PL_FED_DATA", "data")
        self.download = download

    @abstractmethod
    def open(self, train: bool) -> Any:
        """Return torchvision's data set of one official part."""

    @property
    @abstractmethod
    def files(self) -> str:
        """The files that torchvision needs, as the object of a sentence."""

    def load(self) -> Arrays:
        """Return the official training images (60,000 or 50,000) and the 10,000 test images."""
        try:
            parts = [self.open(train=True), self.open(train=False)]
        except Exception as error:  # broken files make torchvision raise errors of any type
            name = type(self).__name__
            raise loading_error(Path(self.root), name, self.files, self.download, error) from error
        x = torch.cat([_channels_first(torch.as_tensor(part.data)) for part in parts])
        y = torch.cat([torch.as_tensor(part.targets, dtype=torch.int64) for part in parts])
        split = torch.full((len(x),), TEST)
        split[: len(parts[0].data)] = TRAIN
        return Arrays(x, y, split=split, num_classes=self.num_classes)


class MNIST(TorchvisionImages):
    """MNIST: 70,000 handwritten digits, 28×28, grey (LeCun et al. 1998).

    Args:
        root: The folder that holds ``MNIST/raw``. ``None`` uses the environment variable
            ``PL_FED_DATA``, or ``data``.
        download: Whether to download missing files.
    """

    files = "the four idx files under MNIST/raw"

    def open(self, train: bool) -> Any:
        """Open torchvision's MNIST."""
        from torchvision import datasets  # slow to import

        return datasets.MNIST(self.root, train=train, download=self.download)


class FashionMNIST(TorchvisionImages):
    """Fashion-MNIST: 70,000 images of clothing, 28×28, grey (Xiao et al. 2017, arXiv 1708.07747).

    Args:
        root: The folder that holds ``FashionMNIST/raw``. ``None`` uses the environment variable
            ``PL_FED_DATA``, or ``data``.
        download: Whether to download missing files.
    """

    files = "the four idx files under FashionMNIST/raw"

    def open(self, train: bool) -> Any:
        """Open torchvision's FashionMNIST."""
        from torchvision import datasets  # slow to import

        return datasets.FashionMNIST(self.root, train=train, download=self.download)


class CIFAR10(TorchvisionImages):
    """CIFAR-10: 60,000 colour images, 3×32×32, in ten classes (Krizhevsky 2009).

    Args:
        root: The folder that holds ``cifar-10-batches-py``. ``None`` uses the environment variable
            ``PL_FED_DATA``, or ``data``.
        download: Whether to download missing files.
    """

    files = "the folder cifar-10-batches-py"

    def open(self, train: bool) -> Any:
        """Open torchvision's CIFAR10."""
        from torchvision import datasets  # slow to import

        return datasets.CIFAR10(self.root, train=train, download=self.download)


def _channels_first(images: Tensor) -> Tensor:
    """Convert [n, height, width(, channels)] to [n, channels, height, width]."""
    return images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
