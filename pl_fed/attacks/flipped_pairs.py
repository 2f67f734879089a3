"""Flipped pairs: training labels of some classes become one other class each.

V. Tolpegin, S. Truex, M. E. Gursoy and L. Liu, "Data Poisoning Attacks Against Federated Learning
Systems", ESORICS 2020, arXiv 2007.08432 (targeted label flipping)::

    y ← pairs[y]      if the class y has a pair

All other classes stay as they are, so the accuracy changes little. The metric ``backdoor_success``
measures the success: among benign clients' samples of the source classes, the share that the model
classifies as the target of their class. Samples need no trigger for that. The paper takes 0 → 2,
1 → 9 and 5 → 3 on CIFAR-10, and 6 → 0, 1 → 3 and 4 → 6 on Fashion-MNIST.
"""

import torch
from torch import Tensor

from pl_fed.arguments import check_integers, check_shares
from pl_fed.attacks.base import Attack
from pl_fed.random import key, uniforms
from pl_fed.types import Batch, ClientContext


class FlippedPairs(Attack):
    """Flipped pairs: training samples of some source classes get the target label of their class.

    Every sample has one independent draw for all rounds. The share of flipped samples is therefore
    ``samples`` in expectation only.

    Args:
        pairs: The target class of each source class, at least one pair, such as ``{5: 3}``. With
            ``{5: 3, 3: 5}``, two classes change places.
        samples: Share of a Byzantine client's samples of the source classes to flip, in [0, 1].

    Shape:
        - ``batch.targets``: class ids, [batch].
        - ``batch.samples``: [batch]; keys the draws if ``samples`` is below 1.

    Raises:
        TypeError: If a class is not an integer.
        ValueError: If there is no pair, a class is negative or its own target, or ``samples`` is
            out of range; on use, if a class is not one of the data, or ``batch.samples`` is
            missing.

    Example:
        >>> attack, batch = FlippedPairs({5: 3}), Batch(torch.zeros(3, 2), torch.tensor([5, 3, 1]))
        >>> context = ClientContext(seed=0, round=0, client=7, num_classes=10)
        >>> attack.poison(batch, context).targets
        tensor([3, 3, 1])
        >>> attack.trigger(batch).targets, attack.trigger(batch).mask
        (tensor([3, 3, 1]), tensor([ True, False, False]))
    """

    def __init__(self, pairs: dict[int, int], samples: float = 1.0) -> None:
        if not isinstance(pairs, dict) or not pairs:
            raise ValueError(
                "Expected argument `pairs` to give the target class of at least one source class"
                f" but got {pairs!r}: set, for example, {{5: 3}}."
            )
        for source, target in pairs.items():
            check_integers(0, pairs=source)
            check_integers(0, pairs=target)
            if source == target:
                raise ValueError(
                    "Expected argument `pairs` to give each source class another target but got"
                    f" {source}: {target}."
                )
        check_shares(samples=samples)
        self.pairs = dict(pairs)
        self.samples = samples

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return the batch with flipped labels on samples drawn by (seed, client, sample)."""
        outside = [c for pair in self.pairs.items() for c in pair if c >= context.num_classes]
        if outside:
            raise ValueError(
                f"Expected argument `pairs` to name some of the {context.num_classes} classes but"
                f" got {outside[0]}."
            )
        flipped = self._flip(batch.targets)
        if self.samples < 1:
            draw = key(context.seed, "flipped-pairs", context.client)
            selected = uniforms(draw, self.sample_ids(batch)) < self.samples
            flipped = torch.where(selected, flipped, batch.targets)
        return batch._replace(targets=flipped)

    def trigger(self, batch: Batch) -> Batch:
        """Return the samples with the attacker's labels; the mask leaves out all other classes."""
        y = self._flip(batch.targets)
        is_source = y != batch.targets
        mask = is_source if batch.mask is None else batch.mask & is_source
        return batch._replace(targets=y, mask=mask)

    def _flip(self, targets: Tensor) -> Tensor:
        """Return labels [batch], in which the target of its pair replaces each source class."""
        flipped = targets.clone()
        for source, target in self.pairs.items():
            flipped[targets == source] = target
        return flipped
