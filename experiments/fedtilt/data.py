"""Data split: clients with two classes and many more samples of one than of the other."""

import torch
from torch import Tensor

from pl_fed.partitioners import Partitioner


class Unbalanced(Partitioner):
    """Unbalanced partitioner: every client has two classes in the proportion ``ratio`` to 1.

    A group has as many clients as there are classes. In a group, every class is the larger class of
    one client and the smaller class of another.

    Args:
        ratio: Samples of a client's larger class per sample of its smaller class, above 0.

    Shape:
        labels: class ids [n]; the number of clients must be a multiple of that of classes.
    """

    def __init__(self, ratio: float = 10.0) -> None:
        self.ratio = ratio

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """Return the samples of each client."""
        classes = labels.unique()
        groups, remainder = divmod(num_clients, len(classes))
        if remainder:
            raise ValueError(
                f"Expected argument `num_clients` to be a multiple of the {len(classes)} classes"
                f" but got {num_clients}."
            )
        clients: list[list[Tensor]] = [[] for _ in range(num_clients)]
        shifts = torch.randint(1, len(classes), (groups,), generator=generator).tolist()
        for number, label in enumerate(classes):
            pool = (labels == label).nonzero().flatten()
            pool = pool[torch.randperm(len(pool), generator=generator)]
            many = round(len(pool) * self.ratio / (1 + self.ratio))
            larger, smaller = pool[:many].tensor_split(groups), pool[many:].tensor_split(groups)
            for group, shift in enumerate(shifts):
                first = group * len(classes)
                clients[first + number].append(larger[group])
                clients[first + (number + shift) % len(classes)].append(smaller[group])
        return [torch.cat(parts).sort().values for parts in clients]
