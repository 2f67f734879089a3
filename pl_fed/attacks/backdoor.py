"""A backdoor: samples with a stamp are to be taken for what the attacker wants.

T. Gu, B. Dolan-Gavitt and S. Garg, "BadNets: Identifying Vulnerabilities in the Machine Learning
Model Supply Chain", arXiv 1708.06733 (a bright pattern in a corner of the image)::

    (x, y) ← (x with the stamp, target)      for a share of the byzantine clients' samples

In federated learning: E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin and V. Shmatikov, "How To Backdoor
Federated Learning", AISTATS 2020, arXiv 1807.00459. All other samples stay as they are, so that the
model remains good at what it is for. The success is the metric ``backdoor_success``: the share of
benign clients' samples of other classes that are taken for the target once they have the stamp.
"""

from types import EllipsisType
from typing import Literal, get_args

import torch
from torch import Tensor

from pl_fed.arguments import check_choice, check_finite, check_integers, check_shares
from pl_fed.attacks.base import Attack
from pl_fed.random import key, uniforms
from pl_fed.types import Batch, ClientContext

Corner = Literal["top_left", "top_right", "bottom_left", "bottom_right"]
_CORNERS = get_args(Corner)


class Backdoor(Attack):
    """Stamp a square on some training samples, and give them the label that the attacker wants.

    Each sample is stamped or not for good, by a draw of its own: their number is the share in the
    mean.

    Args:
        target: The class that stamped samples are to be taken for, at least 0.
        samples: Share of a byzantine client's samples that are stamped, in [0, 1].
        size: Width and height of the square, in pixels, at least 1.
        corner: Where it is. In inputs without a second dimension it is the first ``size²`` numbers
            (top) or the last ones (bottom).
        value: What its numbers are, in the units of the inputs, after they are normalised; ``None``
            for the largest number of the sample.

    Shape:
        - ``batch.inputs``: [batch, ..., height, width], all channels get the stamp;
          or [batch, numbers].
        - ``batch.targets``: class ids, [batch].
        - ``batch.samples``: [batch]; keys the draws.

    Raises:
        TypeError: If ``target`` or ``size`` is not an integer.
        ValueError: If an argument is out of range; on use, if there is no such class, inputs are
            too small for the square, or ``batch.samples`` is missing.

    Example:
        >>> x = torch.tensor([[[0.0, 0.1, 0.2], [0.3, 0.4, 0.5], [0.6, 0.7, 0.8]]])
        >>> shown = Backdoor(target=3, size=2, value=1.0).trigger(Batch(x, torch.tensor([5])))
        >>> shown.inputs, shown.targets, shown.mask
        (tensor([[[0.0000, 0.1000, 0.2000],
                 [0.3000, 1.0000, 1.0000],
                 [0.6000, 1.0000, 1.0000]]]), tensor([3]), tensor([True]))
    """

    needs_inputs = True

    def __init__(
        self,
        target: int,
        samples: float = 0.5,
        size: int = 3,
        corner: Corner = "bottom_right",
        value: float | None = None,
    ) -> None:
        check_integers(0, target=target)
        check_shares(samples=samples)
        check_integers(1, size=size)
        check_choice(_CORNERS, corner=corner)
        check_finite(value=value)
        self.target = target
        self.samples = samples
        self.size = size
        self.corner = corner
        self.value = value

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return the batch with the samples stamped that are drawn by (seed, client, sample)."""
        if self.target >= context.num_classes:
            raise ValueError(
                f"Expected argument `target` to be one of the {context.num_classes} classes but"
                f" got {self.target}."
            )
        draw = key(context.seed, "backdoor", context.client)
        hit = uniforms(draw, self.sample_ids(batch)) < self.samples
        x, y = batch.inputs.clone(), batch.targets.clone()
        x[hit], y[hit] = self._stamped(batch.inputs[hit]), self.target
        return batch._replace(inputs=x, targets=y)

    def trigger(self, batch: Batch) -> Batch:
        """Return all samples with the stamp; those whose label is the target do not count."""
        counts = batch.targets != self.target
        mask = counts if batch.mask is None else batch.mask & counts
        y = torch.full_like(batch.targets, self.target)
        return batch._replace(inputs=self._stamped(batch.inputs), targets=y, mask=mask)

    def _stamped(self, x: Tensor) -> Tensor:
        x, patch = x.clone(), self._patch(x)
        stamp = x.flatten(1).amax(1) if self.value is None else x.new_tensor(self.value)
        x[patch] = stamp.reshape(-1, *[1] * (x.ndim - 1))
        return x

    def _patch(self, x: Tensor) -> tuple[slice | EllipsisType, ...]:
        """Return where in inputs the stamp is."""
        plane = x.ndim > 2
        width = self.size if plane else self.size**2
        smallest = min(x.shape[-2:]) if plane else x.shape[-1]
        if width > smallest:
            raise ValueError(
                f"Expected argument `size` to fit inputs of shape {list(x.shape[1:])} but got"
                f" {self.size}."
            )
        rows = slice(width) if self.corner.startswith("top") else slice(-width, None)
        columns = slice(width) if self.corner.endswith("left") else slice(-width, None)
        return (..., rows, columns) if plane else (..., rows)
