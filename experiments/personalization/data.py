"""MNIST by a few writers: the data of a board of personalization."""

import torch

from pl_fed.data import Arrays, DataSource, MNISTWriters


class SomeWriters(DataSource):
    """The images of randomly drawn writers of MNIST, each of whom is a client.

    Args:
        writers: The number of writers.
        min_images: The least number of images of a writer.
        seed: Seed of the draw.
    """

    def __init__(self, writers: int = 40, min_images: int = 60, seed: int = 0) -> None:
        self.writers = writers
        self.min_images = min_images
        self.seed = seed

    def load(self) -> Arrays:
        """Return the images.

        Raises:
            ValueError: If there are fewer such writers.
        """
        arrays = MNISTWriters().load()
        writer = torch.as_tensor(arrays.client)
        ids, counts = writer.unique(return_counts=True)
        ids = ids[counts >= self.min_images]
        if len(ids) < self.writers:
            raise ValueError(
                f"Expected argument `writers` to be at most {len(ids)}, the number of writers of"
                f" {self.min_images} images or more, but got {self.writers}."
            )
        draw = torch.Generator().manual_seed(self.seed)
        chosen = ids[torch.randperm(len(ids), generator=draw)[: self.writers]]
        index = torch.isin(writer, chosen).nonzero().flatten()
        return Arrays(
            arrays.inputs[index],
            arrays.targets[index],
            client=writer[index],
            num_classes=arrays.num_classes,
        )
