"""Random labels: each training label becomes a random class.

T. Li, S. Hu, A. Beirami and V. Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, arXiv 2012.04221, attack A1 (label poisoning)::

    y ← uniform on {0, ..., num_classes − 1}

As in Ditto's code, each label is drawn once and may be the true label. Test labels stay clean.

FLAME's code ("On ADMM in Heterogeneous Federated Learning") draws a new label at every access to a
training or test sample. ``redraw="access"`` draws the training labels in this way. It departs from
FLAME's code in that test labels stay clean.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from pl_fed.attacks.base import Attack
from pl_fed.random import integers, key, random_bits
from pl_fed.types import Batch, ClientContext


class RandomLabels(Attack):
    """Random labels: a random class replaces every training label.

    Args:
        redraw: When the attack draws new labels: ``False`` for never, so that a sample keeps its
            first label; ``True`` for every round; ``"access"`` for every access to a sample, which
            is every pass over the client's data.

    Shape:
        - ``batch.targets``: class ids, [batch, ...]; every element has an independent label.
        - ``batch.samples``: [batch]; keys the draws.
        - ``batch.visits``: [batch]; also keys the draws with ``"access"``.

    Raises:
        TypeError: If ``redraw`` is neither a bool nor ``"access"``.
        ValueError: On :meth:`poison`, if the data have no classes or ``batch.samples`` is missing.

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
        """Return the batch with labels drawn by (seed, client, sample).

        With ``redraw``, the round is part of the key; with ``"access"``, the visit as well.
        """
        if context.num_classes < 1:
            raise ValueError(
                "Expected argument `context.num_classes` to be at least 1 for RandomLabels, which "
                f"has no label to draw for real-valued targets, but got {context.num_classes}."
            )
        samples = self.sample_ids(batch)
        parts = (context.client, context.round) if self.redraw else (context.client,)
        keys: Tensor | int = key(context.seed, "random-labels", *parts)
        if self.redraw == "access" and batch.visits is not None:
            is_first_visit = batch.visits == 0  # has the key of the round
            visit_keys = torch.where(is_first_visit, keys, random_bits(keys, batch.visits))
            keys = visit_keys.reshape(-1, *[1] * (batch.targets.ndim - 1))
        labels = integers(keys, _element_ids(samples, batch.targets), context.num_classes)
        return batch._replace(targets=labels.to(batch.targets.dtype))


def _element_ids(samples: Tensor, targets: Tensor) -> Tensor:
    """Return ids of all elements of the targets, different over the data set.

    Args:
        samples: Ids of the samples, int64 [batch].
        targets: Targets with one or more labels each [batch, ...].
    """
    width = math.prod(targets.shape[1:])
    offsets = torch.arange(width, device=samples.device)
    return (samples.unsqueeze(1) * width + offsets).reshape(targets.shape)
