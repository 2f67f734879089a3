"""A random part of Fashion-MNIST."""

import torch
from torch import Tensor

from pl_fed.data import Arrays, DataSource, FashionMNIST


class Subset(DataSource):
    """Random samples of Fashion-MNIST, of both its official parts.

    Args:
        samples: The number of samples.
        seed: Seed of the draw.
    """

    def __init__(self, samples: int = 12_000, seed: int = 0) -> None:
        self.samples = samples
        self.seed = seed

    def load(self) -> Arrays:
        """Return the samples."""
        arrays = FashionMNIST().load()
        index = draw_positions(len(arrays.inputs), self.samples, self.seed)
        return Arrays(arrays.inputs[index], arrays.targets[index], num_classes=arrays.num_classes)


def draw_positions(number: int, count: int, seed: int) -> Tensor:
    """Return randomly drawn positions below a number, int64 [count]."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randperm(number, generator=draw)[:count]
