"""A random part of CIFAR-10, for studies on a few cores, and for pools of rare samples."""

import torch

from pl_fed.data import Arrays, DataSource, Npz


class Part(DataSource):
    """Random samples of a file of arrays, with their official parts.

    Args:
        path: The file of :class:`~pl_fed.data.Npz`.
        samples: The number of samples.
        seed: Seed of the draw.
        upside_down: Whether all images are turned by half.
    """

    def __init__(
        self,
        path: str = "runs/cifar10.npz",
        samples: int = 3_000,
        seed: int = 0,
        upside_down: bool = False,
    ) -> None:
        self.path = path
        self.samples = samples
        self.seed = seed
        self.upside_down = upside_down

    def load(self) -> Arrays:
        """Return the samples."""
        arrays = Npz(self.path).load()
        draw = torch.Generator().manual_seed(self.seed)
        index = torch.randperm(len(arrays.targets), generator=draw)[: self.samples]
        split = None if arrays.split is None else arrays.split[index]
        inputs = arrays.inputs[index]
        if self.upside_down:
            inputs = inputs.flip(-2, -1)
        return Arrays(inputs, arrays.targets[index], split=split, num_classes=arrays.num_classes)
