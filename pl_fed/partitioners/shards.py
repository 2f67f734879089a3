"""Label skew: every client holds a fixed number of classes.

Shengkun Zhu, Jinshan Zeng, Sheng Wang, Yuan Sun, Xiaodong Li, Yuan Yao, Zhiyong Peng, "On ADMM in
Heterogeneous Federated Learning: Personalization, Robustness, and Fairness" (FLAME),
arXiv:2407.16397 ("each client being assigned 2-6 shards randomly"). Binghui Zhang, Luis Mares De La
Cruz, Binghui Wang, "FedTilt: Towards Multi-Level Fairness-Preserving and Robust Federated
Learning", arXiv:2503.13537 (100 clients, 2 classes each). The idea of shards: McMahan et al.,
AISTATS 2017, arXiv:1602.05629.

Departs from FLAME's code, unless ``reference``: that cuts each of C classes, as its samples lie in
the file, into ⌈q·m/C⌉ equal shards and lets each client draw q of them, so that a client may draw
two shards of one class, neighbours in the file (in MNIST those of one hand) go to one client, and
with q·m not a multiple of C some shards are never drawn. Here a client's classes are distinct, its
samples are drawn at random, and every sample is used.
"""

import torch
from torch import Tensor

from pl_fed.arguments import check_integers
from pl_fed.partitioners._counts import deal, members
from pl_fed.partitioners.base import Partitioner, check_split, check_test_labels


class Shards(Partitioner):
    """Give every client exactly ``classes_per_client`` classes, balanced and at random.

    A class goes to ⌊m·q/C⌋ or ⌈m·q/C⌉ of the m clients (fewer if it has fewer samples than that,
    when the other classes make up for it), which share its samples evenly. Every class is held by
    someone.

    Args:
        classes_per_client: Number q of distinct classes of each client, 1 to the number of classes
            C.
        reference: Draw shards as FLAME's code does. Some samples may belong to nobody then.
        whole_test_classes: Whether each client is tested on all official test samples of its
            classes, which other clients of the same class share: with the data's ``split:
            official``. So LotteryFL (A. Li et al., SEC 2021, arXiv 2008.03371) tests, which FedTilt
            cites for its split.

    Shape:
        labels: class ids [n], in any numbering.

    Raises:
        ValueError: If ``classes_per_client`` is below 1; by :meth:`split`, if there are fewer
            classes than that, if m·q < C (a class would be left over), or if there are too few
            samples to give every client q classes.

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
        pools = members(labels, labels.unique())
        self._check_feasible(pools, num_clients)
        if self.reference:
            return self._drawn_shards(pools, num_clients, generator)
        holders = self._holders(pools, num_clients, generator)
        counts = holders.to(torch.int64)
        for row, pool in zip(counts, pools):
            row[row == 1] = _even(len(pool), int(row.sum()))
        return deal(pools, counts, generator)

    def split_matching(
        self, labels: Tensor, test_labels: Tensor, num_clients: int, generator: torch.Generator
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Split a training set and its official test set (see :class:`Partitioner`)."""
        if not self.whole_test_classes:
            return super().split_matching(labels, test_labels, num_clients, generator)
        check_test_labels(test_labels)
        train = self.split(labels, num_clients, generator)
        test = [torch.isin(test_labels, labels[part].unique()).nonzero() for part in train]
        return train, [part.flatten() for part in test]

    def _drawn_shards(
        self, pools: list[Tensor], num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        """Cut the classes into shards, of which each client draws some, as in FLAME's code."""
        q, number = self.classes_per_client, -(-num_clients * self.classes_per_client // len(pools))
        shards = [
            shard for pool in pools for shard in pool.split(max(1, len(pool) // number))[:number]
        ]
        if len(shards) < q * num_clients:
            raise ValueError(
                "Expected argument `num_clients` times `classes_per_client` to be at most the"
                f" number of shards that the reference cuts the {len(pools)} classes into"
                f" ({len(shards)}, as some have few samples) but got {num_clients} x {q}."
            )
        order = torch.randperm(len(shards), generator=generator).tolist()
        drawn = [order[client * q : (client + 1) * q] for client in range(num_clients)]
        return [torch.cat([shards[one] for one in mine]).sort().values for mine in drawn]

    def _check_feasible(self, pools: list[Tensor], num_clients: int) -> None:
        wanted = num_clients * self.classes_per_client
        if self.classes_per_client > len(pools):
            raise ValueError(
                "Expected argument `classes_per_client` to be at most the number of classes "
                f"({len(pools)}) but got {self.classes_per_client}."
            )
        if wanted < len(pools) and not self.reference:
            raise ValueError(
                "Expected argument `num_clients` times `classes_per_client` to be at least the "
                f"number of classes ({len(pools)}) but got {num_clients} x "
                f"{self.classes_per_client} = {wanted}."
            )
        places = sum(min(len(pool), num_clients) for pool in pools)
        if wanted > places:
            raise ValueError(
                "Expected argument `num_clients` times `classes_per_client` to be at most the "
                f"number of places that the {len(pools)} classes offer ({places}: one client per "
                f"sample) but got {num_clients} x {self.classes_per_client} = {wanted}."
            )

    def _holders(self, pools: list[Tensor], num_clients: int, generator: torch.Generator) -> Tensor:
        """Return who holds which class, bool [classes, clients], exactly q per client."""
        left = self._places(pools, num_clients, generator)
        holders = torch.zeros(len(pools), num_clients, dtype=torch.bool)
        for client in range(num_clients):
            # The smallest of independent exponential times with rates `left` are a draw without
            # replacement in proportion to `left`. A class with as many places left as there are
            # clients left must be taken now, or its last places would go to one client twice;
            # with left.max() <= clients left and left.sum() == q * clients left this never fails.
            times = torch.empty(len(pools)).exponential_(generator=generator) / left
            times[left == num_clients - client] = -1.0
            chosen = times.argsort()[: self.classes_per_client]
            holders[chosen, client] = True
            left[chosen] -= 1
        return holders

    def _places(self, pools: list[Tensor], num_clients: int, generator: torch.Generator) -> Tensor:
        """Return how many clients hold each class, int64 [classes], as equal as can be."""
        limits = torch.tensor([min(len(pool), num_clients) for pool in pools])
        places = torch.zeros_like(limits)
        while (missing := num_clients * self.classes_per_client - int(places.sum())) > 0:
            free = (places < limits).nonzero().flatten()
            free = free[torch.randperm(len(free), generator=generator)]
            places[free[:missing]] += 1
        return places


def _even(total: int, parts: int) -> Tensor:
    """Return ``parts`` integers that sum to ``total`` and differ by at most one."""
    return (total + torch.arange(parts)).div(parts, rounding_mode="floor")
