"""Outliers: random numbers in some pixels of some training samples.

B. Zhang, L. Mares De La Cruz and B. Wang, "FedTilt: Towards Multi-Level Fairness-Preserving and
Robust Federated Learning", section IV-B2 ("persistent random corruptions"): 30 % of the pixels of
30 % of the training samples, drawn in every round::

    x_p ← uniform on [low, high)      for random pixels p of random samples

Test data stay clean. The paper does not give the values of corrupted pixels: here, by default, they
are in the range of the sample's own numbers.
"""

import torch
from torch import Tensor

from pl_fed.arguments import check_finite, check_shares
from pl_fed.attacks.base import Attack
from pl_fed.functional.outliers import nth_smallest
from pl_fed.random import key, random_bits, uniforms
from pl_fed.types import Batch, ClientContext


class Outliers(Attack):
    """Outliers: uniform numbers in some pixels of some training samples, with new draws each round.

    Set it as ``federation.adversary.corruption`` for all clients, as in FedTilt, or as
    ``federation.adversary.attack`` for Byzantine clients only. Every sample has an independent
    draw. The share of corrupted samples is therefore ``samples`` in expectation only; the number
    of pixels in each is exact.

    Args:
        samples: Share of a client's samples with corrupted pixels, in [0, 1].
        pixels: Share of the pixels of such a sample, in [0, 1].
        low: Smallest value, in the units of the normalised inputs; ``None`` for the smallest
            number of the sample, or ``high`` if that is less.
        high: Largest value; ``None`` for the largest number of the sample, or ``low`` if that is
            more.

    Shape:
        - ``batch.inputs``: images [batch, channels, height, width], with a pixel corrupted in all
          channels, or [batch, ...], with every number as a pixel.
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
        sample_key, pixel_key, value_key = (
            key(context.seed, f"outlier-{purpose}", context.round, context.client)
            for purpose in ("samples", "pixels", "values")
        )
        selected = uniforms(sample_key, samples) < self.samples
        if samples.is_cuda:  # a selection of samples would wait for the GPU
            pixel_keys, value_keys = (random_bits(k, samples) for k in (pixel_key, value_key))
            corrupted = self._corrupt(batch.inputs, pixel_keys, value_keys)
            mask = selected.reshape(-1, *[1] * (batch.inputs.ndim - 1))
            return batch._replace(inputs=torch.where(mask, corrupted, batch.inputs))
        pixel_keys = random_bits(pixel_key, samples[selected])
        value_keys = random_bits(value_key, samples[selected])
        x = batch.inputs.clone()
        x[selected] = self._corrupt(batch.inputs[selected], pixel_keys, value_keys)
        return batch._replace(inputs=x)

    def _corrupt(self, x: Tensor, pixel_keys: Tensor, value_keys: Tensor) -> Tensor:
        """Return inputs with corrupted pixels.

        Args:
            x: Inputs of the selected samples [batch, ...].
            pixel_keys: Keys of the draws of pixels, int64 [batch].
            value_keys: Keys of the draws of values, int64 [batch].
        """
        flat = x.flatten(2) if x.ndim == 4 else x.flatten(1)[:, None]  # channels, pixels
        channels, pixels = flat.shape[1:]
        count = int(self.pixels * pixels + 0.5)
        if not count or not len(x):
            return x
        order = random_bits(pixel_keys[:, None], torch.arange(pixels, device=x.device))
        is_corrupted = order <= nth_smallest(order, count)[:, None]
        coordinates = torch.arange(channels * pixels, device=x.device).view(channels, pixels)
        draws = uniforms(value_keys[:, None, None], coordinates).to(x.dtype)
        low, high = flat.amin((1, 2), keepdim=True), flat.amax((1, 2), keepdim=True)
        if self.low is not None:
            low, high = low.new_tensor(self.low), high.clamp(min=self.low)
        if self.high is not None:
            low, high = low.clamp(max=self.high), high.new_tensor(self.high)
        return torch.where(is_corrupted[:, None], low + (high - low) * draws, flat).view_as(x)
