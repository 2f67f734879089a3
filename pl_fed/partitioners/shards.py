"""Label skew: every client holds a fixed number of classes.

Shengkun Zhu, Jinshan Zeng, Sheng Wang, Yuan Sun, Xiaodong Li, Yuan Yao, Zhiyong Peng, "On ADMM in
Heterogeneous Federated Learning: Personalization, Robustness, and Fairness" (FLAME),
arXiv:2407.16397 ("each client being assigned 2-6 shards randomly"). Binghui Zhang, Luis Mares De La
Cruz, Binghui Wang, "FedTilt: Towards Multi-Level Fairness-Preserving and Robust Federated
Learning", arXiv:2503.13537 (100 clients, 2 classes each). The idea of shards: McMahan et al.,
AISTATS 2017, arXiv:1602.05629.

Departs from FLAME's code, unless ``reference`` is set. For m clients with q classes each, FLAME's
code cuts each of C classes into ⌈q·m/C⌉ equal shards, in the order of the file. Each client draws q
shards. It may draw two shards of one class. Neighbours in the file (of one writer in MNIST) go to
one client. If q·m is not a multiple of C, some shards are never drawn. Here a client's classes are
distinct, its samples are drawn at random, and the split uses every sample.
"""

import torch
from torch import Tensor

from pl_fed.arguments import check_integers
from pl_fed.partitioners._counts import class_indices, deal
from pl_fed.partitioners.base import Partitioner, check_split, check_test_labels


