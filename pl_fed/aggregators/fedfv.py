"""FedFV: projects the updates of clients that conflict with each other, now and in past rounds.

Z. Wang, X. Fan, J. Qi, C. Wen, C. Wang and R. Yu, "Federated Learning with Fair Averaging", IJCAI
2021, arXiv 2104.14937, Algorithms 1 to 3. The clients are ordered by the loss F_k(w^t), ascending,
and the last n − ⌈(n − 1)(1 − α)⌉ of them keep their updates::

    internal: for each other i, and for j in this order, if Δ_i' · Δ_j < 0:
                  Δ_i' ← Δ_i' − (Δ_i' · Δ_j / ‖Δ_j‖²) Δ_j      Δ_j is the original update
              Δ = mean of the Δ_k'
    external: for age = τ, …, 1, with C = Σ Δ_k over the clients of the last update in that round,
              that are not in this round, and that have Δ · Δ_k < 0:
                  Δ ← Δ − (Δ · C / ‖C‖²) C
    scale:    Δ ← Δ ‖mean of the original updates‖ / ‖Δ‖

All steps stay in the span of the updates, so they work on inner products.

Departs from the authors' code (easyFL). It counts this round as one of the last τ; here, as in the
paper, the τ rounds before it count. It begins with the external conflicts in round τ; here in the
first round with a past. Updates of length 0 conflict with none.
"""

import math

import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.arguments import check_integers, check_shares
from pl_fed.functional.aggregation import gram_matrix, linear_combinations, merging_dtype
from pl_fed.nets.rows import finite_rows
from pl_fed.types import RoundContext

_CANCELLED = 1e-13  # squared length of a sum, relative to its terms, that rounding leaves


