"""Weak DP: clip the uploads to a norm bound, and add a little Gaussian noise to their mean.

Z. Sun, P. Kairouz, A. T. Suresh and H. B. McMahan, "Can You Really Backdoor Federated Learning?",
arXiv 1911.07963, section 4::

    Δ = mean of Δ_k / max(1, ‖Δ_k‖ / M)  +  N(0, σ² I)

The noise is far below the noise of differential privacy, and promises no ε: it blurs what a few
attackers write into single parameters. ``federation.privacy`` is differential privacy.

The noise has a key of the seed and the round, so it does not depend on the number of processes.

The paper has M = 3 and σ = 0.025 for EMNIST. Other codes differ:

- BackFed: M = 5, σ = 0.025, the noise on the model; M = 3 without noise.
- FLPoison: M = 3, and σ = 0.002 on every upload. Its mean of n uploads has noise of σ / √n.
- An adaptive variant takes M as the mean norm of the round's uploads. Forged uploads raise it. The
  median, by ``Clipping()`` as a pre-aggregator and ``max_norm: null`` here, withstands them.
"""

from torch import Tensor

from pl_fed.aggregators.base import Aggregator
from pl_fed.aggregators.clipping import Clipping
from pl_fed.aggregators.wrapper import AggregatorWrapper
from pl_fed.arguments import check_nonnegative
from pl_fed.random import key, normal_row
from pl_fed.types import RoundContext


class WeakDP(AggregatorWrapper):
    """Weak DP: mean of uploads with bounded norms, plus Gaussian noise that the server draws.

    Source: Sun et al., arXiv 1911.07963. Breakdown point: 0 by the definition of ``breakdown``, but
    the mean is never longer than M. It logs the number of shortened uploads as ``"clipped"``.

    Args:
        max_norm: M > 0; ``None`` clips nothing.
        std: σ, the standard deviation of the noise on each parameter, at least 0.
        aggregator: The aggregator that merges the clipped uploads; ``None`` for the uniform mean.

    Shape:
        - ``uploads``: [n, d], n at least 1.
        - ``weights``: [n]; for the aggregator.
        - output: [d].

    Raises:
        TypeError: If ``aggregator`` is no aggregator.
        ValueError: If an argument is out of range, or the aggregator refuses the uploads.

    Example:
        >>> import torch
        >>> uploads = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, -2.0]])
        >>> WeakDP(max_norm=2.0, std=0.0)(uploads, torch.ones(3), RoundContext())
        tensor([0.5000, 0.0000])
    """

    def __init__(
        self,
        max_norm: float | None = 3.0,
        std: float = 0.025,
        aggregator: Aggregator | None = None,
    ) -> None:
        super().__init__(aggregator)
        self.clipping = None if max_norm is None else Clipping(max_norm)
        check_nonnegative(std=std)
        self.max_norm = max_norm
        self.std = std

    def forward(self, uploads: Tensor, weights: Tensor, context: RoundContext) -> Tensor:
        """Merge uploads [n, d] into the noisy row of the clipped ones [d]."""
        self.require_uploads(uploads)
        if self.clipping is not None:
            uploads, weights, context = self.clipping(uploads, weights, context)
        merged: Tensor = self.aggregator(uploads, weights, context)
        noise = normal_row(key(context.seed, "weak dp", context.round), len(merged))
        return merged + (self.std * noise).to(merged)
