"""Label skew of any strength: each class is shared out by a Dirichlet draw.

Mikhail Yurochkin, Mayank Agarwal, Soumya Ghosh, Kristjan Greenewald, Trong Nghia Hoang, Yasaman
Khazaeni, "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019,
arXiv:1905.12022: for every class, p ~ Dir(β) over the clients. Redrawn until nobody is left with
too little, as in Qinbin Li, Yiqun Diao, Quan Chen, Bingsheng He, "Federated Learning on Non-IID
Data Silos: An Experimental Study", ICDE 2022, arXiv:2102.02079. FLAME (arXiv:2407.16397) uses β =
0.5.

Departs from FLAME's code, unless ``overlapping``: there every client draws its ⌊p·n_c⌋ samples of a
class independently of the others, so that clients share samples, one's training samples with
another's test samples too. Here the split is disjoint and complete.
"""

import numpy as np
import torch
from torch import Tensor

from pl_fed.arguments import check_integers
from pl_fed.partitioners._counts import apportion, deal, draw, members
from pl_fed.partitioners.base import Partitioner, check_concentration, check_size, check_split

_TRIES = 100


class Dirichlet(Partitioner):
    """Share out each class over the clients in proportions p ~ Dir(β), all classes independently.

    The draw is repeated until every client has ``min_size`` samples. With many clients or a small
    ``beta`` that may never happen; so after 100 draws the last one is kept, and each client that is
    short takes single samples from whoever is the largest then, of the class of which that one has
    most. The number of samples so moved is the smallest that will do.

    Args:
        beta: Concentration β > 0 of the Dirichlet distribution: near 0 each class sits with one
            client, towards infinity all clients get the same mix.
        min_size: Least number of samples of a client, >= 1.
        overlapping: Draw each client's samples of a class from all of them, whoever else has them,
            as FLAME's code does. The number of samples is rounded down then. A client that is short
            after 100 draws has more samples of the class of which it has the largest share; FLAME's
            code would draw on.

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
        pools = members(labels, labels.unique())
        counts = self._counts(pools, num_clients, generator)
        return (draw if self.overlapping else deal)(pools, counts, generator)

    def _counts(self, pools: list[Tensor], num_clients: int, generator: torch.Generator) -> Tensor:
        """Return samples per class and client, int64 [classes, clients]."""
        # torch's own Dirichlet takes no generator; numpy's is stable for small β too.
        numpy_generator = np.random.default_rng(
            int(torch.randint(2**63 - 1, (), generator=generator))
        )
        sizes = torch.tensor([len(pool) for pool in pools])
        for _ in range(_TRIES):
            drawn = numpy_generator.dirichlet(np.full(num_clients, self.beta), size=len(pools))
            shares = torch.from_numpy(drawn)
            counts = (shares * sizes[:, None]).floor().long()
            if not self.overlapping:
                rows = zip(pools, shares)
                counts = torch.stack([apportion(len(p), s, generator) for p, s in rows])
            if int(counts.sum(0).min()) >= self.min_size:
                break
        return self._drawn_on(counts, shares, sizes) if self.overlapping else self._filled(counts)

    def _drawn_on(self, counts: Tensor, shares: Tensor, sizes: Tensor) -> Tensor:
        """Let clients below ``min_size`` have samples more, whoever else has them, in place."""
        for poor in (counts.sum(0) < self.min_size).nonzero().flatten().tolist():
            mine, wanted = counts[:, poor], shares[:, poor]
            for _ in range(self.min_size - int(mine.sum())):
                mine[wanted.where(mine < sizes, -1.0).argmax()] += 1
        return counts

    def _filled(self, counts: Tensor) -> Tensor:
        """Move single samples from the largest clients to those below ``min_size``, in place."""
        sizes = counts.sum(0)
        for poor in (sizes < self.min_size).nonzero().flatten().tolist():
            while sizes[poor] < self.min_size:
                rich = int(sizes.argmax())
                label = int(counts[:, rich].argmax())
                for client, change in ((rich, -1), (poor, 1)):
                    counts[label, client] += change
                    sizes[client] += change
        return counts
