"""The natural data split: by writer, by celebrity, by device.

S. Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv:1812.01097 (FEMNIST by writer,
CelebA by celebrity). With fewer clients than owners, each client gets several owners, as in FLAME's
(arXiv:2407.16397) split of FEMNIST.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.partitioners.base import Partitioner, check_split


class ByOwner(Partitioner):
    """Split by owner: each client gets all samples of some owners, drawn at random.

    The numbers of owners per client differ by at most one. The data set holds the owner of each
    sample. With one client per owner, the split is the default split without a partitioner: leave
    the partitioner out then.

    Shape:
        labels: ids of the owners [n], in any numbering.

    Raises:
        ValueError: By :meth:`split`, if there are more clients than owners.

    Example:
        >>> owners = torch.tensor([7, 7, 8, 9, 9, 5])
        >>> parts = ByOwner().split(owners, 2, torch.Generator().manual_seed(0))
        >>> [owners[part].unique().tolist() for part in parts]
        [[5, 9], [7, 8]]
    """

    splits: Literal["labels", "owners"] = "owners"

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """Return the samples of each client (see :class:`Partitioner`)."""
        check_split(labels, num_clients, class_ids=True)
        ids, owner = labels.unique(return_inverse=True)
        if num_clients > len(ids):
            raise ValueError(
                f"Expected argument `num_clients` to be at most the number of owners ({len(ids)})"
                f" but got {num_clients}."
            )
        client_of_owner = torch.randperm(len(ids), generator=generator) % num_clients
        client_of_sample = client_of_owner[owner]
        sizes = client_of_sample.bincount(minlength=num_clients)
        return list(client_of_sample.argsort(stable=True).split(sizes.tolist()))