class FedFV(Aggregator):
    """FedFV: mean of the uploads without their conflicts, as long as their plain mean.

    Source: Wang et al., IJCAI 2021. It keeps the last upload of each client that took part in the
    last τ rounds. Breakdown point: 0.

    Args:
        alpha: α in [0, 1], the share of the clients with the largest losses whose updates stay as
            they are. At 0 all are projected, at 1 none.
        tau: τ, the number of past rounds with external conflicts, at least 0. It has no effect if
            all clients take part in each round.

    Shape:
        - ``uploads``: [n, d], n at least 1, finite; d is constant over all rounds;
          ``context.start_losses``: [n].
        - ``weights``: [n]; unused.
        - output: [d]; 0 if the uploads cancel.

    Attributes:
        past: The last uploads of clients in the last τ rounds, [m, d].
        past_clients: The ids of these clients, int64 [m].
        past_steps: The number of merged rounds before each of these uploads, int64 [m].

    Raises:
        ValueError: If an argument is out of range, there is no upload, an upload is not finite, a
            client lacks a finite loss, or the context lacks the clients' ids.

    Example:
        >>> uploads = torch.tensor([[-1.0, 0.0], [0.5, -1.0], [1.0, 1.0]])
        >>> losses = torch.tensor([0.2, 0.9, 0.5])
        >>> context = RoundContext(clients=torch.arange(3), start_losses=losses)
        >>> FedFV()(uploads, torch.ones(3), context)
        tensor([ 0.1023, -0.1316])
    """

    needs_start_losses = True
    remembers_clients = True

    past: Tensor
    past_clients: Tensor
    past_steps: Tensor
    step: Tensor

    def __init__(self, alpha: float = 0.1, tau: int = 1) -> None:
        super().__init__()
        check_shares(alpha=alpha)
        check_integers(0, tau=tau)
        self.alpha = alpha
        self.tau = tau
        self.add_memory("past")
        self.add_memory("past_clients", torch.empty(0, dtype=torch.int64))
        self.add_memory("past_steps", torch.empty(0, dtype=torch.int64))
        self.add_memory("step", torch.zeros((), dtype=torch.int64))  # merged rounds so far

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into their mean without conflicts [d]."""
        self.require_uploads(uploads)
        clients = self.require_clients(uploads, context)
        losses = self.require_start_losses(uploads, context)
        if not finite_rows(uploads).all():
            raise self.overflow_error(uploads)
        by_client = clients.argsort(stable=True)
        clients, own = clients[by_client], uploads.detach()[by_client.to(uploads.device)]
        own = own.to(merging_dtype(own))
        is_absent = ~torch.isin(self.past_clients.cpu(), clients)
        absent = is_absent.to(own.device)
        rows = torch.cat([own, self.past[absent].to(own)]) if is_absent.any() else own
        ages = (self.step - self.past_steps)[is_absent.to(self.past_steps.device)]
        merged = self._merge(rows, losses.cpu()[by_client], ages.cpu())
        self._remember(own, clients, absent)
        return merged

    def _merge(self, rows: Tensor, losses: Tensor, ages: Tensor) -> Tensor:
        """Return the merged update of n uploads [n, d] above the past ones of some ages [m]."""
        n, products = len(losses), gram_matrix(rows).cpu()
        order = losses.argsort(stable=True)
        num_projected = math.ceil((n - 1) * (1 - self.alpha)) if self.alpha else n
        is_projected = torch.zeros(n, dtype=torch.bool)
        is_projected[order[:num_projected]] = True
        shares = torch.zeros(len(rows), dtype=torch.float64)
        shares[:n] = project_conflicts(products[:n, :n], order, is_projected).mean(0)
        for age in range(self.tau, 0, -1):
            conflicts = torch.zeros_like(shares)
            conflicts[n:] = (ages == age).double()
            conflicts *= products @ shares < 0
            length = conflicts @ products @ conflicts
            if length > 0:
                shares -= (shares @ products @ conflicts) / length * conflicts
        mean = torch.zeros_like(shares)
        mean[:n] = 1 / n
        length, target = shares @ products @ shares, mean @ products @ mean
        if length <= _CANCELLED * (shares.abs() @ products.diagonal().sqrt()) ** 2:
            return rows.new_zeros(rows.shape[1])
        shares *= (target.clamp(min=0) / length).sqrt()
        return linear_combinations(rows, shares[None].to(rows.device))[0]

    def _remember(self, own: Tensor, clients: Tensor, is_absent: Tensor) -> None:
        """Keep this round's uploads, and those of absent clients that count in the next round."""
        self.step = self.step + 1
        if not self.tau:
            return
        ages = self.step - self.past_steps
        is_recent = is_absent.to(ages.device) & (ages <= self.tau)
        past = self.past[is_recent.to(own.device)].to(own) if is_recent.any() else own[:0]
        self.past = torch.cat([past, own])
        self.past_clients = torch.cat(
            [self.past_clients[is_recent], clients.to(self.past_clients.device)]
        )
        steps = self.step.expand(len(own)) - 1
        self.past_steps = torch.cat([self.past_steps[is_recent], steps])

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: one upload can move the result anywhere."""
        return 0


def project_conflicts(products: Tensor, order: Tensor, is_projected: Tensor) -> Tensor:
    """Return the rows without their conflicts, as combinations of the rows.

    Args:
        products: The Gram matrix of the rows, float64 [n, n].
        order: The order of the rows to project on, int64 [n].
        is_projected: A mask of the rows that change, bool [n].

    Returns:
        The coefficients of row k, in row k, float64 [n, n].

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [-1.0, 1.0]], dtype=torch.float64)
        >>> mask = torch.tensor([True, False])
        >>> project_conflicts(rows @ rows.T, torch.tensor([0, 1]), mask) @ rows
        tensor([[ 0.5000,  0.5000],
                [-1.0000,  1.0000]], dtype=torch.float64)
    """
    coefficients = torch.eye(len(products), dtype=products.dtype)
    for other in order.tolist():
        length = products[other, other]
        if length > 0:
            parts = (coefficients @ products[:, other] / length).clamp(max=0) * is_projected
            parts[other] = 0
            coefficients[:, other] -= parts
    return coefficients
