"""Gaussian noise on some samples.

B. Zhang, L. Mares De La Cruz and B. Wang, "FedTilt: Towards Multi-Level Fairness-Preserving and
Robust Federated Learning", section IV-B2 ("persistent noises from the standard Gaussian
distributions")::

    x ← x + ε,   ε ~ N(0, std² I)      for random samples, in every round anew

Test data stays clean. The paper does not say how many samples get it: here it is 30 % of them, as
for its random corruptions.
"""

import math

import torch

from pl_fed.arguments import check_nonnegative, check_shares
from pl_fed.attacks.base import Attack
from pl_fed.random import key, normals, random_bits, uniforms
from pl_fed.types import Batch, ClientContext


class GaussianNoise(Attack):
    """Add Gaussian noise to some training samples, anew in every round.

    Give it as the federation's ``corruption`` for all clients, as in FedTilt, or as its ``attack``
    for byzantine ones only. Each sample is hit or not by a draw of its own: their number is the
    share in the mean.

    Args:
        samples: Share of a client's samples that are hit, in [0, 1].
        std: Standard deviation of the noise, at least 0, in the units of the inputs, after they are
            normalised.

    Shape:
        - ``batch.inputs``: [batch, ...].
        - ``batch.samples``: [batch]; keys the draws.

    Raises:
        ValueError: If an argument is out of range, or ``batch.samples`` is missing.

    Example:
        >>> batch = Batch(torch.zeros(2, 2), torch.zeros(2), samples=torch.arange(2))
        >>> context = ClientContext(seed=0, round=0, client=7, num_classes=10)
        >>> GaussianNoise(samples=1.0).poison(batch, context).inputs
        tensor([[-1.1533,  0.7828],
                [-0.2425, -0.5546]])
    """

    needs_inputs = True

    def __init__(self, samples: float = 0.3, std: float = 1.0) -> None:
        check_shares(samples=samples)
        check_nonnegative(std=std)
        self.samples = samples
        self.std = std

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return the batch with noise drawn by (seed, round, client, sample, number)."""
        samples = self.sample_ids(batch)
        which, noise = (
            key(context.seed, f"noise-{what}", context.round, context.client)
            for what in ("samples", "values")
        )
        hit = uniforms(which, samples) < self.samples
        x = batch.inputs.clone()
        numbers = torch.arange(math.prod(x.shape[1:]), device=x.device)
        draws = normals(random_bits(noise, samples[hit])[:, None], numbers)
        x[hit] += self.std * draws.to(x.dtype).view(-1, *x.shape[1:])
        return batch._replace(inputs=x)
