"""Outliers: some pixels of some samples are random numbers.

B. Zhang, L. Mares De La Cruz and B. Wang, "FedTilt: Towards Multi-Level Fairness-Preserving and
Robust Federated Learning", section IV-B2 ("persistent random corruptions"): in every round anew,
30 % of the pixels of 30 % of the training samples::

    x_p ← uniform on [low, high)      for random pixels p of random samples

Test data stays clean. The paper does not say what values corrupted pixels get: here it is the range
of the sample's own numbers, unless another is given.
"""

import torch
from torch import Tensor

from pl_fed.arguments import check_finite, check_shares
from pl_fed.attacks.base import Attack
from pl_fed.random import key, random_bits, uniforms
from pl_fed.types import Batch, ClientContext


class Outliers(Attack):
    """Replace some pixels of some training samples by uniform numbers, anew in every round.

    Give it as the federation's ``corruption`` for all clients, as in FedTilt, or as its ``attack``
    for byzantine ones only. Each sample is hit or not by a draw of its own: their number is the
    share in the mean. The number of pixels is exact.

    Args:
        samples: Share of a client's samples that are hit, in [0, 1].
        pixels: Share of their pixels, in [0, 1].
        low: Smallest number, in the units of the inputs, after they are normalised; ``None`` for
            the smallest of the sample, or ``high`` where that is less.
        high: Largest number; ``None`` for the largest of the sample, or ``low`` where that is more.

    Shape:
        - ``batch.inputs``: images [batch, channels, height, width], where a pixel is hit in all
          channels, or [batch, ...], where each number is a pixel.
        - ``batch.samples``: [batch]; keys the draws.

    Raises:
        ValueError: If an argument is out of range, or ``batch.samples`` is missing.

    Example:
        >>> batch = Batch(torch.zeros(1, 4), torch.tensor([0]), samples=torch.tensor([5]))
        >>> context = ClientContext(seed=0, round=0, client=7, num_classes=10)
        >>> Outliers(samples=1.0, pixels=0.5, low=1.0, high=2.0).poison(batch, context).inputs
        tensor([[1.7178, 0.0000, 0.0000, 1.7364]])
    """

    needs_inputs = True

    def __init__(
        self,
        samples: float = 0.3,
        pixels: float = 0.3,
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        check_shares(samples=samples, pixels=pixels)
        check_finite(low=low, high=high)
        if low is not None and high is not None and not low <= high:
            raise ValueError(
                f"Expected argument `low` to be at most `high` = {high} but got {low}."
            )
        self.samples = samples
        self.pixels = pixels
        self.low = low
        self.high = high

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return the batch with pixels drawn by (seed, round, client, sample, pixel)."""
        samples = self.sample_ids(batch)
        draws = [
            key(context.seed, f"outlier-{what}", context.round, context.client)
            for what in ("samples", "pixels", "values")
        ]
        hit = uniforms(draws[0], samples) < self.samples
        which, values = (random_bits(draw, samples[hit]) for draw in draws[1:])
        x = batch.inputs.clone()
        x[hit] = self._corrupted(batch.inputs[hit], which, values)
        return batch._replace(inputs=x)

    def _corrupted(self, x: Tensor, which: Tensor, values: Tensor) -> Tensor:
        """Corrupt samples by one key each for where, and one for what."""
        flat = x.flatten(2) if x.ndim == 4 else x.flatten(1)[:, None]  # channels, pixels
        channels, pixels = flat.shape[1:]
        count = int(self.pixels * pixels + 0.5)
        if not count or not len(x):
            return x
        order = random_bits(which[:, None], torch.arange(pixels, device=x.device))
        hit = order <= order.kthvalue(count, dim=1, keepdim=True).values
        numbers = torch.arange(channels * pixels, device=x.device).view(channels, pixels)
        draws = uniforms(values[:, None, None], numbers).to(x.dtype)
        low, high = flat.amin((1, 2), keepdim=True), flat.amax((1, 2), keepdim=True)
        if self.low is not None:
            low, high = low.new_tensor(self.low), high.clamp(min=self.low)
        if self.high is not None:
            low, high = low.clamp(max=self.high), high.new_tensor(self.high)
        return torch.where(hit[:, None], low + (high - low) * draws, flat).view_as(x)
