"""A random share of a data set, for Ditto's smaller federation."""

import torch

from pl_fed.data import Arrays, DataSource
from pl_fed.random import generator


class Share(DataSource):
    """Random share of a data set, the same share of each official part.

    Args:
        dataset: Source of the samples.
        share: Fraction of the samples, in (0, 1].
        seed: Seed of the draw.
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
        pieces = [order[parts == part] for part in parts.unique()]
        index = torch.cat([piece[: round(self.share * len(piece))] for piece in pieces])
        split = None if arrays.split is None else arrays.split[index]
        client = None if arrays.client is None else arrays.client[index]
        return Arrays(
            arrays.inputs[index], arrays.targets[index], client, split, arrays.num_classes
        )