class Shards(Partitioner):
    """Shards: exactly ``classes_per_client`` classes on every client, balanced and at random.

    ⌊m·q/C⌋ or ⌈m·q/C⌉ of the m clients hold a class, and share its samples evenly. A class with
    fewer samples has fewer clients; other classes then have more. At least one client holds each
    class.

    Args:
        classes_per_client: Number q of distinct classes of each client, 1 to the number of classes
            C.
        reference: Draw shards as FLAME's code does. Some samples may then belong to no client.
        whole_test_classes: Test each client on all official test samples of its classes, so that
            clients with a common class share test samples. It requires ``data.split: official``.

    Shape:
        labels: class ids [n], in any numbering.

    Raises:
        ValueError: If ``classes_per_client`` is below 1. :meth:`split` raises it if q is above the
            number of classes, if m·q < C (a class would have no client), or if there are too few
            samples for q classes on every client.

    Example:
        >>> labels = torch.arange(4).repeat(6)
        >>> parts = Shards(classes_per_client=2).split(labels, 6, torch.Generator().manual_seed(0))
        >>> [len(labels[part].unique()) for part in parts]
        [2, 2, 2, 2, 2, 2]
    """

    def __init__(
        self,
        classes_per_client: int = 2,
        reference: bool = False,
        whole_test_classes: bool = False,
    ) -> None:
        check_integers(1, classes_per_client=classes_per_client)
        self.classes_per_client = classes_per_client
        self.reference = reference
        self.whole_test_classes = whole_test_classes
        self.needs_official = "whole_test_classes" if whole_test_classes else None

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """Return the samples of each client (see :class:`Partitioner`)."""
        check_split(labels, num_clients, class_ids=True)
        pools = class_indices(labels, labels.unique())
        self._check_feasible(pools, num_clients)
        if self.reference:
            return self._draw_shards(pools, num_clients, generator)
        holders = self._draw_holders(pools, num_clients, generator)
        counts = holders.to(torch.int64)
        for row, pool in zip(counts, pools):
            row[row == 1] = _even_sizes(len(pool), int(row.sum()))
        return deal(pools, counts, generator)

    def split_matching(
        self, labels: Tensor, test_labels: Tensor, num_clients: int, generator: torch.Generator
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Split a training set and its test set (see :class:`Partitioner`)."""
        if not self.whole_test_classes:
            return super().split_matching(labels, test_labels, num_clients, generator)
        check_test_labels(test_labels)
        train = self.split(labels, num_clients, generator)
        test = [torch.isin(test_labels, labels[part].unique()).nonzero() for part in train]
        return train, [part.flatten() for part in test]

    def _draw_shards(
        self, pools: list[Tensor], num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        """Cut the classes into shards, and draw some of them for each client, as FLAME's code."""
        q = self.classes_per_client
        per_class = -(-num_clients * q // len(pools))
        shards = [
            shard
            for pool in pools
            for shard in pool.split(max(1, len(pool) // per_class))[:per_class]
        ]
        if len(shards) < q * num_clients:
            raise ValueError(
                "Expected argument `num_clients` times `classes_per_client` to be at most the"
                f" number of shards that the reference cuts the {len(pools)} classes into"
                f" ({len(shards)}, as some have few samples) but got {num_clients} x {q}."
            )
        order = torch.randperm(len(shards), generator=generator).tolist()
        draws = [order[client * q : (client + 1) * q] for client in range(num_clients)]
        return [torch.cat([shards[i] for i in draw]).sort().values for draw in draws]

    def _check_feasible(self, pools: list[Tensor], num_clients: int) -> None:
        """Raise ``ValueError`` unless every client can have its number of classes."""
        total = num_clients * self.classes_per_client
        if self.classes_per_client > len(pools):
            raise ValueError(
                "Expected argument `classes_per_client` to be at most the number of classes "
                f"({len(pools)}) but got {self.classes_per_client}."
            )
        if total < len(pools) and not self.reference:
            raise ValueError(
                "Expected argument `num_clients` times `classes_per_client` to be at least the "
                f"number of classes ({len(pools)}) but got {num_clients} x "
                f"{self.classes_per_client} = {total}."
            )
        max_total = sum(min(len(pool), num_clients) for pool in pools)
        if total > max_total:
            raise ValueError(
                "Expected argument `num_clients` times `classes_per_client` to be at most the "
                f"total number of clients that {len(pools)} classes allow ({max_total}: one client "
                f"per sample) but got {num_clients} x {self.classes_per_client} = {total}."
            )

    def _draw_holders(
        self, pools: list[Tensor], num_clients: int, generator: torch.Generator
    ) -> Tensor:
        """Return the classes of each client, bool [classes, clients], exactly q per client."""
        missing = self._holder_counts(pools, num_clients, generator)
        holders = torch.zeros(len(pools), num_clients, dtype=torch.bool)
        for client in range(num_clients):
            # The q smallest of independent exponential times with rates `missing` are a draw
            # without replacement in proportion to `missing`. A class that misses all of the m'
            # remaining clients must be drawn now: otherwise one client would get it twice. With
            # missing.max() <= m' and missing.sum() == q * m', the draw never fails.
            times = torch.empty(len(pools)).exponential_(generator=generator) / missing
            times[missing == num_clients - client] = -1.0
            drawn_classes = times.argsort()[: self.classes_per_client]
            holders[drawn_classes, client] = True
            missing[drawn_classes] -= 1
        return holders

    def _holder_counts(
        self, pools: list[Tensor], num_clients: int, generator: torch.Generator
    ) -> Tensor:
        """Return the number of clients of each class, int64 [classes], as equal as possible."""
        limits = torch.tensor([min(len(pool), num_clients) for pool in pools])
        counts = torch.zeros_like(limits)
        while (missing := num_clients * self.classes_per_client - int(counts.sum())) > 0:
            open_classes = (counts < limits).nonzero().flatten()
            shuffled = open_classes[torch.randperm(len(open_classes), generator=generator)]
            counts[shuffled[:missing]] += 1
        return counts


def _even_sizes(total: int, parts: int) -> Tensor:
    """Return ``parts`` integers that sum to ``total`` and differ by at most one."""
    return (total + torch.arange(parts)).div(parts, rounding_mode="floor")
