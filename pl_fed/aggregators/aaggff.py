"""AAggFF: the clients' weights are an online learner's decisions, paid by the clients' losses.

S.-J. Hahn, G.-S. Kim and J. Lee, "Pursuing Overall Welfare in Federated Learning through Sequential
Decision Making", ICML 2024, arXiv 2405.20821, Algorithms 2 and 3. In round t, F_k is the loss of
w^t over all training data of client k, and CDF is a distribution function with values in [0, 1].
The response of a client and the decision loss are::

    r_k = c · CDF(F_k / mean_j F_j),     ℓ(p) = −log(1 + ⟨p, r⟩)

AAggFF-S, with all K clients in each round, is the online Newton step. With c = 1 / K,
g^t = −r / (1 + ⟨p^t, r⟩), α = 4 and β = K / 4::

    p^{t+1} = argmin over the simplex of Σ_{s≤t} ( ⟨g^s, p⟩ + β/2 ⟨g^s, p − p^s⟩² ) + α/2 ‖p‖²

AAggFF-D, with a share C of the clients in each round, is exponentiated gradient by dual averaging.
With c = C and m the mean response of the cohort::

    r̂_k = m + (r_k − m) / C in the cohort, m outside;     h^t = −r̂ / (1 + m)
    p^{t+1} ∝ exp( −√(log K) / ((2 + C) √(t + 1)) · Σ_{s≤t} h^s )

p starts at 1/K. Both merge round t by p^{t+1}, divided by its sum over the cohort.

The constants, the responses and Algorithm 3 are from the authors' code (vaseline555/AAggFF,
``aaggffserver.py``), and ℓ from summaries of the paper; we had no text of its Algorithm 2. Departs
from that code:

- Its quadratic term of AAggFF-S lacks p^s, and adds α I a second time, times β. Here it is that of
  the online Newton step as the follower of a regularised leader.
- Its r̂_k of AAggFF-D lacks the first m in the cohort. Here r̂ is the doubly robust estimator, whose
  mean over random cohorts is r. The term of its gradient that is equal for all clients is left out,
  because it changes no decision.
- Its normal distribution function is not one. Here it is that with mean 1 and deviation 1.
- It chooses the variant by the configured share of clients; here ``setting`` does. In
  ``"cross_silo"``, an absent client has response 0, as in its sums.
- It has a fixed set of clients. Here a client that joins later has the mean response in all rounds
  before, and one that leaves keeps a share, as a client outside of the cohort.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.aggregators.client_mixture import ClientMixture
from pl_fed.arguments import check_choice
from pl_fed.functional.aggregation import weighted_sum
from pl_fed.functional.simplex import minimize_on_simplex
from pl_fed.types import RoundContext

_RESPONSES: dict[str, Callable[[Tensor], Tensor]] = {  # of losses relative to their mean
    "weibull": lambda x: 1 - (-x.square()).exp(),
    "exponential": lambda x: 1 - (-x).exp(),
    "frechet": lambda x: (-1 / x).exp(),
    "normal": lambda x: torch.special.ndtr(x - 1),
    "gumbel": lambda x: (-(1 - x).exp()).exp(),
    "logistic": lambda x: (x - 1).sigmoid(),
}
_RIDGE = 4.0  # α of the online Newton step


class AAggFF(Aggregator):
    """AAggFF: mean of the uploads, by weights that an online learner decides from the losses.

    Source: Hahn et al., ICML 2024. It keeps the weight and the summed gradient of each client; in
    ``"cross_silo"``, a matrix of all pairs of clients, too. It is fair, not robust. Breakdown
    point: 0.

    Args:
        setting: ``"cross_silo"`` for AAggFF-S, with all clients in each round, or
            ``"cross_device"`` for AAggFF-D, with some of many clients.
        response: The distribution function of relative losses: ``"weibull"`` of shape 2,
            ``"exponential"``, ``"frechet"``, ``"normal"``, ``"gumbel"`` or ``"logistic"``.

    Shape:
        - ``uploads``: [n, d], n at least 1; ``context.start_losses``: [n], at least 0.
        - ``weights``: [n]; unused.
        - output: [d]; 0 if the weights of all clients in the cohort are 0.

    Attributes:
        mixture: p, the weight of each client.
        gradients: The linear part of the decision, by client id, float64 [K].
        curvature: β Σ g gᵀ of AAggFF-S, float64 [K, K].

    Raises:
        ValueError: If an argument is unknown, there is no upload, a client lacks a finite loss of
            at least 0, or the context lacks the clients' ids.

    Example:
        >>> losses = torch.tensor([0.5, 1.0, 2.0])
        >>> context = RoundContext(clients=torch.arange(3), start_losses=losses)
        >>> aaggff = AAggFF("cross_device")
        >>> _ = aaggff(torch.eye(3), torch.ones(3), context)
        >>> aaggff.mixture.shares
        tensor([0.3134, 0.3316, 0.3550], dtype=torch.float64)
    """

    shards = True
    needs_start_losses = True
    weighs_clients = True
    remembers_clients = True

    gradients: Tensor
    curvature: Tensor
    step: Tensor

    def __init__(
        self,
        setting: Literal["cross_silo", "cross_device"] = "cross_silo",
        response: Literal[
            "weibull", "exponential", "frechet", "normal", "gumbel", "logistic"
        ] = "weibull",
    ) -> None:
        super().__init__()
        check_choice(("cross_silo", "cross_device"), setting=setting)
        check_choice(_RESPONSES, response=response)
        self.setting = setting
        self.response = response
        self.mixture = ClientMixture()
        self.add_memory("gradients", torch.empty(0, dtype=torch.float64))
        self.add_memory("curvature", torch.empty(0, 0, dtype=torch.float64))
        self.add_memory("step", torch.zeros((), dtype=torch.int64))  # merged rounds so far

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into their mean by p [d]."""
        self.require_uploads(uploads)
        clients = self.require_clients(uploads, context)
        losses = self.require_nonnegative_losses(uploads, context)
        self.mixture.admit_clients(clients, context)
        self._admit_clients()
        by_client = clients.argsort(stable=True)
        responses = self._respond(losses.cpu()[by_client])
        self.step = self.step + 1
        if self.setting == "cross_silo":
            self._decide_by_newton_step(clients[by_client], responses)
        else:
            self._decide_by_dual_averaging(clients[by_client], responses)
        chosen = self.mixture.normalize_shares(clients)
        context.weigh_rows(chosen)
        return weighted_sum(uploads, chosen.to(uploads.device))

    def _admit_clients(self) -> None:
        """Give new clients of the mixture the mean of the other clients' gradients.

        In rounds before they joined, they have the mean response: with equal losses, all clients
        have equal weights.
        """
        before, after = len(self.gradients), len(self.mixture.shares)
        if after > before:
            self.gradients = _append_means(self.gradients, after)
            if self.setting == "cross_silo":
                self.curvature = _append_means(_append_means(self.curvature, after).T, after)

    def _respond(self, losses: Tensor) -> Tensor:
        """Return CDF(F_k / mean F), float64 [n]; equal losses of 0 are the mean."""
        losses, mean = losses.double(), losses.double().mean()
        relative = losses / mean if mean > 0 else torch.ones_like(losses)
        return _RESPONSES[self.response](relative)

    def _decide_by_newton_step(self, clients: Tensor, responses: Tensor) -> None:
        """Move p by the online Newton step, for responses [n] of clients with these ids."""
        before = self.mixture.shares
        num_clients = len(before)
        own = torch.zeros_like(before)
        own[clients.to(own.device)] = (responses / num_clients).to(own)
        gradient = -own / (1 + before @ own)
        strength = num_clients / 4
        self.gradients = self.gradients + gradient - strength * (gradient @ before) * gradient
        self.curvature = self.curvature + strength * gradient.outer(gradient)
        ridge = _RIDGE * torch.eye(num_clients, dtype=own.dtype, device=own.device)
        self.mixture.shares = minimize_on_simplex(self.curvature + ridge, self.gradients)

    def _decide_by_dual_averaging(self, clients: Tensor, responses: Tensor) -> None:
        """Move p by exponentiated gradient, for responses [n] of clients with these ids."""
        num_clients = len(self.mixture.shares)
        share = len(clients) / num_clients
        own = (share * responses).to(self.gradients)
        mean = own.mean()
        estimates = mean.expand(num_clients).clone()
        estimates[clients.to(estimates.device)] += (own - mean) / share
        self.gradients = self.gradients - estimates / (1 + mean)
        rate = math.sqrt(math.log(num_clients) / (int(self.step) + 1)) / (2 + share)
        self.mixture.shares = (-rate * self.gradients).softmax(0)

    def max_byzantine(self, num_uploads: int) -> int:
        """Return 0: one upload can move the result anywhere."""
        return 0


def _append_means(rows: Tensor, number: int) -> Tensor:
    """Return rows [n, ...], and their mean as further rows: ``number`` in all; zeros for n = 0."""
    mean = rows.sum(0, keepdim=True) / max(1, len(rows))
    return torch.cat([rows, mean.expand(number - len(rows), *rows.shape[1:])])
