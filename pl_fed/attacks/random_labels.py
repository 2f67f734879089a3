"""Random labels.

T. Li, S. Hu, A. Beirami and V. Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, arXiv 2012.04221, attack A1 (label poisoning)::

    y ← uniform on {0, ..., num_classes − 1}

drawn once, and it may be the true label: so Ditto's code. Test labels stay clean.

Departs from FLAME's code ("On ADMM in Heterogeneous Federated Learning"), which draws a label anew
at every access to a sample, for training and test alike: ``redraw="access"`` does so, and leaves
the test labels clean.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from pl_fed.attacks.base import Attack
from pl_fed.random import integers, key, random_bits
from pl_fed.types import Batch, ClientContext


class RandomLabels(Attack):
    """Replace each training label by a random class.

    Args:
        redraw: When new labels are drawn: never, so that a sample keeps its first one (``False``);
            in every round (``True``); or at every access to a sample, that is in every pass over
            the client's data (``"access"``).

    Shape:
        - ``batch.targets``: class ids, [batch, ...]; every element gets a label of its own.
        - ``batch.samples``: [batch]; keys the draws.
        - ``batch.visits``: [batch]; keys them too with ``"access"``.

    Raises:
        TypeError: If ``redraw`` is not a bool, nor ``"access"``.
        ValueError: On :meth:`poison`, if the targets are real values or ``batch.samples`` is
            missing.

    Example:
        >>> import torch
        >>> y, index = torch.zeros(4, dtype=torch.int64), torch.arange(4)
        >>> batch = Batch(torch.zeros(4, 2), y, samples=index)
        >>> context = ClientContext(seed=0, round=0, client=7, num_classes=10)
        >>> RandomLabels().poison(batch, context).targets
        tensor([1, 0, 7, 5])
    """

    def __init__(self, redraw: bool | Literal["access"] = False) -> None:
        if not isinstance(redraw, bool) and redraw != "access":
            raise TypeError(
                f'Expected argument `redraw` to be a bool or "access" but got {redraw!r}.'
            )
        self.redraw = redraw

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return the batch with labels drawn by (seed, client, sample), or more: ``redraw``."""
        if context.num_classes < 1:
            raise ValueError(
                "Expected argument `context.num_classes` to be at least 1 for RandomLabels, which "
                f"has no label to draw for real-valued targets, but got {context.num_classes}."
            )
        samples = self.sample_ids(batch)
        parts = (context.client, context.round) if self.redraw else (context.client,)
        keys: Tensor | int = key(context.seed, "random-labels", *parts)
        if self.redraw == "access" and batch.visits is not None:
            first = batch.visits == 0  # is that of the round
            later = random_bits(keys, batch.visits)
            keys = torch.where(first, keys, later).reshape(-1, *[1] * (batch.targets.ndim - 1))
        labels = integers(keys, _element_ids(samples, batch.targets), context.num_classes)
        return batch._replace(targets=labels.to(batch.targets.dtype))


def _element_ids(index: Tensor, y: Tensor) -> Tensor:
    """Number the elements of all targets of the data set: one target may hold many labels."""
    width = math.prod(y.shape[1:])
    within = torch.arange(width, device=index.device)
    return (index.unsqueeze(1) * width + within).reshape(y.shape)
