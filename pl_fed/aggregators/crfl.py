"""CRFL: clip the global model after each round, and add Gaussian noise to it.

C. Xie, M. Chen, P.-Y. Chen and B. Li, "CRFL: Certifiably Robust Federated Learning against Backdoor
Attacks", ICML 2021, arXiv 2106.08283, Algorithm 1. In round t = 1, ..., T, with A the mean::

    w ← w^t + A(Δ_1, ..., Δ_n),    ρ_t = min(ρ_max, ρ_0 + g t)
    w^{t+1} = w / max(1, ‖w‖ / ρ_t) + N(0, σ² I)       without the noise for t = T

The clipped object is the MODEL: all its parameters in one norm. The aggregator returns the update
that leads from w^t to w^{t+1}. So the server's optimizer has to be plain SGD with learning rate 1.

Algorithm 2 is :class:`pl_fed.Smoothing`: with ``federation.smoothing``, a test has the metrics of
the votes of noisy copies of the global model. The seed alone keys their noise, so that each test of
a run has the same. :func:`~pl_fed.nets.noisy_copies.noisy_copies` and
:func:`~pl_fed.functional.certification.count_votes` give the votes themselves, and
:func:`~pl_fed.functional.certification.crfl_radius` the size of a trigger that they withstand.

As in the authors' code: the schedule (MNIST: ρ_0 = 2, g = 0.1, ρ_max = 15; EMNIST: 4 and 0.25;
LOAN: 2 and 0.025), σ = 0.01, and no noise in the last round.

Departs from it:

- It adds noise to the running statistics of norms, too, which may make a variance negative. Here
  they are untouched, and do not count in ‖w‖.
- It divides by ‖w‖ + 10⁻⁶.
- It measures the accuracy of a round before the noise. Here the metrics of a round are those of the
  broadcast, with its noise.
- A is its mean weighted by samples, ``Mean(weighting="samples")`` here. Any aggregator can merge.

FLPoison's CRFL is another defence. It clips the merged update at 3 and adds N(0, 0.001²):
:class:`~pl_fed.aggregators.WeakDP` in pl_fed.
"""

from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.aggregators.wrapper import AggregatorWrapper
from pl_fed.arguments import check_nonnegative, check_positive
from pl_fed.functional.aggregation import row_norm
from pl_fed.random import key, normal_row
from pl_fed.types import RoundContext


class CRFL(AggregatorWrapper):
    """CRFL: moves the global model to the clipped and noisy sum of itself and the mean update.

    Source: Xie et al., ICML 2021, Algorithm 1. Breakdown point: 0 by the definition of
    ``breakdown``, but the norm of the model never exceeds ρ_t and the noise. If a run ends before
    its last planned round, its model has noise. If a finished run goes on with more rounds, it
    trains on from the model without noise, and differs from a run that planned all rounds.

    The norm counts all parameters that clients send, without a part of the net that they keep to
    themselves, such as FedRep's head.

    Args:
        start: ρ_0, the bound on the norm of the model without growth, above 0.
        growth: g, the growth of the bound per round, at least 0.
        max_norm: ρ_max, the largest bound, above 0.
        std: σ, the standard deviation of the noise on each parameter, at least 0.
        aggregator: The aggregator that merges the uploads; ``None`` for the uniform mean.

    Shape:
        - ``uploads``: [n, d], n at least 1; ``context.broadcast``: [d].
        - ``weights``: [n]; for the aggregator.
        - output: [d], w^{t+1} − w^t.

    Raises:
        TypeError: If ``aggregator`` is no aggregator.
        ValueError: If an argument is out of range, the aggregator refuses the uploads, or the
            broadcast has another length.

    Example:
        >>> import torch
        >>> context = RoundContext(num_rounds=1, broadcast=torch.tensor([3.0, 4.0]))
        >>> CRFL(start=2.4)(torch.zeros(1, 2), torch.ones(1), context)  # to norm 2.4 + 0.1
        tensor([-1.5000, -2.0000])
    """

    sets_model = True

    def __init__(
        self,
        start: float = 2.0,
        growth: float = 0.1,
        max_norm: float = 15.0,
        std: float = 0.01,
        aggregator: Aggregator | None = None,
    ) -> None:
        super().__init__(aggregator)
        check_positive(start=start, max_norm=max_norm)
        check_nonnegative(growth=growth, std=std)
        self.start = start
        self.growth = growth
        self.max_norm = max_norm
        self.std = std

    def bound_norm(self, round: int) -> float:
        """Return ρ_t, the bound on the norm of the model after a round.

        Args:
            round: The round, from 0; the paper's t − 1.
        """
        return min(self.max_norm, self.start + self.growth * (round + 1))

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the update to the clipped, noisy model [d]."""
        merged: Tensor = self.aggregator(uploads, weights, context)
        broadcast = self.require_broadcast(uploads, context).double()
        model = broadcast + merged
        norm = row_norm(context.select_sent(model))
        model *= (self.bound_norm(context.round) / norm).clamp(max=1)
        if context.round + 1 != context.num_rounds:
            noise = normal_row(key(context.seed, "crfl", context.round), len(model))
            model += self.std * noise.to(model)
        return (model - broadcast).to(merged.dtype)
