"""AFL, agnostic federated learning: weights that climb towards the clients with large losses.

M. Mohri, G. Sivek and A. T. Suresh, "Agnostic Federated Learning", ICML 2019, arXiv 1902.00146,
Algorithm 1. The objective is min_w max_λ Σ_k λ_k F_k(w), over λ in the probability simplex. In each
round, with F_k the loss of w^t over all training data of client k::

    w^{t+1} = w^t + Σ_k λ_k^t Δ_k
    λ^{t+1} = Proj( λ^t + γ (F_1(w^t), …, F_K(w^t)) )        onto the probability simplex

λ starts at 1/K.

Departs from the paper:

- All clients take part there. Here a client outside of the cohort reports no loss, and its λ_k
  changes by the projection only. The shares of the cohort are divided by their sum. If all of them
  are 0, the model stays.
- It has a fixed set of clients. Here a client that joins later gets the share 1/K, and one that
  leaves keeps a share, as a client outside of the cohort.
- It returns the mean of all w^t. Here the last one is the result, as in easyFL and FairMOO.
- A local step of SGD there; here the update of a round's local work.

The paper merges with λ^t, and so do easyFL, FairFL and FairMOO (``component/algorithm/AFL``). To
merge with λ^{t+1} reacts to a large loss one round earlier.
"""

from typing import Literal

from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.aggregators.client_mixture import ClientMixture
from pl_fed.arguments import check_choice, check_nonnegative
from pl_fed.functional.aggregation import weighted_sum
from pl_fed.functional.simplex import project_onto_simplex
from pl_fed.types import RoundContext


class AFL(Aggregator):
    """AFL: mean of the uploads, by weights that ascend on the clients' losses in each round.

    Source: Mohri et al., ICML 2019, Algorithm 1. It keeps a weight for each client. It is fair, not
    robust: a client with poisoned labels gets the largest weight. Breakdown point: 0. Use it with
    all clients in each round.

    Args:
        lr: γ ≥ 0, the step of the weights. 0 is the uniform mean. Common values are 0.01 to 0.5; a
            large step gives all weight to the client with the largest loss.
        merge: Merges the uploads by the weights ``"before"`` the step on this round's losses, as in
            the paper, or ``"after"`` it.

    Shape:
        - ``uploads``: [n, d], n at least 1; ``context.start_losses``: [n].
        - ``weights``: [n]; unused.
        - output: [d]; 0 if the weights of all clients in the cohort are 0.

    Attributes:
        mixture: λ, the weight of each client.

    Raises:
        ValueError: If an argument is out of range, there is no upload, a client lacks a finite
            loss, or the context lacks the clients' ids.

    Example:
        >>> import torch
        >>> losses = torch.tensor([0.5, 1.0, 2.0])
        >>> context = RoundContext(clients=torch.arange(3), start_losses=losses)
        >>> afl = AFL(lr=0.1)
        >>> afl(torch.tensor([[1.0], [2.0], [6.0]]), torch.ones(3), context)
        tensor([3.])
        >>> afl.mixture.shares
        tensor([0.2667, 0.3167, 0.4167], dtype=torch.float64)
    """

    shards = True
    needs_start_losses = True
    weighs_clients = True
    remembers_clients = True

    def __init__(self, lr: float = 0.1, merge: Literal["before", "after"] = "before") -> None:
        super().__init__()
        check_nonnegative(lr=lr)
        check_choice(("before", "after"), merge=merge)
        self.lr = lr
        self.merge = merge
        self.mixture = ClientMixture()

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into their mean by λ [d]."""
        self.require_uploads(uploads)
        clients = self.require_clients(uploads, context)
        losses = self.require_start_losses(uploads, context)
        self.mixture.admit_clients(clients, context)
        before = self.mixture.normalize_shares(clients)
        shares = self.mixture.shares
        climb = self.lr * losses.to(shares)
        ascended = shares.index_add(0, clients.to(shares.device), climb)
        self.mixture.shares = project_onto_simplex(ascended)
        chosen = before if self.merge == "before" else self.mixture.normalize_shares(clients)
        context.weigh_rows(chosen)
        return weighted_sum(uploads, chosen.to(uploads.device))

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: one upload can move the result anywhere."""
        return 0
