"""Gaussian noise on some training samples.

B. Zhang, L. Mares De La Cruz and B. Wang, "FedTilt: Towards Multi-Level Fairness-Preserving and
Robust Federated Learning", section IV-B2 ("persistent noises from the standard Gaussian
distributions")::

    x ← x + ε,   ε ~ N(0, std² I)      for random samples, drawn in every round

Test data stay clean. The paper does not give the share of samples with noise: here it is 30 %, as
for the paper's random corruptions.
"""

import math

import torch

from pl_fed.arguments import check_nonnegative, check_shares
from pl_fed.attacks.base import Attack
from pl_fed.random import key, normals, random_bits, uniforms
from pl_fed.types import Batch, ClientContext


class GaussianNoise(Attack):
    """Gaussian noise: added to some training samples, with new draws in every round.

    Set it as ``federation.adversary.corruption`` for all clients, as in FedTilt, or as
    ``federation.adversary.attack`` for Byzantine clients only. Every sample has an independent
    draw. The share of noisy samples is therefore ``samples`` in expectation only.

    Args:
        samples: Share of a client's samples with noise, in [0, 1].
        std: Standard deviation of the noise, at least 0, in the units of the normalised inputs.

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
        """Return the batch with noise drawn by (seed, round, client, sample, coordinate)."""
        samples = self.sample_ids(batch)
        selection_key = key(context.seed, "noise-samples", context.round, context.client)
        noise_key = key(context.seed, "noise-values", context.round, context.client)
        selected = uniforms(selection_key, samples) < self.samples
        x = batch.inputs.clone()
        coordinates = torch.arange(math.prod(x.shape[1:]), device=x.device)
        noise = normals(random_bits(noise_key, samples[selected])[:, None], coordinates)
        x[selected] += self.std * noise.to(x.dtype).view(-1, *x.shape[1:])
        return batch._replace(inputs=x)
