"""What a data set gives to a federation: arrays, and whose they are."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

TRAIN, VAL, TEST = 0, 1, 2


@dataclass(frozen=True)
class Arrays:
    """All samples of a data set as tensors.

    Attributes:
        x: Inputs [samples, ...]. Images are [samples, channels, height, width]; uint8 is read as
            0..255 and scaled to [0, 1], other types are taken as they are.
        y: Targets [samples]: class ids 0..C-1 (any integer type) or real values [samples, ...].
        client: Id of the client each sample belongs to, [samples], or ``None`` where a partitioner
            has yet to say. Any integers: sorted, they become clients 0, 1, 2, ...
        split: The official part of each sample, [samples], 0 train, 1 val, 2 test; or ``None``.
        num_classes: Number of classes; 0 where the targets are real values.
    """

    x: Tensor
    y: Tensor
    client: Tensor | None = None
    split: Tensor | None = None
    num_classes: int = 0

    def __len__(self) -> int:
        return len(self.x)


class DataSource(ABC):
    """A data set that can be loaded whole, as tensors.

    A new one is a class with :meth:`load` in a file of its own, named in the config by its path.
    """

    @abstractmethod
    def load(self) -> Arrays:
        """Return the samples.

        Raises:
            FileNotFoundError: If the data is not there, with a sentence that says how to get it.
            ValueError: If the data is broken.
        """


def classes_of(y: Tensor) -> int:
    """Return the number of classes of integer targets, 0 for real-valued ones.

    Raises:
        ValueError: If a class id is negative.

    Example:
        >>> import torch
        >>> classes_of(torch.tensor([0, 2, 1])), classes_of(torch.tensor([0.5]))
        (3, 0)
    """
    if y.is_floating_point():
        return 0
    if len(y) and int(y.min()) < 0:
        raise ValueError(
            f"Expected class ids `y` to be integers from 0 upwards but got {int(y.min())}."
        )
    return int(y.max()) + 1 if len(y) else 0
