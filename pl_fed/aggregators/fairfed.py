"""FairFed: weights that sink for clients whose gap between groups is unlike the global gap.

Y. H. Ezzeldin, S. Yan, C. He, E. Ferrara and S. Avestimehr, "FairFed: Enabling Group Fairness in
Federated Learning", AAAI 2023, arXiv 2110.00857. With the groups A = 0 and 1 of a sensitive
attribute, a positive class 1, and predictions Ŷ of the global model w^t on training data::

    F = P(Ŷ = 1 | A = 0, Y = 1) − P(Ŷ = 1 | A = 1, Y = 1)      equal opportunity (EOD)
    F = P(Ŷ = 1 | A = 0) − P(Ŷ = 1 | A = 1)                    demographic parity (SPD)

F is the gap of all clients' samples together, F_k that of client k. F_k is undefined for a client
without such samples of a group; then accuracies replace the gaps. ω̄_k starts at n_k / Σ_j n_j for
n_k samples. In each round::

    Δ_k = |F − F_k|, or |Acc − Acc_k| if F_k is undefined
    ω̄_k ← ω̄_k − β (Δ_k − mean_j Δ_j)
    w^{t+1} = w^t + Σ_k ω_k u_k,     ω_k = ω̄_k / Σ_j ω̄_j

The formulas are those of two public implementations (declearn of Inria, and a strategy for Flower);
we had no text of the paper. The clients of the paper keep ω̄_k and compute Δ_k, and secure
aggregation reveals the sums alone. Here the server computes the same numbers from each client's
counts, which it therefore reads.

Departs from the paper:

- A client with a negative ω̄_k has the weight ω_k = 0. In both implementations its update counts
  backwards. ω̄_k itself stays negative, and may rise again.
- All clients take part there. Here F, Acc and the means are those of the cohort, and ω̄_k of an
  absent client stays. If all ω_k of a cohort are 0, the model stays.
- Acc is the accuracy over all samples together. If F is undefined, because a group is missing,
  accuracies replace all gaps. A client without samples keeps ω̄_k.
- Any class may be the positive one, also of more than two classes.
- It counts predictions on training data, as declearn does.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.aggregators.client_memory import ClientMemory
from pl_fed.arguments import check_choice, check_integers, check_nonnegative
from pl_fed.functional.aggregation import weighted_sum
from pl_fed.types import RoundContext


class FairFed(Aggregator):
    """FairFed: mean of the uploads, with smaller weights for clients of unusual group gaps.

    Source: Ezzeldin et al., AAAI 2023. It needs data with two groups and with classes. It is fair,
    not robust. Breakdown point: 0.

    Args:
        beta: β ≥ 0, the step of the weights. 0 is the mean weighted by samples. The weights start
            at about 1 / K for K clients, and a gap is at most 2, so that 1 is large for many
            clients.
        metric: The gap: ``"equal_opportunity"`` or ``"demographic_parity"``.
        positive: The id of the positive class, at least 0.

    Shape:
        - ``uploads``: [n, d], n at least 1; ``context.group_counts``: [n, 3, 2, classes].
        - ``weights``: [n], the number of training samples of each client.
        - output: [d]; 0 if the weights of all clients in the cohort are 0.

    Attributes:
        excess: The sum of Δ_k − mean Δ over the rounds of each client, float64 [clients, 1].

    Raises:
        ValueError: If an argument is out of range, there is no upload, or the context lacks the
            clients' ids or counts. If there are not two groups, or ``positive`` is no class.

    Example:
        >>> first = [[[0, 2], [0, 2]], [[0, 2], [0, 2]], [[0, 2], [0, 2]]]  # all correct: F_0 = 0
        >>> second = [[[0, 2], [0, 6]], [[0, 2], [3, 3]], [[0, 2], [0, 3]]]  # F_1 = 1 − 1/2
        >>> counts = torch.tensor([first, second])  # F = 1 − 5/8
        >>> context = RoundContext(clients=torch.arange(2), group_counts=counts)
        >>> fairfed = FairFed(beta=1.0)  # weights 4/12 − 1/8 and 8/12 + 1/8
        >>> fairfed(torch.tensor([[0.0], [24.0]]), torch.tensor([4, 8]), context)
        tensor([19.])
    """

    shards = True
    needs_group_counts = True
    weighs_clients = True
    remembers_clients = True

    def __init__(
        self,
        beta: float = 1.0,
        metric: Literal["equal_opportunity", "demographic_parity"] = "equal_opportunity",
        positive: int = 1,
    ) -> None:
        super().__init__()
        check_nonnegative(beta=beta)
        check_choice(("equal_opportunity", "demographic_parity"), metric=metric)
        check_integers(0, positive=positive)
        self.beta = beta
        self.metric = metric
        self.positive = positive
        self.excess = ClientMemory()

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into their mean by ω [d]."""
        self.require_uploads(uploads)
        clients = self.require_clients(uploads, context)
        counts = self.require_group_counts(uploads, context)
        self._check_counts(counts)
        self._add_excess(clients, counts.cpu())
        excess = self._read_excess(clients)
        samples = weights.cpu().double()
        total = context.num_samples or samples.sum()
        shares = (samples - self.beta * total * excess).clamp(min=0)  # max(ω̄, 0) times Σ_j n_j
        sum_of_shares = shares.sum()
        if sum_of_shares > 0:
            shares = shares / sum_of_shares
        context.weigh_rows(shares)
        return weighted_sum(uploads, shares.to(uploads.device))

    def _check_counts(self, counts: Tensor) -> None:
        """Refuse data without two groups or without the positive class."""
        _, _, num_groups, num_classes = counts.shape
        if num_groups != 2:
            raise ValueError(
                f"Expected argument `group` of the data to name two groups for FairFed, which"
                f" compares two, but got {num_groups}: join some of them to two."
            )
        if self.positive >= num_classes:
            raise ValueError(
                f"Expected argument `positive` of FairFed to be one of the {num_classes} classes,"
                f" 0 to {num_classes - 1}, but got {self.positive}: set the id of the class whose"
                " rates it compares."
            )

    def _add_excess(self, clients: Tensor, counts: Tensor) -> None:
        """Add Δ_k − mean Δ of a round, from counts [n, 3, groups, classes] of clients [n]."""
        order = clients.argsort(stable=True)  # sums do not depend on the order of the uploads
        clients, counts = clients[order], counts[order]
        pooled = counts.sum(0)
        gaps = (self._measure_gap(pooled) - self._measure_gap(counts)).abs()
        accuracies = (_measure_accuracy(pooled) - _measure_accuracy(counts)).abs()
        distances = torch.where(gaps.isnan(), accuracies, gaps)
        excess = (distances - distances.nanmean()).nan_to_num(0)  # NaN without any sample
        self.excess.write(clients, self._read_excess(clients)[:, None] + excess[:, None])

    def _read_excess(self, clients: Tensor) -> Tensor:
        """Return the summed excess of clients, float64 [n] on the CPU."""
        return self.excess.read(clients, torch.zeros(1, dtype=torch.float64))[:, 0]

    def _measure_gap(self, counts: Tensor) -> Tensor:
        """Return F of counts [..., 3, groups, classes], float64 [...]; NaN if it is undefined."""
        positives, assigned, correct = counts.double().unbind(-3)
        if self.metric == "equal_opportunity":
            rates = correct[..., self.positive] / positives[..., self.positive]
        else:
            rates = assigned[..., self.positive] / positives.sum(-1)
        return rates[..., 0] - rates[..., 1]

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: one upload can move the result anywhere."""
        return 0


def _measure_accuracy(counts: Tensor) -> Tensor:
    """Return the accuracy of counts [..., 3, groups, classes], float64 [...]; NaN if undefined."""
    samples, _, correct = counts.double().sum((-2, -1)).unbind(-1)
    return correct / samples
