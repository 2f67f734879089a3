"""Label skew of any strength: a Dirichlet draw splits each class over the clients.

Mikhail Yurochkin, Mayank Agarwal, Soumya Ghosh, Kristjan Greenewald, Trong Nghia Hoang, Yasaman
Khazaeni, "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019,
arXiv:1905.12022: for every class, p ~ Dir(β) over the clients. The draw is repeated until every
client has enough samples, as in Qinbin Li, Yiqun Diao, Quan Chen, Bingsheng He, "Federated Learning
on Non-IID Data Silos: An Experimental Study", ICDE 2022, arXiv:2102.02079. FLAME (arXiv:2407.16397)
uses β = 0.5.

Departs from FLAME's code, unless ``overlapping`` is set: there every client draws its ⌊p·n_c⌋
samples of a class independently of other clients. Clients then share samples; a training sample of
one client may be a test sample of another. Here the split is disjoint and complete.
"""

import numpy as np
import torch
from torch import Tensor

from pl_fed.arguments import check_integers
from pl_fed.partitioners._counts import apportion, class_indices, deal, draw
from pl_fed.partitioners.base import Partitioner, check_concentration, check_size, check_split

_MAX_DRAWS = 100


class Dirichlet(Partitioner):
    """Dirichlet label skew: proportions p ~ Dir(β) split each class, independently of others.

    The draw is repeated until every client has ``min_size`` samples. With many clients or a small
    ``beta``, no draw may succeed. After 100 draws, the last one is therefore repaired. Each client
    below ``min_size`` takes single samples of the largest class of the largest client at that
    moment. The number of moved samples is minimal.

    Args:
        beta: Concentration β > 0 of the Dirichlet distribution; others, such as Hsu et al. (2019)
            and flwr-datasets, call it α. Near 0, each class belongs to one
            client; towards infinity, all clients have the same class distribution.
        min_size: Least number of samples of a client, >= 1.
        overlapping: Draw each client's samples of a class from all samples of the class, as FLAME's
            code does, so that clients share samples. The number of samples is rounded down. A
            client below ``min_size`` after 100 draws gets further samples of the class of which it
            has the largest share; FLAME's code would continue to draw.

    Shape:
        labels: class ids [n], in any numbering.

    Raises:
        ValueError: If an argument is out of range; by :meth:`split`, if there are fewer samples
            than ``num_clients`` times ``min_size``.

    Example:
        >>> parts = Dirichlet(beta=0.5).split(
        ...     torch.arange(10).repeat(30), 4, torch.Generator().manual_seed(0)
        ... )
        >>> sum(len(part) for part in parts)
        300
    """

    def __init__(self, beta: float = 0.5, min_size: int = 1, overlapping: bool = False) -> None:
        check_concentration(beta)
        check_integers(1, min_size=min_size)
        self.beta = beta
        self.min_size = min_size
        self.overlapping = overlapping

    def split(self, labels: Tensor, num_clients: int, generator: torch.Generator) -> list[Tensor]:
        """Return the samples of each client (see :class:`Partitioner`)."""
        check_split(labels, num_clients, class_ids=True)
        check_size(len(labels), num_clients, self.min_size)
        pools = class_indices(labels, labels.unique())
        counts = self._counts(pools, num_clients, generator)
        return (draw if self.overlapping else deal)(pools, counts, generator)

    def _counts(self, pools: list[Tensor], num_clients: int, generator: torch.Generator) -> Tensor:
        """Return samples per class and client, int64 [classes, clients]."""
        # torch's Dirichlet distribution takes no generator; numpy's is also stable for small β
        numpy_generator = np.random.default_rng(
            int(torch.randint(2**63 - 1, (), generator=generator))
        )
        sizes = torch.tensor([len(pool) for pool in pools])
        for _ in range(_MAX_DRAWS):
            draws = numpy_generator.dirichlet(np.full(num_clients, self.beta), size=len(pools))
            shares = torch.from_numpy(draws)
            counts = (shares * sizes[:, None]).floor().long()
            if not self.overlapping:
                rows = zip(pools, shares)
                counts = torch.stack([apportion(len(p), s, generator) for p, s in rows])
            if int(counts.sum(0).min()) >= self.min_size:
                break
        if self.overlapping:
            return self._add_samples(counts, shares, sizes)
        return self._move_samples(counts)

    def _add_samples(self, counts: Tensor, shares: Tensor, sizes: Tensor) -> Tensor:
        """Add shared samples to clients below ``min_size``, in place.

        Args:
            counts: Samples per class and client, int64 [classes, clients].
            shares: Each client's share of each class [classes, clients].
            sizes: Number of samples of each class [classes].
        """
        for client in (counts.sum(0) < self.min_size).nonzero().flatten().tolist():
            client_counts, client_shares = counts[:, client], shares[:, client]
            for _ in range(self.min_size - int(client_counts.sum())):
                client_counts[client_shares.where(client_counts < sizes, -1.0).argmax()] += 1
        return counts

    def _move_samples(self, counts: Tensor) -> Tensor:
        """Move single samples from the largest clients to those below ``min_size``, in place."""
        sizes = counts.sum(0)
        for receiver in (sizes < self.min_size).nonzero().flatten().tolist():
            while sizes[receiver] < self.min_size:
                donor = int(sizes.argmax())
                label = int(counts[:, donor].argmax())
                for client, change in ((donor, -1), (receiver, 1)):
                    counts[label, client] += change
                    sizes[client] += change
        return counts
