"""A part of a data set, and images as they are stored."""

from dataclasses import replace

import torch

from pl_fed.data import Arrays, DataSource
from pl_fed.random import generator


class Share(DataSource):
    """A share of a data set's samples, drawn at random, of each official part as much.

    Args:
        dataset: Where they come from.
        share: How much of it, in (0, 1].
        seed: Of the draw.
    """

    def __init__(self, dataset: DataSource, share: float, seed: int = 0) -> None:
        self.dataset = dataset
        self.share = share
        self.seed = seed

    def load(self) -> Arrays:
        """Return the samples."""
        arrays = self.dataset.load()
        order = torch.randperm(len(arrays), generator=generator(self.seed, "share"))
        parts = torch.zeros(len(arrays)) if arrays.split is None else arrays.split[order]
        kept = [order[parts == part] for part in parts.unique()]
        index = torch.cat([part[: round(self.share * len(part))] for part in kept])
        split = None if arrays.split is None else arrays.split[index]
        client = None if arrays.client is None else arrays.client[index]
        return Arrays(
            arrays.inputs[index], arrays.targets[index], client, split, arrays.num_classes
        )


class Pixels(DataSource):
    """A data set's images in 0..255, which are not scaled then.

    Args:
        dataset: Where they come from.
    """

    def __init__(self, dataset: DataSource) -> None:
        self.dataset = dataset

    def load(self) -> Arrays:
        """Return the samples."""
        arrays = self.dataset.load()
        return replace(arrays, inputs=arrays.inputs.to(torch.float32))
