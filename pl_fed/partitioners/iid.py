"""The IID split: every client has the overall distribution.

H. Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas,
"Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
arXiv:1602.05629, section 3: "the data is shuffled, and then partitioned".
"""

import torch
from torch import Tensor

from pl_fed.partitioners.base import Partitioner, check_split


class IID(Partitioner):
    """IID split: shuffled samples, cut into parts with sizes that differ by at most one.

    The split ignores the labels, so they may be real values.

    Args:
        shuffle: ``False`` cuts the samples in the order of the file, as FLAME's code does for its
            quality skew. Neighbours in the file then go to one client. In MNIST, one writer wrote
            them, so that the split has a slight skew.

    Shape:
        labels [n, ...], with n >= number of clients.

    Raises:
        ValueError: By :meth:`split`, if there are more clients than samples.

    Example:
        >>> parts = IID().split(torch.zeros(10), 3, torch.Generator().manual_seed(0))
        >>> [len(part) for part in parts]
        [4, 3, 3]
    """

    def __init__(self, shuffle: bool = True) -> None:
        self.shuffle = shuffle

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """Return the samples of each client (see :class:`Partitioner`)."""
        check_split(labels, num_clients)
        order = torch.arange(len(labels))
        if self.shuffle:
            order = torch.randperm(len(labels), generator=generator)
        return [part.sort().values for part in order.tensor_split(num_clients)]
