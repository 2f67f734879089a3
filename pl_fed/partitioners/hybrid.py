"""Hybrid skew: label skew for half of the clients, quantity skew for the other half.

Shengkun Zhu et al., "On ADMM in Heterogeneous Federated Learning: Personalization, Robustness, and
Fairness" (FLAME), arXiv:2407.16397, section VI: the first ⌈m/2⌉ clients hold q classes each
(:class:`Shards`). The other ⌊m/2⌋ clients have samples of all classes, with sizes ∝ q ~ Dir(β)
(:class:`Quantity`).

Departs from FLAME's code, unless ``overlapping`` is set: there each half of the clients draws from
all samples, so that two clients hold most samples. Here the samples are divided between the halves
at random, in proportion to their numbers of clients.
"""

import torch
from torch import Tensor

from pl_fed.partitioners.base import Partitioner, check_split
from pl_fed.partitioners.quantity import Quantity
from pl_fed.partitioners.shards import Shards


class Hybrid(Partitioner):
    """Hybrid skew: label skew for the first half of the clients, quantity skew for the second.

    Args:
        classes_per_client: Number of classes q of each client of the first half, >= 1.
        beta: β > 0 of the Dirichlet distribution of the second half's sizes.
        min_size: Least number of samples of a client of the second half, >= 1.
        overlapping: Draw both halves from all samples as FLAME's code does: with ``reference`` of
            :class:`Shards` and ``overlapping`` of :class:`Quantity`.

    Shape:
        labels: class ids [n], in any numbering.

    Raises:
        ValueError: If an argument is out of range; by :meth:`split`, if the split of a half is
            impossible.

    Example:
        >>> labels = torch.arange(4).repeat(50)
        >>> parts = Hybrid().split(labels, 5, torch.Generator().manual_seed(0))
        >>> [len(labels[part].unique()) for part in parts[:3]], sum(len(part) for part in parts)
        ([2, 2, 2], 200)
    """

    def __init__(
        self,
        classes_per_client: int = 2,
        beta: float = 0.5,
        min_size: int = 1,
        overlapping: bool = False,
    ) -> None:
        self.by_class = Shards(classes_per_client, reference=overlapping)
        self.by_quantity = Quantity(beta=beta, min_size=min_size, overlapping=overlapping)
        self.overlapping = overlapping

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """Return the samples of each client (see :class:`Partitioner`)."""
        check_split(labels, num_clients, class_ids=True)
        num_first = -(-num_clients // 2)
        all_samples = torch.arange(len(labels))
        pools = [all_samples, all_samples]
        if not self.overlapping:
            cut = max(num_first, len(labels) * num_first // num_clients)
            shuffled = torch.randperm(len(labels), generator=generator)
            pools = [part.sort().values for part in (shuffled[:cut], shuffled[cut:])]
        halves: list[tuple[Partitioner, int, Tensor]] = [(self.by_class, num_first, pools[0])]
        if num_clients > num_first:
            halves.append((self.by_quantity, num_clients - num_first, pools[1]))
        parts = []
        for ordinal, (partitioner, clients, pool) in zip(("first", "second"), halves):
            try:
                split = partitioner.split(labels[pool], clients, generator)
            except ValueError as error:
                half = f"the {ordinal} half of the {num_clients} clients"
                raise ValueError(f"{str(error).removesuffix('.')} in {half}.") from error
            parts += [pool[part] for part in split]
        return parts
