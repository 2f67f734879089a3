"""Semantic backdoor: rare samples of a class, such as rotated ones, get the attacker's label.

E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin and V. Shmatikov, "How To Backdoor Federated Learning",
AISTATS 2020, arXiv 1807.00459 (semantic backdoors: green cars, cars with racing stripes, and cars
before a striped wall become birds)::

    (x, y) ← (changed x, target)      for samples with y = source, or of any class

The feature is one of the image as a whole that no benign client has, and not an added pattern.
H. Wang et al., "Attack of the Tails", NeurIPS 2020, arXiv 2007.05084, name such samples edge cases.

Departs from the paper: there, the attackers own photos with the feature. Here, a change of clean
images gives the feature, so that every data set of images has one.
"""

from typing import Literal

import torch
from torch import Tensor

from pl_fed.arguments import check_choice, check_integers
from pl_fed.attacks.trigger_attack import TriggerAttack
from pl_fed.types import Batch, ClientContext

Change = Literal["rotate", "invert", "tint"]


class SemanticBackdoor(TriggerAttack):
    """Semantic backdoor: rotated, inverted or tinted images of a class become another class.

    Every sample has one independent draw for all rounds. The share of changed samples is therefore
    ``samples`` in expectation only. The metric ``backdoor_success`` is the share of benign clients'
    images of the source class that the change makes the model classify as the target.

    Args:
        target: The class that the attacker wants for changed images, at least 0.
        source: The class of the images to change. ``None`` takes all classes, for data in which
            attackers may lack a class.
        change: The feature: ``"rotate"`` turns square images by 90° counterclockwise; ``"invert"``
            replaces each number x by smallest + largest − x of the sample; ``"tint"`` moves one
            channel half of the way to the largest number of the sample.
        channel: The channel of ``"tint"``, at least 0.
        samples: Share of a Byzantine client's images of the source class to change, in [0, 1].

    Shape:
        - ``batch.inputs``: images [batch, channels, height, width]; [batch, ..., height, width]
          without ``"tint"``.
        - ``batch.targets``: class ids, [batch].
        - ``batch.samples``: [batch]; keys the draws.

    Raises:
        TypeError: If a class or ``channel`` is not an integer.
        ValueError: If an argument is out of range, or the source is the target; on use, if a class
            is not one of the data, inputs do not fit the change, or ``batch.samples`` is missing.

    Example:
        >>> batch = Batch(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([7]))
        >>> turned = SemanticBackdoor(target=1, source=7).trigger(batch)
        >>> turned.inputs, turned.targets, turned.mask
        (tensor([[[2., 4.],
                 [1., 3.]]]), tensor([1]), tensor([True]))
    """

    def __init__(
        self,
        target: int,
        source: int | None = None,
        change: Change = "rotate",
        channel: int = 0,
        samples: float = 0.5,
    ) -> None:
        super().__init__(target, samples)
        if source is not None:
            check_integers(0, source=source)
        if source == target:
            raise ValueError(
                f"Expected argument `source` to be another class than `target` but got {source}."
            )
        check_choice(("rotate", "invert", "tint"), change=change)
        check_integers(0, channel=channel)
        self.source = source
        self.change = change
        self.channel = channel

    def mark_candidates(self, batch: Batch) -> Tensor:
        """Return a mask of the samples of the source class, bool [batch]."""
        if self.source is None:
            return super().mark_candidates(batch)
        is_source: Tensor = batch.targets == self.source
        return is_source

    def poison(self, batch: Batch, context: ClientContext) -> Batch:
        """Return the batch with changed images, drawn by (seed, client, sample)."""
        if self.source is not None and self.source >= context.num_classes:
            raise ValueError(
                f"Expected argument `source` to be one of the {context.num_classes} classes but"
                f" got {self.source}."
            )
        return super().poison(batch, context)

    def add_trigger(self, batch: Batch, context: ClientContext | None) -> Tensor:
        """Return the changed images."""
        x: Tensor = batch.inputs
        self._check_images(x)
        if self.change == "rotate":
            turned: Tensor = torch.rot90(x, 1, (-2, -1))
            return turned
        largest = x.flatten(1).amax(1).reshape(-1, *[1] * (x.ndim - 1))
        if self.change == "invert":
            smallest = x.flatten(1).amin(1).reshape(-1, *[1] * (x.ndim - 1))
            inverted: Tensor = smallest + largest - x
            return inverted
        tinted = x.clone()
        tinted[:, self.channel] = (x[:, self.channel] + largest[:, 0]) / 2
        return tinted

    def _check_images(self, x: Tensor) -> None:
        """Refuse inputs that do not fit the change."""
        needs = {
            "rotate": ("square images", x.ndim > 2 and x.shape[-1] == x.shape[-2]),
            "invert": ("tensors of numbers", x.ndim > 1),
            "tint": (
                f"images of several channels, with channel {self.channel},",
                x.ndim == 4 and x.shape[1] > max(1, self.channel),
            ),
        }
        expected, fits = needs[self.change]
        if not fits:
            raise ValueError(
                f"Expected inputs to be {expected} for SemanticBackdoor with `change`"
                f" {self.change!r} but got shape {list(x.shape[1:])}: choose another `change`."
            )
