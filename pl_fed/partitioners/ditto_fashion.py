"""The Fashion-MNIST split of Ditto: five classes per client, lognormal sizes.

Tian Li, Shengyuan Hu, Ahmad Beirami, Virginia Smith, "Ditto: Fair and Robust Federated Learning
Through Personalization", ICML 2021, arXiv:2012.04221, appendix D ("assign 5 classes to each
device").

Client u holds the classes (u + j) mod C, j = 0 … q - 1. Its size is n_u ∝ lognormal(3, 1) + 10,
with Σ n_u = n, and its classes have shares p_uj ∝ lognormal(1, 1), with Σ_j p_uj = 1.

Departs from the reference code, unless ``overlapping`` is set. The reference keeps a pointer into
each class, and takes the next int(p_uj·n_u) + 1 samples. It moves the pointer back to the start
when the class has too few samples left. A few samples therefore belong to two clients, and a few to
none. Here the clients of a class share all its samples. Each gets at least one sample; the others
are split in proportion to p_uj·n_u.

Measured on Fashion-MNIST's labels with 500 clients, ``overlapping`` and ``reference_seed=233``:
61,251 training samples (31 to 1,378 per client, median 88) and 11,254 test samples (7 to 231,
median 17). Two clients hold each of 2,426 training and 1,278 test samples. All these figures equal
those of the reference code. (The reference then shuffles each client's samples without a seed, so
only the sets are comparable.)
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pl_fed.arguments import check_integers
from pl_fed.partitioners._counts import apportion, class_indices, deal
from pl_fed.partitioners.base import Partitioner, check_split, check_test_labels


class DittoFashion(Partitioner):
    """Ditto's Fashion-MNIST split: classes u, u + 1, … for client u, lognormal sizes and shares.

    The classes are cyclic: class 0 follows the last class.

    Args:
        classes_per_client: Number q of classes of each client, 1 to the number of classes C.
        overlapping: Take consecutive slices as in the reference code. Some samples then go to two
            clients, and some to none. A client gets int(p·n_u·m/n) + 1 test samples of a class.
            m/n is the ratio of the sizes of test set and training set (1/6 for Fashion-MNIST).
        reference_seed: Seed of the draw of sizes and shares, below 2³² (233 in the reference);
            ``None`` draws one from the generator. The generator keys all other draws.

    Shape:
        labels: class ids [n], in any numbering.

    Raises:
        ValueError: If an argument is out of range; by :meth:`split`, if there are fewer than
            ``classes_per_client`` classes. Without ``overlapping``, also if a class has no client,
            or fewer samples than clients.

    Example:
        >>> labels = torch.arange(10).repeat(60)
        >>> parts = DittoFashion().split(labels, 10, torch.Generator().manual_seed(0))
        >>> labels[parts[7]].unique()
        tensor([0, 1, 7, 8, 9])
    """

    def __init__(
        self,
        classes_per_client: int = 5,
        overlapping: bool = False,
        reference_seed: int | None = None,
    ) -> None:
        check_integers(1, classes_per_client=classes_per_client)
        if reference_seed is not None:
            check_integers(0, 2**32 - 1, reference_seed=reference_seed)
        self.classes_per_client = classes_per_client
        self.overlapping = overlapping
        self.reference_seed = reference_seed

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """Return the samples of each client (see :class:`Partitioner`)."""
        pools = self._pools(labels, num_clients)
        sizes = self._class_sizes(len(labels), num_clients, generator)
        if self.overlapping:
            return self._slices(pools, sizes)
        return deal(pools, self._counts(pools, sizes, generator), generator)

    def split_matching(
        self, labels: Tensor, test_labels: Tensor, num_clients: int, generator: torch.Generator
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Split a training set and its test set (see :class:`Partitioner`).

        With ``overlapping``, the reference's slices split both sets. Test samples of classes
        without training samples are then left out.
        """
        if not self.overlapping:
            return super().split_matching(labels, test_labels, num_clients, generator)
        check_test_labels(test_labels)
        pools = self._pools(labels, num_clients)
        sizes = self._class_sizes(len(labels), num_clients, generator)
        test_pools = class_indices(test_labels, labels.unique())
        ratio = len(labels) / len(test_labels)
        return self._slices(pools, sizes), self._slices(test_pools, sizes / ratio)

    def _pools(self, labels: Tensor, num_clients: int) -> list[Tensor]:
        """Return the indices of each class's samples, if there are enough classes."""
        check_split(labels, num_clients, class_ids=True)
        pools = class_indices(labels, labels.unique())
        if self.classes_per_client > len(pools):
            raise ValueError(
                "Expected argument `classes_per_client` to be at most the number of classes "
                f"({len(pools)}) but got {self.classes_per_client}."
            )
        return pools

    def _class_sizes(
        self, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> NDArray[np.float64]:
        """Return p_uj·n_u, [clients, classes_per_client], drawn in the reference's order."""
        seed = self.reference_seed
        if seed is None:
            seed = int(torch.randint(2**32, (), generator=generator))
        # the reference uses numpy's legacy generator, with a stream that numpy never changes
        state = np.random.RandomState(seed)
        sizes = state.lognormal(3, 1, num_clients) + 10
        shares = state.lognormal(1, 1, (num_clients, self.classes_per_client))
        sizes = num_samples * sizes / sizes.sum()
        return np.asarray(shares / shares.sum(1, keepdims=True) * sizes[:, None])

    def _counts(
        self, pools: list[Tensor], sizes: NDArray[np.float64], generator: torch.Generator
    ) -> Tensor:
        """Return the numbers of samples, int64 [classes, clients].

        Args:
            pools: The indices of each class's samples.
            sizes: p_uj·n_u, [clients, classes_per_client].
            generator: Breaks ties.
        """
        counts = torch.zeros(len(pools), len(sizes), dtype=torch.int64)
        clients = torch.arange(len(sizes))
        for label, pool in enumerate(pools):
            position = (label - clients) % len(pools)  # j of this class on each client
            holders = clients[position < self.classes_per_client]
            if not 1 <= len(holders) <= len(pool):
                raise ValueError(
                    "Expected every class to have a client, and a sample for each of its clients, "
                    f"but got {len(holders)} clients and {len(pool)} samples for class number "
                    f"{label} ({len(sizes)} clients, {self.classes_per_client} classes each)."
                )
            weights = torch.from_numpy(sizes)[holders, position[holders]]
            counts[label, holders] = 1 + apportion(len(pool) - len(holders), weights, generator)
        return counts

    def _slices(self, pools: list[Tensor], sizes: NDArray[np.float64]) -> list[Tensor]:
        """Return each client's next slice of each of its classes, as in the reference code.

        A slice begins at the start of its class if too few samples are left.
        """
        starts = [0] * len(pools)
        parts = []
        for client, counts in enumerate(sizes.astype(np.int64) + 1):
            pieces = []
            for j, count in enumerate(counts.tolist()):
                label = (client + j) % len(pools)
                start = starts[label] if starts[label] + count <= len(pools[label]) else 0
                pieces.append(pools[label][start : start + count])
                starts[label] = start + count
            parts.append(torch.cat(pieces).sort().values)
        return parts
