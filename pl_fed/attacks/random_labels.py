"""Random labels.

T. Li, S. Hu, A. Beirami and V. Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, arXiv 2012.04221, attack A1 (label poisoning)::

    y ← uniform on {0, ..., num_classes − 1}

drawn once, and it may be the true label: so Ditto's code. Test labels stay clean.

Departs from FLAME's code ("On ADMM in Heterogeneous Federated Learning"), which draws a label anew
at every access to a sample, for training and test alike: ``redraw=True`` draws anew every round,
which is the same where a round is one epoch, and leaves the test labels clean.
"""

import math

import torch
from torch import Tensor

from pl_fed.attacks.base import Attack
from pl_fed.functional.random import integers, key
from pl_fed.types import Batch, ClientContext


class RandomLabels(Attack):
    """Replace each training label by a random class.

    Args:
        redraw: Whether every round draws new labels; by default a sample keeps its first one.

    Shape:
        - ``batch.y``: class ids, [batch, ...]; every element gets a label of its own.
        - ``batch.samples``: [batch]; keys the draws.

    Raises:
        TypeError: If ``redraw`` is not a bool.
        ValueError: On :meth:`poison`, if the targets are real values or ``batch.samples`` is
            missing.

    Example:
        >>> import torch
        >>> y, index = torch.zeros(4, dtype=torch.int64), torch.arange(4)
        >>> batch = Batch(torch.zeros(4, 2), y, samples=index)
        >>> context = ClientContext(seed=0, round=0, client=7, num_classes=10)
        >>> RandomLabels().poison(batch, context).y
        tensor([1, 0, 7, 5])
    """

    def __init__(self, redraw: bool = False) -> None:
        if not isinstance(redraw, bool):
            raise TypeError(f"Expected argument `redraw` to be a bool but got {redraw!r}.")
        self.redraw = redraw

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return the batch with labels drawn by (seed, client, sample), and round if ``redraw``."""
        if context.num_classes < 1:
            raise ValueError(
                "Expected argument `context.num_classes` to be at least 1 for RandomLabels, which "
                f"has no label to draw for real-valued targets, but got {context.num_classes}."
            )
        if batch.samples is None:
            raise ValueError(
                "Expected argument `batch.samples` to be the ids of the samples but got None."
            )
        parts = (context.client, context.round) if self.redraw else (context.client,)
        draw = key(context.seed, "random-labels", *parts)
        labels = integers(draw, _element_ids(batch.samples, batch.y), context.num_classes)
        return batch._replace(y=labels.to(batch.y.dtype))


def _element_ids(index: Tensor, y: Tensor) -> Tensor:
    """Number the elements of all targets of the data set: one target may hold many labels."""
    width = math.prod(y.shape[1:])
    within = torch.arange(width, device=index.device)
    return (index.unsqueeze(1) * width + within).reshape(y.shape)
